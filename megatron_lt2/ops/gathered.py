"""Attention of every query to keys of its own choice, in blocks of queries: memory O(T).

A `Choice` says which keys a block of queries sees: all of them under a mask, or some by their
places. `attend` goes through the blocks and keeps nothing but inputs and output; its backward pass
goes through them again and adds the gradients of gathered keys where they came from. No T x S
matrix of the whole row is ever made.

Shapes: B rows, T queries, S keys, G key heads, N query heads a key head (H = G N), K, V channels,
C queries of a block, J chosen keys a query. Products are made in fp32 at least.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .reach import Reach

QUERIES = 128
"""Queries a block."""

GATHERED = 2**25
"""Numbers that the gathered keys of a block may have; blocks shrink if they would have more."""

Choice = Callable[[int, int], tuple[Tensor | None, Tensor]]
"""(start, stop) -> places of keys int64 [B, C, G or 1, J] (None: all keys, so J = S), and which of
them a query sees, bool [B or 1, C, G or 1, J]."""


def wide(x: Tensor) -> Tensor:
    """x in fp32, or as it is if it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def all_keys(reach: Reach) -> Choice:
    """Every key that causality and documents allow."""
    return lambda start, stop: (None, reach.visible(start, stop).unsqueeze(2))


def recent_keys(reach: Reach, window: int) -> Choice:
    """The last `window` keys, the query's own included."""

    def choose(start: int, stop: int) -> tuple[Tensor, Tensor]:
        place = reach.places(start, stop)[:, None]
        index = place - torch.arange(window - 1, -1, -1, device=place.device)
        seen = index >= reach.first[:, start:stop, None]
        return index.clamp(min=0)[None, :, None], seen.unsqueeze(2)

    return choose


def listed_keys(index_BTJ: Tensor) -> Choice:
    """The keys at the places `index_BTJ`, the same for all heads; -1: none."""

    def choose(start: int, stop: int) -> tuple[Tensor, Tensor]:
        index = index_BTJ[:, start:stop, None].long()
        return index.clamp(min=0), index >= 0

    return choose


def scores(q_BCGNK: Tensor, keys: Tensor) -> Tensor:
    """q^T k, [B, C, G, N, J], of whole keys [B, S, G, K] or gathered ones [B, C, J, G, K]."""
    if keys.dim() == 4:
        return torch.einsum("bcgnk,bsgk->bcgns", q_BCGNK, keys)
    return torch.einsum("bcgnk,bcjgk->bcgnj", q_BCGNK, keys)


def softmax_over(scores_BCGNJ: Tensor, seen: Tensor) -> Tensor:
    """Softmax over the keys that are seen; zeros where there is none."""
    hidden = ~seen.unsqueeze(-2)
    weights = scores_BCGNJ.masked_fill(hidden, float("-inf")).softmax(-1)
    return weights.masked_fill(hidden, 0.0)  # also the NaN of a query that sees nothing


def gather_keys(x_BSGK: Tensor, index: Tensor | None) -> Tensor:
    """Keys at `index` [B or 1, C, G or 1, J] as [B, C, J, G, K]; all of them for None."""
    if index is None:
        return x_BSGK
    return x_BSGK[_where(x_BSGK, index)]


