"""What a model is: its parameters and floating-point operations. Plain arithmetic.

`cost.py` says what it costs on a number of ranks.
"""

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer
from megatron_lt2.model.cost import MemoryEstimate, estimate_memory
from megatron_lt2.model.pattern import expand_pattern

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
    layers += model.num_layers * (3 * d * model.ffn_width + 2 * d)
    residual = model.loops * d if model.loop_residual == "per_channel" else 0
    embeddings = model.vocab_size * d * (1 if model.tie_embeddings else 2)
    return layers + residual + d + embeddings


def forward_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Operations a token of one forward pass, every loop counted; a multiply-add is two operations.

    Norms, activations and element-wise gates are left out, as usual, and so are embedding
    look-ups.
    """
    assert model.vocab_size is not None
    names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    per_loop = 0.0
    for name in names:
        mixer = get_mixer(name)
        per_loop += 2 * mixer.matrix_parameters(model) + mixer.token_flops(model, sequence_length)
        per_loop += 2 * 3 * model.hidden_size * model.ffn_width
    return model.loops * per_loop + 2 * model.vocab_size * model.hidden_size


def training_flops_per_token(model: ModelConfig, sequence_length: int) -> float:
    """Forward and backward, which costs twice the forward. Recomputation is not counted."""
    return 3 * forward_flops_per_token(model, sequence_length)
