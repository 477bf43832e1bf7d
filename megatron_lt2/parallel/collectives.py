"""Collectives that autograd differentiates.

Each is linear, and its backward pass is the transposed collective: the sum over ranks that belongs
to a gather is made by a reduce-scatter. torch.distributed's own differentiable gather is not used,
because on gloo it drops the gradients of other ranks. Sums are made in fp32 at least, whatever the
tensors are. Buffers are laid out with the ranks first and flat, which both NCCL and gloo take.

Every rank of the group must call these in the same order, and its backward pass must reach them
too, or the others wait for it: `attach` ties in what a rank has no use for.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


def all_gather(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """The ranks' tensors one after the other along `dim`, in rank order.

    Args:
        x: of the same shape on every rank.
        group: process group.
        dim: which grows by the number of ranks.
    """
    return _AllGather.apply(x, group, dim % x.dim())


def reduce_scatter(x: Tensor, group: Any, dim: int = 0) -> Tensor:
    """This rank's slice along `dim` of the sum over ranks.

    Args:
        x: of the same shape on every rank.
        group: process group.
        dim: which shrinks; must be a multiple of the number of ranks.
    """
    return _ReduceScatter.apply(x, group, dim % x.dim())


def all_to_all(x: Tensor, group: Any, split_dim: int, join_dim: int) -> Tensor:
    """Slice i along `split_dim` goes to rank i; what arrives is joined along `join_dim`.

    Args:
        x: of the same shape on every rank.
        group: process group.
        split_dim: which shrinks; must be a multiple of the number of ranks.
        join_dim: which grows, in rank order.
    """
    return _AllToAll.apply(x, group, split_dim % x.dim(), join_dim % x.dim())


def send_to_next(x: Tensor, group: Any, step: int = 1) -> Tensor:
    """What the rank `step` places before this one passed in; zeros where there is none.

    Args:
        x: of the same shape on every rank. What the last `step` ranks pass in goes nowhere.
        group: process group.
        step: how far it travels.
    """
    return _Shift.apply(x, group, step)


def attach(x: Tensor, *others: Tensor) -> Tensor:
    """x, whose backward pass also runs that of the others, with no gradient for them."""
    return _Attach.apply(x, *others)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _gather(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_scatter(dy, ctx.group, ctx.dim), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _sum_scatter(x, group, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _gather(dy, ctx.group, ctx.dim), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, split_dim: int, join_dim: int) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, join_dim)
        return _exchange(x, group, split_dim, join_dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        split_dim, join_dim = ctx.dims
        return _exchange(dy, ctx.group, join_dim, split_dim), None, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, step: int) -> Tensor:
        ctx.group, ctx.step = group, step
        return _shift(x, group, step)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return _shift(dy, ctx.group, -ctx.step), None, None


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.count = len(others)
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        return dy, *(None,) * ctx.count


def _gather(x: Tensor, group: Any, dim: int) -> Tensor:
    ranks = group.size()
    if ranks == 1:
        return x
    pieces = x.new_empty(ranks * x.numel())
    dist.all_gather_into_tensor(pieces, x.contiguous().view(-1), group=group)
    pieces = pieces.view(ranks, *x.shape)
    return pieces.movedim(0, dim).flatten(dim, dim + 1)


def _sum_scatter(x: Tensor, group: Any, dim: int) -> Tensor:
    ranks = group.size()
    if ranks == 1:
        return x
    assert x.shape[dim] % ranks == 0, f"{x.shape[dim]} cannot be cut for {ranks} ranks"
    parts = x.unflatten(dim, (ranks, -1)).movedim(dim, 0)
    summed = parts.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
    mine = torch.empty_like(summed[0])
    dist.reduce_scatter_tensor(mine.view(-1), summed.view(-1), group=group)
    return mine.to(x.dtype)


def _exchange(x: Tensor, group: Any, split_dim: int, join_dim: int) -> Tensor:
    ranks = group.size()
    if ranks == 1:
        return x
    assert x.shape[split_dim] % ranks == 0, f"{x.shape[split_dim]} cannot be cut for {ranks} ranks"
    leaving = x.unflatten(split_dim, (ranks, -1)).movedim(split_dim, 0).contiguous()
    arriving = torch.empty_like(leaving)
    dist.all_to_all_single(arriving.view(-1), leaving.view(-1), group=group)
    return arriving.movedim(0, join_dim).flatten(join_dim, join_dim + 1)


def _shift(x: Tensor, group: Any, step: int) -> Tensor:
    """x of the rank `step` places before this one; zeros where there is none.

    As one all-to-all in which everybody talks to one neighbour: unlike separate sends and receives
    it needs no care about who goes first.
    """
    ranks, rank = group.size(), group.rank()
    arriving = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
    if ranks == 1:
        return arriving.view(x.shape)
    sizes_out, sizes_in = [0] * ranks, [0] * ranks
    if 0 <= rank + step < ranks:
        sizes_out[rank + step] = x.numel()
    if 0 <= rank - step < ranks:
        sizes_in[rank - step] = x.numel()
    dist.all_to_all_single(
        arriving[: sum(sizes_in)],
        x.contiguous().view(-1)[: sum(sizes_out)],
        output_split_sizes=sizes_in,
        input_split_sizes=sizes_out,
        group=group,
    )
    return arriving.view(x.shape)
