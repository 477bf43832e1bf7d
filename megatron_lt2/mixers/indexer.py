"""The lightning indexer of DSA: its projections, how its loss reaches it, and what it reports.

All tensor-parallel ranks hold the whole indexer and compute the same scores of all queries, so they
select the same keys for their heads. Its input is detached and the choice of keys has no gradient:
the main loss does not reach the indexer and the indexer's loss does not reach the trunk.

The loss is attached to the layer's output (`attach_loss`): whoever runs the backward pass of the
layer, a pipeline stage or a recomputed one, runs that of the loss. It is a sum over tokens, as the
main loss is in training/steps.py, and is divided by their number with all gradients.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lt2.mixers.parameters import new_parameter
from megatron_lt2.ops.sparse_layout import indexer_rows


@dataclass
class IndexerReport:
    """What one layer's indexer did since the last report; sums over this rank's queries.

    loss, queries: the KL loss in nats, and how many queries it is of.
    held: by loop, the share of dense attention's mass that the selected keys hold, summed over the
        queries that were sampled, and their number.
    shared: by loop, the share of a query's keys that the loop before selected too, likewise.
    waiting: by loop, selections that the neighbouring loop is going to be compared with.
    """

    loss: Any = 0.0
    queries: int = 0
    held: dict[int, tuple[Any, int]] = field(default_factory=dict)
    shared: dict[int, tuple[Any, int]] = field(default_factory=dict)
    waiting: dict[int, deque[Tensor]] = field(default_factory=dict)

    def add_held(self, loop: int, shares: Tensor) -> None:
        """Count sampled queries of one loop."""
        total, count = self.held.get(loop, (0.0, 0))
        self.held[loop] = (total + shares.double().sum(), count + shares.numel())

    def add_selection(self, loop: int, keys: Tensor, backwards: bool) -> None:
        """Compare a selection [B, queries, J] with the same micro-batch's in the loop beside it.

        Micro-batches come in the same order in every loop; loops come last first where layers are
        recomputed (`backwards`).
        """
        before = self.waiting.get(loop + 1 if backwards else loop - 1)
        if before:
            other = before.popleft()
            if other.shape == keys.shape:
                there = (keys[..., :, None] == other[..., None, :]).any(-1) & (keys >= 0)
                share = there.sum(-1) / (keys >= 0).sum(-1).clamp(min=1)
                later = loop + 1 if backwards else loop
                total, count = self.shared.get(later, (0.0, 0))
                self.shared[later] = (total + share.double().sum(), count + share.numel())
        self.waiting.setdefault(loop, deque()).append(keys)


class Indexer(nn.Module):
    """Queries a head, one key and head weights, from the layer's normed input.

    Args:
        settings: of the mixer, resolved.
        hidden_size: width of the input.
        dtype: of the weights.
    """

    def __init__(self, settings: Any, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        for name, rows in indexer_rows(settings).items():
            self.register_parameter(name, new_parameter(rows, hidden_size, dtype=dtype))
            if not settings.loss_weight:
                # Nothing reaches it, and a gradient that never comes would be waited for.
                getattr(self, name).requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, d] -> queries, keys and weights, [B, T, rows] each."""
        x = x.detach()
        q, k, w = (F.linear(x, getattr(self, name)) for name in ("q", "k", "w"))
        return q, k, w


def attach_loss(out: Tensor, loss: Tensor, weight: float) -> Tensor:
    """`out`, whose backward pass also runs that of weight * loss."""
    return _AttachLoss.apply(out, loss, weight)


class _AttachLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, weight: float) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.weight = weight
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        (loss,) = ctx.saved_tensors
        return dy, torch.full_like(loss, ctx.weight), None
