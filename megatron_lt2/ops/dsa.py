"""DeepSeek sparse attention (DeepSeek-V3.2, arXiv 2512.02556): a lightning indexer, the top keys of
each query by its score, and attention to those.

    I_ts = sum_j w_tj relu(q_tj^T k_s) / sqrt(heads * channels)

The choice has no gradient. The indexer learns from a loss of its own: the KL divergence from the
attention's distribution, summed over heads and normalised, to softmax(I_t), over the same keys.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .gathered import Choice, block_spans, gather_keys, scores, softmax_over, wide
from .reach import Reach


def index_scores(q_BCHK: Tensor, w_BCH: Tensor, keys: Tensor) -> Tensor:
    """Scores [B, C, J] of keys [B, S, K] (J = S) or gathered ones [B, C, J, K], fp32 at least.

    Head by head, so that one matrix of scores is alive and not one a head.
    """
    heads, channels = q_BCHK.shape[2:]
    q, w, k = wide(q_BCHK), wide(w_BCH) * (heads * channels) ** -0.5, wide(keys)
    pattern = "bck,bsk->bcs" if keys.dim() == 3 else "bck,bcjk->bcj"
    total: Any = 0.0
    for head in range(heads):
        total = total + w[:, :, head, None] * torch.einsum(pattern, q[:, :, head], k).relu()
    return total


@torch.no_grad()
def select_keys(q_BTHK: Tensor, w_BTH: Tensor, k_BSK: Tensor, reach: Reach, count: int) -> Tensor:
    """Places of the `count` keys with the highest scores, int32 [B, T, min(count, S)]; -1: none.

    Of equal scores (all heads cut off by the relu make many zeros) later keys go first, so that
    the choice does not depend on what else lies in the row. Blockwise: no T x S matrix.
    """
    batch, length, heads = w_BTH.shape
    count = min(count, reach.keys)
    number = torch.arange(1, reach.keys + 1, device=q_BTHK.device)
    chosen = []
    for start, stop in block_spans(length, 4 * batch * reach.keys):
        seen = reach.visible(start, stop)
        score = index_scores(q_BTHK[:, start:stop], w_BTH[:, start:stop], k_BSK)
        score = score.masked_fill(~seen, float("-inf"))
        lowest = score.topk(count, dim=-1).values[..., -1:]
        above, equal = score > lowest, (score == lowest) & seen
        room = count - above.sum(-1, keepdim=True)
        from_behind = equal.flip(-1).cumsum(-1).flip(-1)
        taken = above | (equal & (from_behind <= room))
        last = torch.where(taken, number, 0).topk(count, dim=-1).values - 1
        chosen.append(last.to(torch.int32))
    return torch.cat(chosen, dim=1)


def head_mass(
    q_BCHK: Tensor, keys: Tensor, seen: Tensor, scale: float, reduce: Callable[[Tensor], Tensor]
) -> Tensor:
    """Attention's distribution over keys, mean over all heads: [B, C, J].

    Args:
        q_BCHK: this rank's heads.
        keys: whole [B, S, G, K] or gathered [B, C, J, G, K].
        seen: bool [B or 1, C, 1, J].
        scale: factor on q^T k.
        reduce: sum over the ranks that hold other heads.
    """
    groups = keys.shape[-2]
    q = wide(q_BCHK).unflatten(2, (groups, -1)) * scale
    mass = reduce(softmax_over(scores(q, wide(keys)), seen).sum((2, 3)))
    return mass / mass.sum(-1, keepdim=True).clamp(min=torch.finfo(mass.dtype).tiny)


def indexer_loss(
    index: tuple[Tensor, Tensor, Tensor],
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    choice: Choice,
    *,
    scale: float,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Sum over queries of KL(attention || softmax of the scores) over the chosen keys, in nats.

    Only the indexer gets gradients, which are made together with the loss.

    Args:
        index: the indexer's queries [B, T, heads, channels], weights [B, T, heads] and keys
            [B, S, channels].
        q_BTHK, k_BSGK: attention's queries (this rank's heads) and keys.
        choice: which keys count: those selected, or all in the dense stage.
        scale: factor on attention's q^T k.
        reduce: sum over the ranks that hold other heads; called once a block.
    """
    q, w, k = index
    return _IndexerLoss.apply(
        q, w, k.unsqueeze(2), q_BTHK.detach(), k_BSGK.detach(), choice, scale, reduce
    )


class _IndexerLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        w: Tensor,
        k: Tensor,
        attention_q: Tensor,
        attention_k: Tensor,
        choice: Choice,
        scale: float,
        reduce: Callable[[Tensor], Tensor],
    ) -> Tensor:
        batch, length = w.shape[:2]
        sums = [wide(x).new_zeros(x.shape) for x in (q, w, k)]
        index, seen = choice(0, min(1, length))
        width = attention_k.shape[2] * attention_k.shape[3] if index is not None else 0
        numbers = batch * seen.shape[-1] * max(width, attention_q.shape[2])
        total: Any = wide(w).new_zeros(())
        for start, stop in block_spans(length, numbers):
            index, seen = choice(start, stop)
            target = head_mass(
                attention_q[:, start:stop], gather_keys(attention_k, index), seen, scale, reduce
            )
            leaves = [q[:, start:stop], w[:, start:stop], gather_keys(k, index)]
            leaves = [x.detach().requires_grad_() for x in leaves]
            with torch.enable_grad():
                loss = _divergence(target, leaves, seen.squeeze(2))
            dq, dw, dk = torch.autograd.grad(loss, leaves)
            total = total + loss.detach()
            sums[0][:, start:stop], sums[1][:, start:stop] = dq, dw
            if index is None:
                sums[2] += dk
            else:
                rows = torch.arange(batch, device=k.device).view(-1, 1, 1)
                place = index.squeeze(2)
                sums[2][:, :, 0].index_put_((rows, place), dk[..., 0, :].to(sums[2].dtype), True)
        ctx.save_for_backward(*(s.to(x.dtype) for s, x in zip(sums, (q, w, k), strict=True)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        gradients = (x * dy.to(x.dtype) for x in ctx.saved_tensors)
        return *gradients, None, None, None, None, None


def _divergence(target: Tensor, index: list[Tensor], seen: Tensor) -> Tensor:
    """Sum over queries of KL(target || softmax of the scores), both [B, C, J]."""
    q, w, keys = index
    score = index_scores(q, w, keys.squeeze(-2)).masked_fill(~seen, float("-inf"))
    log_share = score.log_softmax(-1).masked_fill(~seen, 0.0)
    return (torch.xlogy(target, target) - target * log_share).sum()


@torch.no_grad()
def mass_held(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    index_BTJ: Tensor,
    reach: Reach,
    queries: Tensor,
    scale: float,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """Share of dense attention's mass that the selected keys hold, [B, len(queries)].

    Args:
        q_BTHK, k_BSGK: attention's queries and keys.
        index_BTJ: selected keys, -1: none.
        reach: which keys a query may see.
        queries: which queries to look at, a few of T.
        scale, reduce: as `head_mass`.
    """
    held = []
    for t in queries.tolist():
        seen = reach.visible(t, t + 1)
        mass = head_mass(q_BTHK[:, t : t + 1], k_BSGK, seen.unsqueeze(2), scale, reduce)
        index = index_BTJ[:, t : t + 1].long()
        held.append((mass.gather(-1, index.clamp(min=0)) * (index >= 0)).sum(-1))
    return torch.cat(held, dim=1)
