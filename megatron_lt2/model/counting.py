"""What a model is: its parameters and floating-point operations. Plain arithmetic.

`cost.py` says what it costs on a number of ranks.
"""

from dataclasses import replace

from megatron_lt2.config.mixers import WindowConfig
from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer
from megatron_lt2.model.cost import MemoryEstimate, estimate_memory
from megatron_lt2.model.pattern import MASKS, expand_pattern, loop_windows

__all__ = [
    "MemoryEstimate",
    "count_parameters",
    "estimate_memory",
    "forward_flops_per_token",
    "training_flops_per_token",
]


def count_parameters(model: ModelConfig) -> int:
    """Parameters; a physical layer counts once, padding rows of the vocabulary do not."""
    assert model.vocab_size is not None
    d = model.hidden_size
    names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    layers = sum(get_mixer(name).parameters(model) for name in names)
    layers += model.num_layers * (3 * d * model.ffn_width + model.layer_norms * d)
    residual = model.loops * d if model.loop_residual == "per_channel" else 0
    embeddings = model.vocab_size * d * (1 if model.tie_embeddings else 2)
    gate = d + 1 if model.exit_gate else 0
    return layers + residual + gate + d + embeddings


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations a token of one forward pass with its loss, every loop counted; a multiply-add is
    two operations. The loss "exits" goes through the head in every loop.

    Norms, activations and element-wise gates are left out, as usual, and so are embedding
    look-ups.
    """
    assert model.vocab_size is not None
    names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    by_loop = loop_windows(
        model.pattern, model.num_layers, model.loops, model.window.size, MIXER_NAMES
    )
    layers = 0.0
    for i, name in enumerate(names):
        mixer = get_mixer(name)
        matrices = mixer.matrix_parameters(model) + 3 * model.hidden_size * model.ffn_width
        layers += 2 * model.loops * matrices
        if by_loop is None or name not in MASKS:
            layers += model.loops * mixer.token_flops(model, sequence_length)
            continue
        for windows in by_loop:
            # A window as long as the sequence is full attention.
            masked = replace(model, window=WindowConfig(size=windows[i] or sequence_length))
            layers += get_mixer("window").token_flops(masked, sequence_length)
    heads = model.heads_run
    ends = 2 * model.hidden_size * (heads * model.vocab_size + heads - 1)  # and the gate
    return layers + ends


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward and backward, which costs twice the forward.

    Recomputation is not counted, of layers as little as of the logits, which the head's backward
    pass always computes again.
    """
    return 3 * forward_flops_per_token(model, sequence_length)
