"""What a model costs: parameters, floating-point operations, memory. Plain arithmetic."""

from dataclasses import dataclass

from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer
from megatron_lt2.model.pattern import expand_pattern


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


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes a rank needs; activations are a rough upper guide without recomputation."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """All of it."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: RunConfig, world_size: int, bytes_per_value: int) -> MemoryEstimate:
    """Memory of one rank in training.

    Activations: about 20 d + 4 f + mixer widths values a token and layer are kept for the backward
    pass, times the loops; `recompute_granularity: full` keeps one d-wide tensor instead.
    """
    model, parallel = config.model, config.parallel
    shards = parallel.tensor * parallel.pipeline
    replicas = world_size // (shards * parallel.context)
    parameters = count_parameters(model) / shards
    tokens = config.training.micro_batch_size * config.data.sequence_length / parallel.context
    d, f = model.hidden_size, model.ffn_width
    per_layer = (16 * d + 4 * f) / parallel.tensor + 4 * d
    if config.megatron.transformer.get("recompute_granularity") == "full":
        per_layer = d
    activations = tokens * model.loops * model.num_layers / parallel.pipeline * per_layer
    assert model.vocab_size is not None
    optimizer_share = max(1, replicas) if parallel.distributed_optimizer else 1
    master = 4 if bytes_per_value == 2 else 0
    return MemoryEstimate(
        parameters=parameters * bytes_per_value,
        gradients=parameters * 4,
        optimizer=parameters * (8 + master) / optimizer_share,
        activations=activations * bytes_per_value,
        logits=tokens * model.vocab_size / parallel.tensor * (4 + 2 * bytes_per_value),
    )
