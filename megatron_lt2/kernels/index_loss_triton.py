"""Triton kernels of the indexer's loss: scores of gathered keys, and gradients of the indexer.

A program has one query with all heads of the indexer and goes through its chosen keys. The weights
`w` hold the constant factor of the scores.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

KEYS = 64
"""Gathered keys of a block."""


def launch_gathered_scores(q: Tensor, w: Tensor, k: Tensor, index: Tensor) -> Tensor:
    """q [n, heads, channels], w fp32 [n, heads], k [S, channels], index int32 [n, J] ->
    scores fp32 [n, J]; -inf where the index is -1."""
    scores = torch.empty(index.shape, device=q.device, dtype=torch.float32)
    _index_pair_scores_kernel[(len(q),)](
        q, w, k, index, scores, index.shape[1], **_sizes(q), num_warps=4
    )  # fmt: skip
    return scores


def launch_gathered_gradients(
    q: Tensor, w: Tensor, k: Tensor, index: Tensor, d_scores: Tensor, dq: Tensor, pairs: Tensor
) -> Tensor:
    """Writes dq [n, heads, channels] and what each chosen key's gradient gets from the query,
    pairs [n, J, channels]; returns dw fp32 [n, heads]. d_scores: fp32 [n, J]."""
    dw = torch.empty_like(w)
    _index_pair_gradients_kernel[(len(q),)](
        q, w, k, index, d_scores, dq, dw, pairs, index.shape[1], **_sizes(q), num_warps=4
    )  # fmt: skip
    return dw


def _sizes(q: Tensor) -> dict[str, int]:
    heads, channels = q.shape[1:]
    return {
        "H": heads,
        "D": channels,
        "BH": max(16, triton.next_power_of_2(heads)),
        "BD": max(16, triton.next_power_of_2(channels)),
        "BJ": KEYS,
    }


if triton is not None:

    @triton.jit
    def _index_pair_scores_kernel(
        q_ptr, w_ptr, k_ptr, index_ptr, scores_ptr, J,
        H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, d, j = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BJ)
        is_pair = (h < H)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (t * H + h)[:, None] * D + d[None, :], mask=is_pair, other=0.0)
        w = tl.load(w_ptr + t * H + h, mask=h < H, other=0.0)
        for start in range(0, J, BJ):
            place = tl.load(index_ptr + t * J + start + j, mask=start + j < J, other=-1)
            seen = place >= 0
            k = tl.load(
                k_ptr + place.to(tl.int64)[:, None] * D + d[None, :],
                mask=seen[:, None] & (d < D)[None, :],
                other=0.0,
            )
            a = tl.dot(q, tl.trans(k), input_precision="ieee")
            score = tl.sum(w[:, None] * tl.maximum(a, 0.0), axis=0)
            score = tl.where(seen, score, -float("inf"))
            tl.store(scores_ptr + t * J + start + j, score, mask=start + j < J)

    @triton.jit
    def _index_pair_gradients_kernel(
        q_ptr, w_ptr, k_ptr, index_ptr, d_scores_ptr, dq_ptr, dw_ptr, pairs_ptr, J,
        H: tl.constexpr, D: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr, BJ: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, d, j = tl.arange(0, BH), tl.arange(0, BD), tl.arange(0, BJ)
        is_pair = (h < H)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (t * H + h)[:, None] * D + d[None, :], mask=is_pair, other=0.0)
        w = tl.load(w_ptr + t * H + h, mask=h < H, other=0.0)
        dq = tl.zeros([BH, BD], dtype=tl.float32)
        dw = tl.zeros([BH], dtype=tl.float32)
        for start in range(0, J, BJ):
            place = tl.load(index_ptr + t * J + start + j, mask=start + j < J, other=-1)
            seen = place >= 0
            k = tl.load(
                k_ptr + place.to(tl.int64)[:, None] * D + d[None, :],
                mask=seen[:, None] & (d < D)[None, :],
                other=0.0,
            )
            g = tl.load(d_scores_ptr + t * J + start + j, mask=seen, other=0.0)
            a = tl.dot(q, tl.trans(k), input_precision="ieee")
            dw += tl.sum(g[None, :] * tl.maximum(a, 0.0), axis=1)
            da = tl.where(a > 0, g[None, :] * w[:, None], 0.0).to(k.dtype)
            dq = tl.dot(da, k, dq, input_precision="ieee")
            dk = tl.dot(tl.trans(da), q, input_precision="ieee")
            to = pairs_ptr + (t * J + start + j)[:, None] * D + d[None, :]
            kind = pairs_ptr.dtype.element_ty
            tl.store(to, dk.to(kind), mask=seen[:, None] & (d < D)[None, :])
        to = dq_ptr + (t * H + h)[:, None] * D + d[None, :]
        tl.store(to, dq.to(dq_ptr.dtype.element_ty), mask=is_pair)
        tl.store(dw_ptr + t * H + h, dw, mask=h < H)
