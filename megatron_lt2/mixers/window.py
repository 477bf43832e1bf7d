"""Sliding-window attention: the layer of `full` whose queries see the last `size` tokens only.

    o_t = softmax over s of (q_t^T k_s / sqrt(d)) v_s,   t - size < s <= t

Heads, rotary positions, output gate, parameters and checkpoint keys are those of `full`, so that a
trained layer can change from one to the other. One layer looks size - 1 tokens back; N layers run
in T loops reach T * N * (size - 1) (LT2, arXiv 2605.20670; docs/theory.md).
"""

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.attention import (
    attention_flops,
    attention_heads,
    attention_parameters,
    attention_spec,
)
from megatron_lt2.mixers.entry import MixerEntry


def _spec(model: ModelConfig, kernels: str) -> ModuleSpec:
    return attention_spec(model, kernels, (model.window.size,))


def mean_keys(length: int, size: int) -> float:
    """Keys that a token of a sequence of `length` sees on average."""
    whole = min(length, size)
    # The first `whole` tokens see 1, 2, .. keys, every later one `size`.
    return (whole * (whole + 1) / 2 + (length - whole) * size) / length


MIXER = MixerEntry(
    spec=_spec,
    heads=attention_heads,
    parameters=attention_parameters,
    matrix_parameters=attention_parameters,
    token_flops=lambda model, length: attention_flops(model, mean_keys(length, model.window.size)),
)
