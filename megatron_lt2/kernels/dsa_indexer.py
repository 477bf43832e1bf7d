"""The lightning indexer on a GPU: which keys it selects, and its loss with its gradients.

Blocks of queries: scores of all keys of the row exist for some of them only. `megatron_lt2.ops.dsa`
says what is computed. The loss is in natural units; gradients are made together with it, in fixed
orders of summation.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..ops.reach import Reach
from . import gathered_triton, index_loss_triton, index_triton
from .dsa_attention import dense_blocks, dense_weights, product
from .pair_sums_triton import add_by_key

SCORES = 2**23
"""Scores of a block of queries in a selection: they stay in a GPU's cache."""

PAIRS = 2**28
"""Numbers that the shares of a block's pairs in the gradient of the indexer's keys may have."""

Index = tuple[Tensor, Tensor, Tensor]
"""Queries [B, T, heads, channels], weights [B, T, heads] and keys [B, S, channels]."""

Reduce = Callable[[Tensor], Tensor]


def factor(q: Tensor) -> float:
    """The constant factor of the scores."""
    return float((q.shape[-2] * q.shape[-1]) ** -0.5)


@torch.no_grad()
def select_keys(index: Index, reach: Reach, count: int) -> Tensor:
    """As `megatron_lt2.ops.dsa.select_keys`."""
    q, w, k = index
    (batch, length), keys = w.shape[:2], reach.keys
    chosen = torch.full((batch, length, min(count, keys)), -1, device=q.device, dtype=torch.int32)
    q, k, w = q.contiguous(), k.contiguous(), (w.float() * factor(q)).contiguous()
    first = index_triton.int32(reach.first.expand(batch, -1))
    size = min(length, max(1, SCORES // max(1, keys)))
    scores = torch.empty(size, keys, device=q.device, dtype=torch.float32)
    for row in range(batch):
        for start in range(0, length, size):
            part = slice(start, min(start + size, length))
            own, place = scores[: part.stop - start], reach.earlier + start
            index_triton.launch_scores(
                *(q[row, part], w[row, part], k[row], first[row, part]), place, own
            )
            index_triton.launch_select(own, first[row, part], place, chosen[row, part])
    return chosen


def chosen_loss(
    index: Index,
    q_NHK: Tensor,
    k_SK: Tensor,
    lse_NH: Tensor,
    index_NJ: Tensor,
    *,
    values: int,
    scale: float,
    reduce: Reduce,
) -> Tensor:
    """Sum over queries of KL(attention || softmax of the scores) over chosen keys, in nats.

    Args:
        index: the indexer's tensors.
        q_NHK, k_SK, lse_NH, index_NJ, values, scale: of `dsa_attention.attend_chosen`.
        reduce: sum over the ranks that hold other heads.
    """

    def make(q: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        n, chosen = index_NJ.shape
        flat_q, flat_k = q.flatten(0, 1).contiguous(), k.flatten(0, 1).contiguous()
        scaled = (w.flatten(0, 1).float() * factor(q)).contiguous()
        total = scaled.new_zeros(())
        dq, dw = torch.empty_like(flat_q), torch.empty_like(scaled)
        dk = torch.zeros(flat_k.shape, device=k.device, dtype=torch.float32)
        size = max(1, PAIRS // max(1, chosen * flat_k.shape[1]))
        pairs = flat_k.new_empty(min(size, n), chosen, flat_k.shape[1])
        for start in range(0, n, size):
            part = slice(start, min(start + size, n))
            own, places = pairs[: part.stop - start], index_NJ[part]
            mass = gathered_triton.launch_mass(
                q_NHK[part], k_SK, places, lse_NH[part], values, scale
            )
            given = (flat_q[part], scaled[part], flat_k, places)
            scores = index_loss_triton.launch_gathered_scores(*given)
            loss, d_scores = divergence(reduce(mass), scores)
            total += loss
            dw[part] = index_loss_triton.launch_gathered_gradients(*given, d_scores, dq[part], own)
            add_by_key(own.flatten(0, 1), places, dk)
        return total, dq.view_as(q), (dw * factor(q)).view_as(w), dk.view_as(k)

    return _Loss.apply(make, *index)


def dense_loss(
    index: Index,
    q_BTHK: Tensor,
    k_BSK: Tensor,
    lse_BTH: Tensor,
    reach: Reach,
    *,
    scale: float,
    reduce: Reduce,
) -> Tensor:
    """As `chosen_loss`, over all keys; with what `dsa_attention.attend_all` takes and gives."""

    def make(q: Tensor, w: Tensor, k: Tensor) -> tuple[Tensor, ...]:
        scaled = w.float() * factor(q)
        total = scaled.new_zeros(())
        dq, dw = torch.empty_like(q), torch.empty_like(scaled)
        dk = torch.zeros(k.shape, device=k.device, dtype=torch.float32)
        heads = max(q.shape[2], q_BTHK.shape[2])
        for row, queries, keys, hidden in dense_blocks(reach, len(w), heads):
            mass = dense_weights(
                q_BTHK[row, queries], k_BSK[row, keys], hidden, lse_BTH[row, queries], scale
            ).sum(1)
            own_q, own_k, own_w = q[row, queries], k[row, keys], scaled[row, queries]
            a = product(own_q.flatten(0, 1), own_k.t()).view(*own_q.shape[:2], -1)
            cut = a.relu()
            scores = torch.bmm(own_w.unsqueeze(1), cut).squeeze(1)
            loss, g = divergence(reduce(mass), scores.masked_fill_(hidden, float("-inf")))
            total += loss
            dw[row, queries] = torch.bmm(cut, g.unsqueeze(-1)).squeeze(-1)
            da = torch.where(a > 0, g.unsqueeze(1) * own_w.unsqueeze(-1), 0.0)
            da = da.flatten(0, 1).to(q.dtype)
            dq[row, queries] = (da @ own_k).view_as(own_q)
            dk[row, keys] += product(da.t(), own_q.flatten(0, 1))
        return total, dq, dw * factor(q), dk

    return _Loss.apply(make, *index)


def divergence(mass: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Sum of KL(mass, normalised || softmax(scores)) over the rows, and its gradient with respect
    to the scores; both fp32 [C, J], keys that do not count have no mass and -inf."""
    target = mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)
    hidden = scores == float("-inf")
    log_share = scores.log_softmax(-1).masked_fill_(hidden, 0.0)
    loss = (torch.xlogy(target, target) - target * log_share).sum()
    d_scores = log_share.exp_().mul_(target.sum(-1, keepdim=True)).sub_(target)
    return loss, d_scores.masked_fill_(hidden, 0.0)


class _Loss(torch.autograd.Function):
    """`make(q, w, k)` gives the loss and the gradients of the three."""

    @staticmethod
    def forward(ctx: Any, make: Callable[..., Any], *index: Tensor) -> Tensor:
        total, *gradients = make(*index)
        ctx.save_for_backward(*(g.to(x.dtype) for g, x in zip(gradients, index, strict=True)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(x * dy.to(x.dtype) for x in ctx.saved_tensors)