def _where(x_BSGK: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = torch.arange(x_BSGK.shape[0], device=x_BSGK.device).view(-1, 1, 1, 1)
    heads = torch.arange(x_BSGK.shape[2], device=x_BSGK.device)
    return rows, index.transpose(2, 3), heads


def block_spans(length: int, numbers: int) -> list[tuple[int, int]]:
    """Blocks of queries, so small that `numbers` a query stay below GATHERED."""
    size = max(1, min(QUERIES, GATHERED // max(1, numbers)))
    return [(start, min(start + size, length)) for start in range(0, length, size)]


def attend(
    q_BTHK: Tensor, k_BSGK: Tensor, v_BSGV: Tensor, choice: Choice, scale: float | None = None
) -> Tensor:
    """softmax over the chosen keys of (scale q^T k), times v: [B, T, H, V] in q's dtype.

    A query without any key gets zeros.

    Args:
        q_BTHK, k_BSGK, v_BSGV: G divides H; G consecutive query heads share a key head.
        choice: the keys of each block of queries.
        scale: default K**-0.5.
    """
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else scale
    groups = k_BSGK.shape[2]

    def one_block(seen: Tensor, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Tensor:
        q, (k, v) = queries[0].unflatten(2, (groups, -1)), keys
        weights = softmax_over(scores(wide(q) * scale, wide(k)), seen)
        pattern = "bcgns,bsgv->bcgnv" if v.dim() == 4 else "bcgnj,bcjgv->bcgnv"
        return torch.einsum(pattern, weights, wide(v)).flatten(2, 3).to(q.dtype)

    return over_blocks(one_block, choice, [q_BTHK], [k_BSGK, v_BSGV])


Block = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]


def over_blocks(
    one_block: Block, choice: Choice, queries: Sequence[Tensor], keys: Sequence[Tensor]
) -> Tensor:
    """`one_block(seen, queries, keys)` of every block, joined along T; differentiable.

    Args:
        one_block: gets the queries' tensors [B, C, ...] and the chosen keys' tensors.
        choice: the keys of each block.
        queries: [B, T, ...] each.
        keys: [B, S, G, channels] each.
    """
    return _OverBlocks.apply(one_block, choice, len(queries), *queries, *keys)


def _spans(choice: Choice, queries: Sequence[Tensor], keys: Sequence[Tensor]) -> Any:
    length = queries[0].shape[1]
    index, seen = choice(0, min(1, length))
    batch = keys[0].shape[0]
    if index is None:
        heads = max(x.shape[2] if x.dim() > 2 else 1 for x in queries)
        numbers = batch * seen.shape[-1] * heads
    else:
        numbers = batch * seen.shape[-1] * sum(x.shape[2] * x.shape[3] for x in keys)
    return block_spans(length, numbers)


class _OverBlocks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, one_block: Block, choice: Choice, count: int, *tensors: Tensor) -> Tensor:
        queries, keys = tensors[:count], tensors[count:]
        ctx.one_block, ctx.choice, ctx.count = one_block, choice, count
        ctx.save_for_backward(*tensors)
        outputs = []
        for start, stop in _spans(choice, queries, keys):
            index, seen = choice(start, stop)
            pieces = [x[:, start:stop] for x in queries]
            outputs.append(one_block(seen, pieces, [gather_keys(x, index) for x in keys]))
        return torch.cat(outputs, dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        tensors, count = ctx.saved_tensors, ctx.count
        queries, keys = tensors[:count], tensors[count:]
        needed = ctx.needs_input_grad[3:]
        totals = [wide(x).new_zeros(x.shape) if n else None for x, n in zip(tensors, needed)]  # noqa: B905
        for start, stop in _spans(ctx.choice, queries, keys):
            index, seen = ctx.choice(start, stop)
            pieces = [x[:, start:stop] for x in queries] + [gather_keys(x, index) for x in keys]
            leaves = [x.detach().requires_grad_(n) for x, n in zip(pieces, needed, strict=True)]
            with torch.enable_grad():
                out = ctx.one_block(seen, leaves[:count], leaves[count:])
            wanted = [i for i, n in enumerate(needed) if n]
            gradients = torch.autograd.grad(
                out, [leaves[i] for i in wanted], dy[:, start:stop], allow_unused=True
            )
            for i, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    _add(totals[i], gradient, None if i < count else index, i < count, start, stop)
        done = (None if t is None else t.to(x.dtype) for t, x in zip(totals, tensors, strict=True))
        return None, None, None, *done


def _add(
    total: Any, gradient: Tensor, index: Tensor | None, query: bool, start: int, stop: int
) -> None:
    """Add a block's gradient to that of the whole tensor."""
    gradient = gradient.to(total.dtype)
    if query:
        total[:, start:stop] += gradient
    elif index is None:
        total += gradient
    else:
        total.index_put_(_where(total, index), gradient, accumulate=True)
