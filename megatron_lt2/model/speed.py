"""How long a step takes: a small model of one rank's work and of what travels.

A step is M micro-batches through the slowest pipeline stage, the time the pipeline fills and
drains, the optimizer, and what cannot hide behind work:

    step = M * pass * (1 + (P - 1) / (M * T)) + optimizer + exposed data-parallel traffic
    pass = max(kernels, launches) + gaps + tensor- and context-parallel traffic

Kernels: matrix products at the device's matrix ceiling; attention and recurrences at a rate of
their own; everything else by the memory traffic that it makes, taken to be a fixed multiple of what
a layer keeps for its backward pass (`activations.py`). Between ranks: bytes over the bandwidth of
the slowest link that the group needs, plus a latency a message. Messages between pipeline stages
hide behind work, but for their latency.

Gradients of a weight that is used in every loop are complete only when the *first* loop is undone,
so their reduction can hide behind one T-th of the last backward pass; the gather of updated weights
can hide behind the first loop of the next step.

The constants were fitted to one profile of one H200 (docs/performance.md). Nothing was measured on
more than one GPU.
"""

from dataclasses import dataclass, field, replace

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.mixers.registry import RECURRENT, get_mixer
from megatron_lt2.model.activations import (
    TRANSITIONS,
    Share,
    exchanges_heads,
    layer_bytes,
    linear_mixer,
)
from megatron_lt2.model.cost import (
    data_parallel,
    recomputed_share,
    stage_parameters,
    stages,
    value_bytes,
)
from megatron_lt2.model.traffic import Transfer, transfers

RECURRENCE_SHARE = 0.0446
"""Rate of the recurrences' declared operations, as a share of the matrix ceiling."""

ATTENTION_SHARE = 0.5
"""Rate of attention's operations (half of the square), as a share of the matrix ceiling."""

TRAFFIC = 5.5
"""Bytes that a layer's other kernels move, forward and backward, for each byte that it keeps."""

AGAIN_TRAFFIC = 3.0
"""Bytes moved for each byte that `memory.recompute_cheap` makes again: one or two are read for it,
and it is written."""

HEAD_TRAFFIC = 30.0
"""Bytes moved for each of the logits: written twice, read and turned into gradients, and read for
two products; half of it is the weight's fp32 gradient, which is read and written for each chunk."""

LAUNCH_S = 5e-3
"""Time in which the host launches a layer's kernels, forward and backward: a floor."""

GAP_S = 0.4e-3
"""Time a layer and pass, forward and backward, in which the device waits although it has work."""

OPTIMIZER_S = 0.85e-11
"""Of AdamW, a parameter."""

LATENCY_S = {"inside": 12e-6, "across": 30e-6}
"""Of a message or collective, inside a node and across nodes."""


