"""A linear mixer over one context-parallel rank's part of the sequence.

What differs from a whole sequence: the convolution looks back at the rank before
(`parallel/halo.py`), the recurrence gets the state that its tokens find
(`parallel/state_exchange.py`), and rotary positions count from where the document began.
"""

from bisect import bisect_left, bisect_right
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_lt2.parallel.collectives import attach
from megatron_lt2.parallel.sequence import SequenceShard
from megatron_lt2.parallel.state_exchange import state_before
from megatron_lt2.recurrent.base import RecurrentMixer, Scan
from megatron_lt2.recurrent.shards import Span, shard_map


def shard_of(packing: PackedSeqParams | None, ranks: int) -> SequenceShard | None:
    """This rank's part of the sequence; None if it has all of it.

    Raises:
        ValueError: there are several ranks, but the batch was not cut for so many.
    """
    shard = getattr(packing, "shard", None)
    size = 1 if shard is None else shard.size
    if size != ranks:
        raise ValueError(
            f"the batch is cut for {size} context-parallel ranks, but there are {ranks}; "
            "pass a ShardedSequence as packed_seq_params"
        )
    return shard if size > 1 else None


def span_of(shard: SequenceShard) -> Span:
    """What crosses the edges of a rank's tokens."""
    first_inside = bisect_right(shard.borders, shard.start)
    inside = shard.borders[first_inside : bisect_left(shard.borders, shard.stop)]
    first, last = (inside[0], inside[-1]) if inside else (shard.stop, shard.start)
    return Span(shard.continues, shard.continued, first - shard.start, last - shard.start)


def positions_of(shard: SequenceShard, device: torch.device) -> Tensor:
    """Position of each of the rank's tokens in its whole document [1, T]."""
    place = torch.arange(shard.start, shard.stop, device=device)
    if shard.bounds is not None:
        bounds = shard.bounds.to(device=device, dtype=place.dtype)
        place = place - bounds[torch.searchsorted(bounds, place, right=True) - 1]
    return place.unsqueeze(0)


def mix_shard(
    recurrent: RecurrentMixer,
    parts: dict[str, Tensor],
    weights: dict[str, Tensor],
    scan: Scan,
    shard: SequenceShard,
    group: Any,
) -> Tensor:
    """`RecurrentMixer.mix` over a rank's part of the sequence.

    Args:
        recurrent: the mixer.
        parts, weights: as `RecurrentMixer.prepare` takes them.
        scan: with this rank's borders and positions.
        shard: where this rank's tokens lie.
        group: context-parallel process group.
    """
    span = span_of(shard)
    own = shard_map(recurrent.prepare(parts, weights, scan), scan, span)
    state = state_before(
        own.state_map,
        group,
        anchor=own.local,
        since=shard.document_start(shard.start) // shard.length,
        one_piece=span.one_piece,
    )
    out = own.output(state)
    if not span.continues:
        out = attach(out, *state)
    return recurrent.finish(out, parts, weights)
