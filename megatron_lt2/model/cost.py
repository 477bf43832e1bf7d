"""Peak memory of one rank of a parallel layout. Plain arithmetic.

Memory has a fixed part (weights, fp32 gradients, fp32 master weights and Adam's two moments, the
last two sharded over the data- and context-parallel ranks) and one that grows with the tokens of a
micro-batch (`activations.py`, times the loops). It is looked at in three moments, since different
things are alive in them:

- at the loss: all activations, the logits of a chunk of tokens and the head's gradients;
- after the last loop's backward pass: the other loops' activations, a layer in work, and, without a
  pipeline, 16-bit gradients of all layers, which autograd adds up until the first loop is done;
- in the optimizer step: one fp32 temporary of the sharded parameters.

A pipeline with loops runs megatron-core's interleaved schedule with a chunk a loop: the first stage
has 2 (P - 1) + (T - 1) P + 1 passes of a micro-batch through its layers in flight, T if P = 1.
"""

import math
from dataclasses import dataclass

from megatron_lt2.config.schema import ModelConfig, RunConfig, round_up
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, get_mixer
from megatron_lt2.model.activations import (
    FLOAT,
    Share,
    layer_bytes,
    linear_mixer,
    residual_bytes,
    state_map_bytes,
)
from megatron_lt2.model.pattern import expand_pattern

VOCAB_MULTIPLE = 16
"""As in model/core_config.py."""

GATHERED_BYTES = 2**26
"""Maps of all ranks up to this size are gathered, else scanned: parallel/state_exchange.py."""

CHUNK_BYTES, MIN_CHUNK = 2**29, 128
"""Logits that exist at a time, in bytes, and tokens at least: kernels/linear_cross_entropy.py."""

WORKSPACE = 0.1e9
"""Bytes of cuBLAS's and the kernels' workspaces."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Peak bytes of one rank, of the stage that needs most, by what they hold at that moment."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        fixed = self.parameters + self.gradients + self.optimizer
        return fixed + self.activations + self.logits + self.other


def chunk_bytes(tokens: float, vocabulary: float, size: int) -> float:
    """Bytes of the logits that exist at a time, of so many columns of a rank."""
    fitting = CHUNK_BYTES // (vocabulary * size) // MIN_CHUNK * MIN_CHUNK
    return min(tokens, max(MIN_CHUNK, fitting)) * vocabulary * size


def value_bytes(config: RunConfig) -> int:
    """Bytes of a weight or activation on a GPU."""
    return 4 if config.precision.dtype == "fp32" else 2


def recomputed_share(config: RunConfig) -> float:
    """Share of a stage's layer passes that run again in the backward pass, whole passes."""
    passes = [len(names) * config.model.loops for names in stages(config)]
    return min(math.ceil(config.memory.recompute_layers * n) / n for n in passes)


