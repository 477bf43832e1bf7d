"""Bytes that a rank sends in a step, and in how many messages. Plain arithmetic.

An all-gather or a reduce-scatter of N bytes over n ranks sends (n - 1) / n N, an all-reduce twice
that, an all-to-all (n - 1) / n of what the rank holds, an all-gather of what each rank has of b
bytes (n - 1) b. "data" traffic is once a step; the rest is for every micro-batch, loop and layer.
tests/distributed/test_traffic.py holds all of it against the calls that ranks make.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import RECURRENT
from megatron_lt2.model.activations import (
    FLOAT,
    Share,
    exchanges_heads,
    linear_mixer,
    residual_bytes,
    state_map_bytes,
)
from megatron_lt2.model.cost import (
    GATHERED_BYTES,
    data_parallel,
    recomputed_share,
    stage_parameters,
    stages,
    value_bytes,
)
from megatron_lt2.ops.sparse_layout import key_channels, sections
from megatron_lt2.recurrent.base import Layout


@dataclass(frozen=True)
class Transfer:
    """Something that a rank sends again and again.

    kind: "tensor", "halo", "state", "heads", "attention", "pipeline", "gradients" or "parameters".
    group: "tensor", "context", "pipeline" or "data" (all ranks that share weights).
    bytes: sent in a step, forward and backward, each time by the rank that sends most.
    messages: collectives or sends in a step.
    ranks: of the group.
    """

    kind: str
    group: str
    bytes: float
    messages: float
    ranks: int


QUERIES = 128
"""As in ops/gathered.py."""


def _collective(size: float, ranks: int) -> float:
    return size * (ranks - 1) / ranks


def transfers(config: RunConfig, world_size: int) -> list[Transfer]:
    """What a rank sends in a step, of the pipeline stage that sends most of each kind."""
    parallel, size = config.parallel, value_bytes(config)
    share = Share.of(config, size)
    replicas, micro_batches = data_parallel(config, world_size)
    found: list[Transfer] = []
    if parallel.tensor > 1:
        found.append(_tensor(config, share, micro_batches))
    if parallel.context > 1:
        found += [_times(t, micro_batches) for t in _context(config, share)]
    if parallel.pipeline > 1:
        found.append(_times(_pipeline(config, share), micro_batches))
    sharers = replicas * parallel.context
    if sharers > 1:
        count = max(stage_parameters(config))
        reduced = _collective(count * FLOAT, sharers)
        if parallel.distributed_optimizer:
            found.append(Transfer("gradients", "data", reduced, 1, sharers))
            gathered = _collective(count * size, sharers)
            found.append(Transfer("parameters", "data", gathered, 1, sharers))
        else:
            found.append(Transfer("gradients", "data", 2 * reduced, 1, sharers))
    return [one for one in found if one.messages]


def _times(one: Transfer, count: float) -> Transfer:
    return Transfer(one.kind, one.group, one.bytes * count, one.messages * count, one.ranks)


def _tensor(config: RunConfig, share: Share, micro_batches: int) -> Transfer:
    """Of the last stage if that has the head.

    Forward: the output of mixer and FFN is all-reduced, or reduce-scattered and gathered again
    behind the next norm, which is as much. Backward the same; under sequence parallelism each
    projection's input is gathered once more for the weight's gradient, and the gradients of norms
    are summed once a step. Recomputation repeats the forward part.
    """
    model, ranks, size = config.model, config.parallel.tensor, share.size
    whole = share.tokens * model.hidden_size * size
    forward = 2 * 2 * _collective(whole, ranks)
    backward = forward + (2 * _collective(whole, ranks) if share.sequence else 0)
    calls_forward = 4 if share.sequence else 2
    calls_backward = calls_forward + (2 if share.sequence else 0)
    again = 1 + recomputed_share(config)
    total = calls = 0.0
    for names in stages(config):
        sent = messages = 0.0
        for name, layers in Counter(names).items():
            extra, count = _shared_sections(name, model, share)
            norm, calls_norm = _norm_gradient(name, model, share)
            sent += layers * (again * (forward + extra) + backward + extra + norm)
            messages += layers * (again * (calls_forward + count) + calls_backward + count)
            messages += layers * calls_norm
        if sent >= total:
            total, calls = sent * model.loops, messages * model.loops
    # Embedding out, heads in and their gradients; a loss exchanges three numbers a token, in two
    # calls.
    heads = model.heads_run
    ends, calls_ends = 2 + 2 * heads, 1 + heads
    number = _collective(share.tokens * FLOAT, ranks)
    if share.sequence:
        ends = calls_ends = 2 + 3 * heads
        total += (heads - 1) * number  # the gate's logits
        calls += heads - 1
    total += ends * _collective(whole, ranks) + 2 * 3 * heads * number
    total, calls = total * micro_batches, (calls + calls_ends + 2 * heads) * micro_batches
    if share.sequence:
        total += 2 * _collective(_norm_numbers(config) * FLOAT, ranks)
        calls += 1
    return Transfer("tensor", "tensor", total, calls, ranks)


def _norm_numbers(config: RunConfig) -> float:
    """Parameters of the last stage that sequence-parallel ranks have in common."""
    model, layers = config.model, len(stages(config)[-1])
    numbers = layers * model.layer_norms + 1
    if model.loop_residual == "per_channel":
        numbers += model.loops
    return numbers * model.hidden_size + (model.hidden_size + 1 if model.loss == "exits" else 0)


def _norm_gradient(name: str, model: ModelConfig, share: Share) -> tuple[float, int]:
    """Bytes and collectives of one backward pass for a norm's weight that all heads share."""
    if name not in RECURRENT or linear_mixer(name, model).layout.norm != "head":
        return 0.0, 0
    channels = linear_mixer(name, model).layout.norm_channels
    return 2 * _collective(channels * share.size, share.tensor), 1


