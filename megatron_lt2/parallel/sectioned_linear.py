"""Projections over tensor-parallel ranks, whole or in separate, contiguous pieces.

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
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lt2.parallel.remake import Keeping
from megatron_lt2.parallel.weight_gradient import WeightGradient


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
    return _Projection.apply(x, weight, tuple(rows), group, sequence_parallel, True, Keeping(x))


def project(x: Tensor, weight: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
    """x W^T.

    Args:
        x: [s, b, d], this rank's part of s under sequence parallelism.
        weight: [rows, d].
        group: tensor-parallel process group over which the rows are spread, so that x's gradient is
            the sum over the ranks; None: it is this rank's alone.
        sequence_parallel: whether x is such a part.

    Returns:
        [s, b, rows], of the whole sequence.
    """
    rows = (weight.shape[0],)
    return _Projection.apply(x, weight, rows, group, sequence_parallel, False, Keeping(x))[0]


class _Projection(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        rows: tuple[int, ...],
        group: Any,
        gather: bool,
        batch_first: bool,
        keeping: Keeping,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(weight, *keeping.tensors)
        ctx.keeping, ctx.rows, ctx.group = keeping, rows, group
        ctx.gather, ctx.batch_first, ctx.shape = gather, batch_first, x.shape
        whole = x
        if gather:
            whole, _ = _gathered(x, group, wait=True)
        flat, shape = _flat(whole, batch_first)
        if len(rows) == 1:
            return ((flat @ weight.t()).view(*shape, -1),)
        return tuple((flat @ part.t()).view(*shape, -1) for part in weight.split(rows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        weight, *kept = ctx.saved_tensors
        group, world = ctx.group, 1 if ctx.group is None else ctx.group.size()
        whole, gathering = None, None
        if ctx.needs_input_grad[1]:
            whole = ctx.keeping.again(tuple(kept))
            if ctx.gather:  # travels while the input's gradient is computed
                whole, gathering = _gathered(whole, group, wait=False)
        pieces = [g.reshape(-1, g.shape[-1]) for g in gradients]

        dx, reducing = None, None
        if ctx.needs_input_grad[0]:
            parts = weight.split(ctx.rows)
            dx = pieces[0] @ parts[0]
            for piece, part in zip(pieces[1:], parts[1:], strict=True):
                dx.addmm_(piece, part)
            dx = dx.view(*gradients[0].shape[:2], -1)
            if ctx.batch_first:
                dx = dx.transpose(0, 1)
            if world > 1:
                dx = dx.contiguous()
                if ctx.gather:
                    total, dx = dx, dx.new_empty(ctx.shape)
                    reducing = dist.reduce_scatter_tensor(dx, total, group=group, async_op=True)
                else:
                    reducing = dist.all_reduce(dx, group=group, async_op=True)
        dw = None
        if whole is not None:
            if gathering is not None:
                gathering.wait()
            flat, _ = _flat(whole, ctx.batch_first)
            gradient, first = WeightGradient(weight), 0
            for piece in pieces:
                gradient.add(piece, flat, first)
                first += piece.shape[1]
            dw = gradient.for_autograd()
        if reducing is not None:
            reducing.wait()
        return dx, dw, None, None, None, None, None


def _gathered(x: Tensor, group: Any, wait: bool) -> tuple[Tensor, Any]:
    """The whole sequence [s, b, d] from the ranks' parts, and what to wait for."""
    whole = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    work = dist.all_gather_into_tensor(whole, x.contiguous(), group=group, async_op=not wait)
    return whole, work


def _flat(x: Tensor, batch_first: bool) -> tuple[Tensor, tuple[int, int]]:
    """[s, b, d] as [s * b, d], and (s, b); with `batch_first` [b * s, d] and (b, s), free for one
    row."""
    if batch_first:
        x = x.transpose(0, 1)
    return x.reshape(-1, x.shape[-1]), (x.shape[0], x.shape[1])