def data_parallel(config: RunConfig, world_size: int) -> tuple[int, int]:
    """Ranks that see different sequences, and micro-batches of each a step."""
    parallel, training = config.parallel, config.training
    replicas = max(1, world_size // (parallel.tensor * parallel.pipeline * parallel.context))
    return replicas, max(1, training.global_batch_size // (training.micro_batch_size * replicas))


def mixer_names(model: ModelConfig) -> list[str]:
    """The mixer of every physical layer."""
    return expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)


def stages(config: RunConfig) -> list[list[str]]:
    """The mixers of each pipeline stage."""
    names = iter(mixer_names(config.model))
    layers = config.parallel.stage_layers(config.model.num_layers)
    return [[next(names) for _ in range(count)] for count in layers]


def layer_parameters(name: str, model: ModelConfig) -> int:
    """Parameters of one layer with mixer `name`."""
    d = model.hidden_size
    if name in RECURRENT:
        mixer = linear_mixer(name, model).layout.parameters(d)
    else:
        mixer = get_mixer(name).parameters(model)
    return mixer + 3 * d * model.ffn_width + model.layer_norms * d


def stage_parameters(config: RunConfig) -> list[float]:
    """Parameters of one rank of each pipeline stage, with the vocabulary's padding.

    Norms, which are on every tensor-parallel rank, are counted as if they were cut: they are less
    than a thousandth.
    """
    model, parallel = config.model, config.parallel
    assert model.vocab_size is not None
    table = round_up(model.vocab_size, VOCAB_MULTIPLE * parallel.tensor) * model.hidden_size
    each = {name: layer_parameters(name, model) for name in set(mixer_names(model))}
    counts = [float(sum(each[name] for name in names)) for names in stages(config)]
    counts[0] += table
    # The head; tied to the embedding, it is a copy of its own on another stage only.
    if not model.tie_embeddings or len(counts) > 1:
        counts[-1] += table
    counts[-1] += model.hidden_size
    if model.loop_residual == "per_channel":
        counts[-1] += model.loops * model.hidden_size
    if model.exit_gate:
        counts[-1] += model.hidden_size + 1
    return [count / parallel.tensor for count in counts]


def passes_in_flight(config: RunConfig, stage: int, micro_batches: int) -> int:
    """Passes of a micro-batch through the layers of `stage` whose activations are kept at once."""
    loops, ranks = config.model.loops, config.parallel.pipeline
    if ranks == 1:
        return loops
    if loops == 1:
        return min(ranks - stage, micro_batches)
    return min(2 * (ranks - stage - 1) + (loops - 1) * ranks + 1, loops * micro_batches)


def estimate_memory(config: RunConfig, world_size: int, bytes_per_value: int) -> MemoryEstimate:
    """Peak memory of one rank in training, of the pipeline stage that needs most.

    Args:
        config: the run; vocab_size is set.
        world_size: ranks in all.
        bytes_per_value: of weights and activations.
    """
    parallel = config.parallel
    replicas, micro_batches = data_parallel(config, world_size)
    sharers = replicas * parallel.context if parallel.distributed_optimizer else 1
    share = Share.of(config, bytes_per_value)
    work = zip(stages(config), stage_parameters(config), strict=True)
    estimates = [
        _stage_memory(config, share, stage, names, count, sharers, micro_batches)
        for stage, (names, count) in enumerate(work)
    ]
    return max(estimates, key=lambda estimate: estimate.total)


def _stage_memory(
    config: RunConfig,
    share: Share,
    stage: int,
    names: list[str],
    count: float,
    sharers: int,
    micro_batches: int,
) -> MemoryEstimate:
    model, parallel, size = config.model, config.parallel, share.size
    last = stage == parallel.pipeline - 1
    passes = passes_in_flight(config, stage, micro_batches)
    layers = {
        n: share.tokens * layer_bytes(n, model, share) + _state_bytes(n, model, share)
        for n in set(names)
    }
    stream = share.tokens * residual_bytes(model, share)
    again = recomputed_share(config)
    one_pass = again * len(names) * stream + (1 - again) * sum(layers[n] for n in names)
    if parallel.pipeline > 1:
        one_pass += 2 * stream  # what was received: the state and the loop's input
    kept = passes * one_pass
    if last:
        kept += 2 * stream  # the final norm's input and output
        if model.inter_loop_norm or model.loss == "exits":
            kept += (passes - 1) * stream  # one of the two is the next loop's input
    logits = head_bytes(config, share) if last else 0.0
    # A layer in work: what it keeps (again, if recomputed) and the gradient of its widest tensors.
    working = max(layers.values()) * (2 if again else 1)
    undone = kept - one_pass if passes > 1 else 0.0
    at_loss, later = (kept, logits, 0.0), (undone, 0.0, working)
    step = (0.0, 0.0, count * FLOAT / sharers)
    activations, head, other = max(at_loss, later, step, key=sum)
    master = FLOAT if size == 2 else 0
    return MemoryEstimate(
        parameters=count * size,
        gradients=count * FLOAT,
        optimizer=count * (2 * FLOAT + master) / sharers,
        activations=activations,
        logits=head,
        other=other + WORKSPACE,
    )


def head_bytes(config: RunConfig, share: Share) -> float:
    """Alive at the loss: logits of a chunk or, later, what autograd takes for the weight, and the
    hidden states' gradient.

    The weight's gradient itself is added to the gradient buffer (parallel/weight_gradient.py), but
    for the copy of a tied embedding on a last stage, which has it in fp32 first.
    """
    model, tensor, width = config.model, config.parallel.tensor, config.model.hidden_size
    assert model.vocab_size is not None
    columns = round_up(model.vocab_size, VOCAB_MULTIPLE * tensor) / tensor
    first, copy = chunk_bytes(share.tokens, columns, share.size), columns * width * share.size
    hidden = share.tokens * width * share.size * (2 if share.sequence else 1)  # and gathered ones
    if not model.tie_embeddings:
        return hidden + max(first, copy)
    if config.parallel.pipeline == 1:
        return hidden + first
    return hidden + columns * width * FLOAT + max(first, copy)


def _state_bytes(name: str, model: ModelConfig, share: Share) -> float:
    """Kept by one pass of a linear layer for the states that travel, whatever the tokens."""
    if share.context == 1 or share.by_heads or name not in RECURRENT:
        return 0.0
    own = share.rows * state_map_bytes(name, model, share)
    if own * share.context <= GATHERED_BYTES:
        return 2 * own * share.context  # the gathered maps, and the states of the fold
    return 3 * own * math.ceil(math.log2(share.context))
