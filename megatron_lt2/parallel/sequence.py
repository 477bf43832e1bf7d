"""Where a context-parallel rank's tokens lie in the whole row.

Context parallelism cuts a row of L tokens into P equal contiguous pieces: rank r holds the tokens
[r L/P, (r+1) L/P) of the packed row, or of each row if documents are not packed. So a rank knows
its neighbours by its number, a recurrence runs on without reordering, and only attention exchanges
tokens.

What is here says nothing about process groups: layers take those from megatron-core.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SequenceShard:
    """The tokens [start, stop) of one rank.

    rank, size: the rank's place among the context-parallel ranks, and how many there are.
    start, stop: its tokens, counted in the whole row (in each row if unpacked).
    bounds: int32 [N + 1], document borders of the whole packed row; None: unpacked.
    local_bounds: int32, borders of the pieces of documents on this rank, counted from `start`, from
        0 to stop - start; None: unpacked.
    continues: the first piece began on an earlier rank (unpacked: true but for rank 0).
    continued: the last piece goes on on a later rank (unpacked: true but for the last rank).
    borders: the numbers in `bounds`, on the host, so that reading them waits for no device;
        (0, total) if unpacked.
    """

    rank: int
    size: int
    start: int
    stop: int
    bounds: Tensor | None
    local_bounds: Tensor | None
    continues: bool
    continued: bool
    borders: tuple[int, ...]

    @property
    def length(self) -> int:
        """Tokens on this rank (of each row if unpacked)."""
        return self.stop - self.start

    @property
    def total(self) -> int:
        """Tokens of the whole row."""
        return self.size * self.length

    @property
    def one_piece(self) -> bool:
        """Whether no document border lies inside this rank's tokens."""
        return self.local_bounds is None or len(self.local_bounds) == 2

    @cached_property
    def longest(self) -> int:
        """Tokens of the longest document of the whole row."""
        return _longest(self.borders)

    def document_start(self, token: int) -> int:
        """Where the document of `token` begins; both count in the whole row."""
        return self.borders[bisect_right(self.borders, token) - 1]


@dataclass
class ShardedSequence(PackedSeqParams):
    """megatron-core's description of a packed row, of which this rank has the part `shard`.

    cu_seqlens_q and cu_seqlens_kv are the shard's `local_bounds`, so None without packing.
    """

    shard: SequenceShard | None = None


def shard_span(total: int, rank: int, size: int) -> tuple[int, int]:
    """The tokens [start, stop) of `rank` of `size` in a row of `total` tokens.

    Raises:
        ValueError: the ranks cannot share the tokens evenly.
    """
    if total % size:
        raise ValueError(
            f"a row of {total} tokens cannot be cut into parallel.context {size} equal parts; "
            "choose a data.sequence_length that it divides"
        )
    length = total // size
    return rank * length, (rank + 1) * length


def packed_sequence(bounds: Tensor) -> PackedSeqParams:
    """A packed row in one piece.

    Args:
        bounds: int32 [N + 1] document borders.
    """
    return PackedSeqParams(**_packed_fields(bounds, tuple(bounds.tolist())))


def shard_sequence(
    total: int, rank: int, size: int, bounds: Tensor | None = None
) -> ShardedSequence:
    """The part of `rank` of `size` of a row.

    Args:
        total: tokens of the whole row (of each row if unpacked).
        rank, size: this rank among the context-parallel ranks.
        bounds: int32 [N + 1] document borders of the whole packed row; default: not packed.

    Raises:
        ValueError: the ranks cannot share the tokens evenly.
    """
    start, stop = shard_span(total, rank, size)
    borders = (0, total) if bounds is None else tuple(bounds.tolist())
    pieces = (0, *(x - start for x in borders if start < x < stop), stop - start)
    local = None
    if bounds is not None:
        local = torch.tensor(pieces, dtype=torch.int32, device=bounds.device)
    shard = SequenceShard(
        rank=rank,
        size=size,
        start=start,
        stop=stop,
        bounds=bounds,
        local_bounds=local,
        continues=start not in borders,
        continued=stop not in borders,
        borders=borders,
    )
    if local is None:
        return ShardedSequence(qkv_format="sbhd", shard=shard)
    return ShardedSequence(**_packed_fields(local, pieces), shard=shard)


def packing_to(packing: PackedSeqParams, move: Any) -> PackedSeqParams:
    """The same packing with its tensors as `move` gives them.

    Args:
        move: from a tensor to the same tensor elsewhere.
    """
    if packing.cu_seqlens_q is None:
        return packing
    # One tensor for all uses: kernels remember what they worked out for a tensor of borders.
    local = move(packing.cu_seqlens_q)
    changed: dict[str, Any] = {"cu_seqlens_q": local, "cu_seqlens_kv": local}
    if isinstance(packing, ShardedSequence) and packing.shard is not None:
        changed["shard"] = replace(
            packing.shard, bounds=move(packing.shard.bounds), local_bounds=local
        )
    return replace(packing, **changed)


def _packed_fields(bounds: Tensor, borders: tuple[int, ...]) -> dict[str, Any]:
    longest = _longest(borders)
    return {
        # Not "thd": hidden states keep megatron-core's [s, b, d] with b = 1, and rotary angles
        # come per token.
        "qkv_format": "sbhd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_kv": longest,
    }


def _longest(borders: tuple[int, ...]) -> int:
    return max(end - begin for begin, end in zip(borders[:-1], borders[1:], strict=True))
