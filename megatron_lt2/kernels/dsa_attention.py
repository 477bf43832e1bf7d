"""Attention with one key head for all queries' heads, whose first channels are the value: to chosen
keys by Triton kernels, to all keys by matrix products of a block of queries.

Both keep inputs, output and the logarithm of the softmax's sum (`gathered_triton.py` says of what);
their backward passes make the weights again, block by block. Sums over queries have a fixed order.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.reach import Reach
from . import gathered_triton
from .pair_sums_triton import add_by_key

PAIRS = 2**29
"""Numbers that the shares of a block's pairs in the gradient of the keys may have."""

SCORES = 2**26
"""Numbers that the scores of a block of queries may have, of all keys and heads."""


def attend_chosen(
    q_NHK: Tensor, k_SK: Tensor, index_NJ: Tensor, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [n, H, values] and lse [n, H], which has no gradient.

    Args:
        q_NHK, k_SK: contiguous; rows of a batch lie behind each other.
        index_NJ: int32, places among all keys; -1: none.
        values: how many of the keys' channels, the first ones, are their values.
        scale: factor on q^T k.
    """
    return _Chosen.apply(q_NHK, k_SK, index_NJ, values, scale)


class _Chosen(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, index: Tensor, values: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        o, lse = gathered_triton.launch_forward(q, k, index, values, scale)
        ctx.save_for_backward(q, k, index, o, lse)
        ctx.scale = scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, index, o, lse = ctx.saved_tensors
        do = do.contiguous()
        (n, chosen), channels = index.shape, k.shape[1]
        dq = torch.empty_like(q)
        dk = torch.zeros(k.shape, device=k.device, dtype=torch.float32)
        size = max(1, PAIRS // max(1, chosen * channels))
        pairs = q.new_empty(min(size, n), chosen, channels)
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            own = pairs[: part.stop - start]
            gathered_triton.launch_backward(
                *(q[part], k, index[part], o[part], lse[part], do[part]), ctx.scale, dq[part], own
            )
            add_by_key(own.flatten(0, 1), index[part], dk)
        return dq, dk.to(k.dtype), None, None, None


def attend_all(
    q_BTHK: Tensor, k_BSK: Tensor, reach: Reach, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Output [B, T, H, values] and lse [B, T, H], which has no gradient; contiguous inputs,
    arguments as `attend_chosen`."""
    return _All.apply(q_BTHK, k_BSK, reach, values, scale)


class _All(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, reach: Reach, values: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        o = q.new_empty(*q.shape[:3], values)
        lse = torch.empty(q.shape[:3], device=q.device, dtype=torch.float32)
        for row, queries, keys, hidden in dense_blocks(reach, len(q), q.shape[2]):
            s = dense_scores(q[row, queries], k[row, keys], hidden, scale)
            highest = s.amax(-1, keepdim=True).clamp(min=torch.finfo(s.dtype).min)
            p = s.sub_(highest).exp2_()
            total = p.sum(-1)
            found = highest.squeeze(-1) + total.log2()
            lse[row, queries] = torch.where(total > 0, found, float("inf"))
            mixed = product(p.flatten(0, 1).to(q.dtype), k[row, keys, :values])
            mixed = mixed.view(*p.shape[:2], values) / total.clamp(min=1e-30).unsqueeze(-1)
            o[row, queries] = mixed.to(o.dtype)
        ctx.save_for_backward(q, k, reach.first, o, lse)
        ctx.earlier, ctx.scale = reach.earlier, scale
        ctx.mark_non_differentiable(lse)
        return o, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q, k, first, o, lse = ctx.saved_tensors
        values, dq = o.shape[-1], torch.empty_like(q)
        dk = torch.zeros(k.shape, device=k.device, dtype=torch.float32)
        for row, queries, keys, hidden in dense_blocks(
            Reach(first, ctx.earlier), len(q), q.shape[2]
        ):
            p = dense_weights(q[row, queries], k[row, keys], hidden, lse[row, queries], ctx.scale)
            own_do = do[row, queries].flatten(0, 1)
            delta = (o[row, queries].float() * do[row, queries].float()).sum(-1, keepdim=True)
            dk[row, keys, :values] += product(p.flatten(0, 1).to(q.dtype).t(), own_do)
            dp = product(own_do, k[row, keys, :values].t()).view_as(p)
            ds = dp.sub_(delta).mul_(p).mul_(ctx.scale).flatten(0, 1).to(q.dtype)
            dq[row, queries] = (ds @ k[row, keys]).view_as(dq[row, queries])
            dk[row, keys] += product(ds.t(), q[row, queries].flatten(0, 1))
        return dq, dk.to(k.dtype), None, None, None


def dense_blocks(
    reach: Reach, batch: int, heads: int
) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """Row, queries, the keys that they may see, and which of these not, bool [C, keys]; in blocks
    so small that the scores of all heads stay below SCORES."""
    length, size = reach.length, max(1, SCORES // max(1, heads * reach.keys))
    places = torch.arange(reach.keys, device=reach.first.device)
    # A document's first key never lies before that of an earlier query.
    lowest = reach.first[:, ::size].tolist()
    for row in range(batch):
        of_row = row if len(reach.first) > 1 else 0
        for number, start in enumerate(range(0, length, size)):
            stop = min(start + size, length)
            low, high = lowest[of_row][number], reach.earlier + stop
            key, first = places[low:high], reach.first[of_row, start:stop, None]
            hidden = (key < first) | (key > reach.places(start, stop)[:, None])
            yield row, slice(start, stop), slice(low, high), hidden


def dense_scores(q_CHK: Tensor, k_SK: Tensor, hidden: Tensor, scale: float) -> Tensor:
    """scale log2(e) q^T k, fp32 [C, H, S]; -inf where a key is hidden."""
    s = product(q_CHK.flatten(0, 1), k_SK.t()).view(*q_CHK.shape[:2], -1)
    return s.mul_(scale * math.log2(math.e)).masked_fill_(hidden.unsqueeze(1), float("-inf"))


def dense_weights(
    q_CHK: Tensor, k_SK: Tensor, hidden: Tensor, lse_CH: Tensor, scale: float
) -> Tensor:
    """The weights of attention, fp32 [C, H, S]."""
    s = dense_scores(q_CHK, k_SK, hidden, scale)
    return s.sub_(lse_CH.unsqueeze(-1)).exp2_()


def product(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product with a result in fp32, of 16-bit numbers by the GPU's matrix units."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