def _shared_sections(name: str, model: ModelConfig, share: Share) -> tuple[float, int]:
    """Bytes and collectives, one way, of what all heads of a mixer share."""
    if name in SPARSE:
        s = model.mixer_settings(name)
        rows = sections(name, s).get("kv", 0)
        sent, calls = _collective(share.tokens * rows * share.size, share.tensor), int(rows > 0)
        if name == "dsa":
            # One way only, so half of each here: attention's weights summed over all heads, and the
            # indexer's input.
            sent += _collective(share.tokens * s.top_k * FLOAT, share.tensor)
            calls += math.ceil(share.tokens / QUERIES / 2)
            if share.sequence:
                sent += _collective(share.tokens * model.hidden_size * share.size, share.tensor) / 2
        return sent, calls
    if name not in RECURRENT:
        return 0.0, 0
    layout = linear_mixer(name, model).layout
    rows = sum(map(layout.rows, layout.gathered_names))
    if share.by_heads:  # of the whole sequence
        shared = (n for n, s in layout.sections.items() if s.shared)
        rows += (share.context - 1) * sum(map(layout.rows, shared))
    sent = _collective(share.tokens * rows * share.size, share.tensor)
    calls = int(rows > 0)
    if layout.norm == "layer":  # one sum of squares a token, all-reduced
        sent += 2 * _collective(share.tokens * FLOAT, share.tensor)
        calls += 1
    return sent, calls


def _context(config: RunConfig, share: Share) -> Iterator[Transfer]:
    """Of one micro-batch: halo and state of linear layers, what attention exchanges."""
    model, ranks = config.model, config.parallel.context
    # Forward and backward; the forward part again if recomputed.
    passes = model.loops * (2 + recomputed_share(config))
    kinds = ("halo", "state", "heads", "attention")
    sums: dict[str, list[float]] = {kind: [0.0, 0.0] for kind in kinds}
    for names in stages(config):
        stage = {kind: [0.0, 0.0] for kind in sums}
        for name, layers in Counter(names).items():
            for kind, (sent, messages) in _layer_context(name, config, share).items():
                stage[kind][0] += layers * passes * sent
                stage[kind][1] += layers * passes * messages
        sums = {kind: max(sums[kind], stage[kind]) for kind in sums}
    for kind, (sent, messages) in sums.items():
        yield Transfer(kind, "context", sent, messages, ranks)


def _layer_context(name: str, config: RunConfig, share: Share) -> dict[str, tuple[float, float]]:
    """Bytes and messages that one pass of a layer sends, one way, by kind."""
    model, ranks, size = config.model, share.context, share.size
    if name in RECURRENT:
        layout = linear_mixer(name, model).layout
        if share.by_heads:
            return {"heads": (_heads_bytes(layout, share), 2.0)}
        conv = sum(map(layout.rows, layout.conv_names)) / share.tensor
        halo = share.rows * max(0, layout.conv_size - 1) * conv * size
        own = share.rows * state_map_bytes(name, model, share)
        if own * ranks <= GATHERED_BYTES:
            state = (own * (ranks - 1), 1.0)
        else:
            steps = 1 + math.ceil(math.log2(ranks))
            state = (own * steps, float(steps))
        return {"halo": (halo, float(conv > 0)), "state": state}
    if name in SPARSE:
        # Keys and values to the ranks behind; of `dsa` the indexer's keys too, as a third message.
        s = model.mixer_settings(name)
        channels = key_channels(name, s)
        numbers = 2 * s.num_kv_heads / share.tensor * channels
        if name == "dsa":
            numbers = channels + s.latent_dim if s.kv == "shared" else numbers
            numbers += s.index_dim
        sent = share.tokens * (ranks - 1) * numbers * size
        return {"attention": (sent, 3.0 if name == "dsa" else 2.0)}
    channels = model.attention_head_dim
    q, kv = model.num_heads / share.tensor, model.kv_heads / share.tensor
    if name == "full" and exchanges_heads(model, share.tensor, ranks):
        # q, k and v one way, the output back.
        sent = _collective(share.tokens * (2 * q + 2 * kv) * channels * size, ranks)
        return {"attention": (sent, 2.0)}
    keys = share.tokens * (ranks - 1)
    if name == "window":
        rows = config.training.micro_batch_size
        keys = min(keys, rows * (model.window.size - 1))
    return {"attention": (keys * 2 * kv * channels * size, 1.0)}


def _heads_bytes(layout: Layout, share: Share) -> float:
    """To the heads: all sections but the gate, those that heads share to every rank; and back: the
    output."""
    there = float(layout.heads * layout.head_v_dim)
    for name, section in layout.sections.items():
        if section.shared:
            there += layout.rows(name) * share.context
        elif name != layout.gate:
            there += layout.width(name)
    return _collective(share.tokens * there / share.tensor * share.size, share.context)


def _pipeline(config: RunConfig, share: Share) -> Transfer:
    """Of one micro-batch and a stage between two others: every loop's state, with the loop's input
    if rho needs it, to the next stage, and as large gradients back."""
    model, ranks = config.model, config.parallel.pipeline
    carried = 2 if model.loop_residual == "per_channel" and ranks > 1 else 1
    one = share.tokens * residual_bytes(model, share) * carried
    return Transfer("pipeline", "pipeline", 2 * model.loops * one, 2.0 * model.loops, ranks)
