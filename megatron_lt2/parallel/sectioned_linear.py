"""One projection whose output comes in separate, contiguous pieces.

A mixer projects its input to q, k, v, gates. One fused matrix product would give them as slices of
wide rows, and every kernel behind it would first copy its slice; one product a section gives whole
tensors at once. The backward pass adds the input's gradients inside the products, so nothing is
concatenated there either.

Tensor and sequence parallelism as in megatron-core's ColumnParallelLinear: the weight holds this
rank's rows of each section; the sequence is gathered before and the input's gradient reduced after,
while the weight's gradient is computed.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def sectioned_linear(
    x: Tensor, weight: Tensor, rows: Sequence[int], group: Any, sequence_parallel: bool
) -> tuple[Tensor, ...]:
    """x W_i^T for each section W_i of the weight.

    Args:
        x: [s, b, d], this rank's part of s under sequence parallelism.
        weight: [sum of rows, d], this rank's rows.
        rows: of the sections.
        group: tensor-parallel process group.
        sequence_parallel: whether x is such a part.

    Returns:
        One contiguous tensor [b, s, rows_i] (of the whole sequence) a section.
    """
    if len(rows) == 1 and group.size() == 1:  # the plain product is launched sooner
        flat, shape = _batch_first(x)
        return (F.linear(flat, weight).view(*shape, -1),)
    return _SectionedLinear.apply(x, weight, tuple(rows), group, sequence_parallel)


class _SectionedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, rows: tuple[int, ...], group: Any, gather: bool
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight)
        ctx.rows, ctx.group, ctx.gather = rows, group, gather
        whole = x
        if gather:
            whole, _ = _gathered(x, group, wait=True)
        flat, shape = _batch_first(whole)
        return tuple((flat @ part.t()).view(*shape, -1) for part in weight.split(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        group, world = ctx.group, ctx.group.size()
        whole, gathering = x, None
        if ctx.gather:  # travels while the input's gradient is computed
            whole, gathering = _gathered(x, group, wait=False)
        pieces = [g.reshape(-1, g.shape[-1]) for g in gradients]
        batch, length = gradients[0].shape[:2]

        dx, reducing = None, None
        if ctx.needs_input_grad[0]:
            parts = weight.split(ctx.rows)
            dx = pieces[0] @ parts[0]
            for piece, part in zip(pieces[1:], parts[1:], strict=True):
                dx.addmm_(piece, part)
            dx = dx.view(batch, length, -1).transpose(0, 1)
            if world > 1:
                dx = dx.contiguous()
                if ctx.gather:
                    total, dx = dx, x.new_empty(x.shape)
                    reducing = dist.reduce_scatter_tensor(dx, total, group=group, async_op=True)
                else:
                    reducing = dist.all_reduce(dx, group=group, async_op=True)
        dw = None
        if ctx.needs_input_grad[1]:
            if gathering is not None:
                gathering.wait()
            flat, _ = _batch_first(whole)
            dw = torch.empty_like(weight)
            for piece, part in zip(pieces, dw.split(ctx.rows), strict=True):
                torch.mm(piece.t(), flat, out=part)
        if reducing is not None:
            reducing.wait()
        return dx, dw, None, None, None


def _gathered(x: Tensor, group: Any, wait: bool) -> tuple[Tensor, Any]:
    """The whole sequence [s, b, d] from the ranks' parts, and what to wait for."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=not wait)
    return whole, work


def _batch_first(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """[s, b, d] -> [b * s, d], free for one row; and (b, s)."""
    length, batch, width = x.shape
    return x.transpose(0, 1).reshape(-1, width), (batch, length)