@dataclass(frozen=True)
class Machine:
    """The GPUs.

    matrix: bf16 matrix ceiling, operations a second.
    memory: bandwidth that kernels reach, bytes a second.
    inside, across: bytes a second that a GPU sends inside its node and across nodes.
    gpus_per_node: GPUs that `inside` joins.
    """

    matrix: float = 790e12
    memory: float = 3.8e12
    inside: float = 360e9
    across: float = 45e9
    gpus_per_node: int = 8


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what they are spent on; `parts` sum to `total`."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """The step."""
        return sum(self.parts.values())

    @property
    def bound(self) -> str:
        """What takes most."""
        return max(self.parts, key=lambda name: self.parts[name])


def bandwidth(machine: Machine, ranks: int, stride: int) -> tuple[float, str]:
    """Bytes a second that one rank of a group sends, and whether it stays inside a node.

    Args:
        ranks: of the group.
        stride: distance of neighbours in the global order of ranks (tensor, context, data,
            pipeline from the inside out, as megatron-core has it).
    """
    if ranks * stride <= machine.gpus_per_node:
        return machine.inside, "inside"
    # Every member in a node drives its own network port.
    together = min(ranks, max(1, machine.gpus_per_node // stride))
    return min(machine.inside, together * machine.across), "across"


def transfer_seconds(one: Transfer, config: RunConfig, world_size: int, machine: Machine) -> float:
    """Time of a transfer, nothing of it hidden."""
    parallel = config.parallel
    replicas, _ = data_parallel(config, world_size)
    inner = parallel.tensor * parallel.context
    stride = {
        "tensor": 1,
        "context": parallel.tensor,
        "data": parallel.tensor,
        "pipeline": inner * replicas,
    }[one.group]
    if one.group == "pipeline":  # a message has one sender
        near = parallel.pipeline * stride <= machine.gpus_per_node
        speed, where = (machine.inside, "inside") if near else (machine.across, "across")
    else:
        speed, where = bandwidth(machine, one.ranks, stride)
    return one.bytes / speed + one.messages * LATENCY_S[where]


def layer_seconds(name: str, config: RunConfig, share: Share, machine: Machine) -> dict[str, float]:
    """Kernel time of one forward and backward pass of a layer, by kind."""
    model, length = config.model, config.data.sequence_length
    linear = linear_mixer(name, model) if name in RECURRENT else None
    if linear is not None:
        matrices = linear.layout.matrix_parameters(model.hidden_size)
    else:
        matrices = get_mixer(name).matrix_parameters(model)
    matrices += 3 * model.hidden_size * model.ffn_width
    per_rank = share.tokens / share.tensor
    # A backward pass costs two forward passes; recomputation one more.
    factor = 3 + recomputed_share(config)
    out = {"matrix products": factor * 2 * matrices * per_rank / machine.matrix}
    if linear is not None:
        operations, layout = linear.flops(), linear.layout
        by_state = share.context > 1 and not share.by_heads
        if by_state and TRANSITIONS.get(name, "matrix") == "matrix":
            # The kernel carries K more value columns (recurrent/shards.py).
            operations *= 1 + layout.head_k_dim / layout.head_v_dim
        rate = RECURRENCE_SHARE * machine.matrix
        out["recurrences"] = factor * operations * per_rank / rate
    else:
        operations = get_mixer(name).token_flops(model, length)
        by_heads = exchanges_heads(model, share.tensor, share.context)
        if share.context > 1 and name == "full" and not by_heads:
            # The last rank's queries see nearly all keys.
            operations *= (2 * share.context - 1) / share.context
        rate = ATTENTION_SHARE * machine.matrix
        out["attention"] = factor * operations * per_rank / rate
    whole = layer_bytes(name, model, replace(share, cheap=False))
    moved = factor / 3 * TRAFFIC * whole
    if share.cheap:
        moved += AGAIN_TRAFFIC * (whole - layer_bytes(name, model, share))
    out["memory traffic"] = moved * share.tokens / machine.memory
    return out


def _stage_parts(
    config: RunConfig, names: list[str], last: bool, share: Share, machine: Machine
) -> dict[str, float]:
    """One micro-batch through one stage, all loops, without what travels."""
    model = config.model
    assert model.vocab_size is not None
    once = {name: layer_seconds(name, config, share, machine) for name in set(names)}
    parts: dict[str, float] = {}
    for name in names:
        for kind, seconds in once[name].items():
            parts[kind] = parts.get(kind, 0.0) + model.loops * seconds
    if last:
        tokens = share.tokens / share.tensor
        # Forward, again in the backward pass, and that pass, which is twice as much.
        heads = model.heads_run
        head = 4 * 2 * model.vocab_size * model.hidden_size * tokens / machine.matrix
        parts["matrix products"] += heads * head
        moved = HEAD_TRAFFIC * model.vocab_size * tokens
        parts["memory traffic"] += heads * moved / machine.memory
    passes = len(names) * model.loops
    launches = passes * LAUNCH_S * (1 + recomputed_share(config) / 3)
    parts["host"] = max(0.0, launches - sum(parts.values())) + passes * GAP_S
    return parts


def estimate_step(config: RunConfig, world_size: int, machine: Machine) -> StepTime:
    """Time of one optimizer step."""
    parallel, loops = config.parallel, config.model.loops
    replicas, micro_batches = data_parallel(config, world_size)
    share = Share.of(config, value_bytes(config))
    work = stages(config)
    every = [
        _stage_parts(config, names, stage == len(work) - 1, share, machine)
        for stage, names in enumerate(work)
    ]
    slowest = max(every, key=lambda parts: sum(parts.values()))
    parts = {kind: seconds * micro_batches for kind, seconds in slowest.items()}
    sent: dict[str, float] = {}
    for one in transfers(config, world_size):
        seconds = transfer_seconds(one, config, world_size, machine)
        if one.group == "pipeline":
            hidden = sum(parts.values())
            waits = one.messages * LATENCY_S["across"]
            seconds = max(waits, seconds - hidden)
        name = one.kind if one.group == "data" else one.group
        sent[name] = sent.get(name, 0.0) + seconds
    for group in ("tensor", "context"):
        if group in sent:
            parts[f"{group} parallel"] = sent[group]
    busy = sum(parts.values())
    if parallel.pipeline > 1:
        parts["pipeline"] = sent["pipeline"]
        parts["bubble"] = busy * (parallel.pipeline - 1) / (micro_batches * loops)
    one_loop = busy / micro_batches / loops
    exposed = max(0.0, sent.get("gradients", 0.0) - 2 / 3 * one_loop)
    exposed += max(0.0, sent.get("parameters", 0.0) - 1 / 3 * one_loop)
    if replicas * parallel.context > 1:
        parts["data parallel"] = exposed
    sharers = replicas * parallel.context if parallel.distributed_optimizer else 1
    parts["optimizer"] = max(stage_parameters(config)) / sharers * OPTIMIZER_S
    return StepTime(parts)
