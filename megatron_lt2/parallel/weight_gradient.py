"""Weight gradients added up in fp32, where megatron-core keeps them.

A looped model uses every weight T times in a step. Left to autograd, the T gradients of a bf16
weight are added in bf16, rounded each time, and the sum is then added to megatron-core's fp32
`main_grad`: two passes over memory more for each use, and less exact. Here the matrix product adds
its result to `main_grad` itself. megatron-core does so too (`gradient_accumulation_fusion`), but
only with kernels of Apex or Transformer Engine, and autograd then still adds T placeholders.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class WeightGradient:
    """The gradient of one use of a weight, whose rows come in one or several products.

    Args:
        weight: [rows, d]. Where megatron-core's DDP gave it an fp32 `main_grad`, products are added
            there; else they make a tensor for autograd.
        adds: whether `add` is called several times for the same rows.
    """

    def __init__(self, weight: Tensor, *, adds: bool = False) -> None:
        self._weight = weight
        main = getattr(weight, "main_grad", None)
        self._main = main if _takes(weight, main) else None
        self._own: Tensor | None = None
        if self._main is None:
            dtype = torch.promote_types(weight.dtype, torch.float32) if adds else weight.dtype
            make = torch.zeros if adds else torch.empty
            self._own = make(weight.shape, dtype=dtype, device=weight.device)
        self._adds = adds

    def add(self, dy: Tensor, x: Tensor, first_row: int = 0) -> None:
        """Add dy^T x to the rows from `first_row` on; dy is [n, rows], x is [n, d]."""
        target = self._own if self._main is None else self._main
        assert target is not None
        target = target[first_row : first_row + dy.shape[1]]
        if self._main is None and not self._adds:
            torch.mm(dy.t(), x, out=target)
        else:
            _add_product(target, dy.t(), x)

    def for_autograd(self) -> Tensor | None:
        """What the backward pass returns for the weight, after the last product."""
        if self._own is not None:
            return self._own.to(self._weight.dtype)
        return _placeholder(self._weight)


def add_weight_gradient(weight: Tensor, dy: Tensor, x: Tensor) -> Tensor | None:
    """The gradient of x W^T in one product; returns what autograd gets for the weight.

    Args:
        weight: [rows, d].
        dy: [n, rows].
        x: [n, d].
    """
    gradient = WeightGradient(weight)
    gradient.add(dy, x)
    return gradient.for_autograd()


def mark_tied(weight: Tensor) -> None:
    """Say that `weight` also gets gradients by way of autograd on this rank, as the output head
    does that is the embedding too: those are added as well."""
    weight.lt2_tied = True  # type: ignore[attr-defined]  # torch lets parameters have attributes


def expect_no_gradient(parameters: Iterable[Tensor]) -> None:
    """Say that nobody waits for these parameters' gradients from autograd: megatron-core does only
    where it reduces gradients while the backward pass runs. Saves a tensor of a weight's size."""
    for parameter in parameters:
        parameter.lt2_not_awaited = True  # type: ignore[attr-defined]  # as above


def _takes(weight: Tensor, main: Any) -> bool:
    """Whether the products of a weight's gradient can be added to its `main_grad`."""
    if main is None or torch.promote_types(main.dtype, weight.dtype) != main.dtype:
        return False
    # A copy of the embedding on another pipeline stage: megatron-core has rules of its own.
    return not (
        getattr(weight, "zero_out_wgrad", False) or getattr(weight, "shared_embedding", False)
    )


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    """target += left right, in target's dtype."""
    if target.dtype == left.dtype:
        target.addmm_(left, right)
    elif target.is_cuda:
        torch.addmm(target, left, right, out_dtype=target.dtype, out=target)
    else:  # no product of mixed dtypes on CPU
        target.add_(left @ right)


def _placeholder(weight: Any) -> Tensor | None:
    """A gradient of nothing in particular, once in a backward pass, and None after that.

    With overlap, megatron-core's hook insists on a gradient before it counts the weight as done; it
    does not read it, for the weight is marked. Autograd would add up more than one.
    """
    if getattr(weight, "lt2_tied", False):
        return None  # the other use brings a gradient, which the hook has to add
    weight.grad_added_to_main_grad = True
    if getattr(weight, "lt2_not_awaited", False):
        return None
    current = torch._C._current_graph_task_id()
    if getattr(weight, "lt2_backward", None) == current:
        return None
    weight.lt2_backward = current
    return torch.empty_like(weight)
