"""Triton kernels of the lightning indexer: scores of a block of queries, and its top keys.

See `megatron_lt2.ops.dsa` for what they mean. The selection reads a row of scores 16 times to find
the lowest score that is taken, two bits of it a time, and goes through the row once more from
behind, so that of equal scores later keys are taken.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

QUERIES, KEYS = 64, 128
"""Of a tile of scores."""

ROW = 4096
"""Scores of a row that a program looks at together."""


def launch_scores(
    q: Tensor, w: Tensor, k: Tensor, first: Tensor, place: int, scores: Tensor
) -> None:
    """Writes the scores of n queries at places `place`, `place` + 1, ..

    Args:
        q: [n, heads, channels].
        w: fp32 [n, heads], with the constant factor.
        k: [S, channels].
        first: int32 [n], the first key that each query sees.
        place: of the first query among the keys.
        scores: fp32 [n, S]; tiles without any key that a query sees are left as they are.
    """
    n, heads, channels = q.shape
    keys = len(k)
    _index_scores_kernel[(triton.cdiv(n, QUERIES), triton.cdiv(keys, KEYS))](
        q, w, k, first, scores, n, keys, place,
        H=heads, D=channels, BD=max(16, triton.next_power_of_2(channels)),
        BQ=QUERIES, BS=KEYS, num_warps=8, num_stages=2,
    )  # fmt: skip


def launch_select(scores: Tensor, first: Tensor, place: int, chosen: Tensor) -> None:
    """Writes the places of each row's highest scores, the latest first, over `chosen`.

    Args:
        scores: fp32 [n, S].
        first, place: as `launch_scores`.
        chosen: int32 [n, count], full of -1, which stays where there are fewer keys.
    """
    n, keys = scores.shape
    block = min(ROW, max(16, triton.next_power_of_2(keys)))
    _index_select_kernel[(n,)](
        scores, first, chosen, keys, place, chosen.shape[1], BS=block, num_warps=8
    )  # fmt: skip


def int32(x: Tensor) -> Tensor:
    """x as contiguous int32."""
    return x.to(torch.int32).contiguous()


if triton is not None:

    @triton.jit
    def _index_scores_kernel(
        q_ptr, w_ptr, k_ptr, first_ptr, scores_ptr, n, keys, place,
        H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
        BQ: tl.constexpr, BS: tl.constexpr,
    ):  # fmt: skip
        start, key_start = tl.program_id(0) * BQ, tl.program_id(1) * BS
        t, s, d = start + tl.arange(0, BQ), key_start + tl.arange(0, BS), tl.arange(0, BD)
        is_query, is_key, is_channel = t < n, s < keys, d < D
        first = tl.load(first_ptr + t, mask=is_query, other=2147483647)
        last = place + tl.minimum(start + BQ, n) - 1
        if (key_start <= last) & (key_start + BS > tl.min(first, axis=0)):
            rows, columns = t.to(tl.int64), s.to(tl.int64)
            k = tl.load(
                k_ptr + columns[None, :] * D + d[:, None],
                mask=is_channel[:, None] & is_key[None, :],
                other=0.0,
            )
            total = tl.zeros([BQ, BS], dtype=tl.float32)
            for h in range(H):
                q = tl.load(
                    q_ptr + (rows * H + h)[:, None] * D + d[None, :],
                    mask=is_query[:, None] & is_channel[None, :],
                    other=0.0,
                )
                w = tl.load(w_ptr + rows * H + h, mask=is_query, other=0.0)
                cut = tl.maximum(tl.dot(q, k, input_precision="ieee"), 0.0)
                total += w[:, None] * cut
            to = scores_ptr + rows[:, None] * keys + columns[None, :]
            tl.store(to, total, mask=is_query[:, None] & is_key[None, :])

    @triton.jit
    def _rank(own_ptr, at, first, stop, BS: tl.constexpr):
        """Integers in the order of the scores, and which of them a query sees."""
        s = at + tl.arange(0, BS)
        seen = (s >= first) & (s < stop)
        x = tl.load(own_ptr + s, mask=seen, other=0.0)
        x = tl.where(x == 0.0, 0.0, x)  # -0.0 is the same score
        bits = x.to(tl.int32, bitcast=True)
        return bits ^ ((bits >> 31) & 0x7FFFFFFF), seen

    @triton.jit
    def _index_select_kernel(
        scores_ptr, first_ptr, chosen_ptr, keys, place, count, BS: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0)
        own = scores_ptr + row.to(tl.int64) * keys
        s = tl.arange(0, BS)
        first = tl.load(first_ptr + row)
        stop = place + row + 1
        begin = first // BS * BS
        lowest = tl.full((), -2147483648, dtype=tl.int32)
        step = tl.full((), 1073741824, dtype=tl.int32)
        above = stop - first
        if stop - first > count:
            for _ in range(16):
                one = tl.zeros([BS], dtype=tl.int32)
                two = tl.zeros([BS], dtype=tl.int32)
                three = tl.zeros([BS], dtype=tl.int32)
                for at in range(begin, stop, BS):
                    rank, seen = _rank(own, at, first, stop, BS)
                    one += (seen & (rank >= lowest + step)).to(tl.int32)
                    two += (seen & (rank >= lowest + 2 * step)).to(tl.int32)
                    three += (seen & (rank >= lowest + 3 * step)).to(tl.int32)
                steps = (tl.sum(one, axis=0) >= count).to(tl.int32)
                steps += (tl.sum(two, axis=0) >= count).to(tl.int32)
                steps += (tl.sum(three, axis=0) >= count).to(tl.int32)
                lowest += steps * step
                step = step >> 2
            more = tl.zeros([BS], dtype=tl.int32)
            for at in range(begin, stop, BS):
                rank, seen = _rank(own, at, first, stop, BS)
                more += (seen & (rank > lowest)).to(tl.int32)
            above = tl.sum(more, axis=0)
        room = count - above
        written = tl.zeros((), dtype=tl.int32)
        equals = tl.zeros((), dtype=tl.int32)
        blocks = (stop - begin + BS - 1) // BS
        to = chosen_ptr + row.to(tl.int64) * count
        for block in range(blocks):
            at = begin + (blocks - 1 - block) * BS
            rank, seen = _rank(own, at, first, stop, BS)
            equal = seen & (rank == lowest)
            behind = equals + tl.cumsum(equal.to(tl.int32), axis=0, reverse=True)
            taken = (seen & (rank > lowest)) | (equal & (behind <= room))
            order = written + tl.cumsum(taken.to(tl.int32), axis=0, reverse=True) - 1
            tl.store(to + order, at + s, mask=taken)
            written += tl.sum(taken.to(tl.int32), axis=0)
            equals += tl.sum(equal.to(tl.int32), axis=0)
