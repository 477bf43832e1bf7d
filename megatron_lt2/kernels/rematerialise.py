"""Outputs whose memory is given back until the backward pass needs them.

A cheap operation's output is often kept by the operation behind it, beside the input that it came
from. Here the memory of such an output is freed as soon as it has been used, and filled with the
same numbers again when the backward pass reaches the operation behind it. Autograd keeps its
tensors meanwhile: only the storage under them is empty.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def drop_and_rebuild(
    outputs: Sequence[Tensor], rebuild: Callable[..., Any], trigger: Tensor
) -> None:
    """Free the memory of `outputs` now, and fill it again when the gradient of `trigger` arrives.

    Nothing happens where no gradient is recorded, and inside saved-tensor hooks (a checkpoint
    without reentry keeps other tensors than those of the graph that the gradients run through).

    Args:
        outputs: each with a storage of its own, used no more in this forward pass, and before
            their storage is needed in the backward pass, the gradient of `trigger` is.
        rebuild: called once as rebuild(*tensors) without gradients; writes into the tensors, of
            the outputs' shapes, what the outputs held. It must not hold the outputs themselves,
            which would keep the memory of a whole pass once it is filled again.
        trigger: what the outputs' users gave, or something computed from that alone.
    """
    if not (torch.is_grad_enabled() and trigger.requires_grad) or _hooked():
        return
    layouts = [(x.size(), x.stride(), x.storage_offset(), x.dtype) for x in outputs]
    waiting: list[Any] = [[x.untyped_storage() for x in outputs], rebuild]
    sizes = [storage.nbytes() for storage in waiting[0]]
    for storage in waiting[0]:
        storage.resize_(0)
    device = outputs[0].device

    def fill(gradient: Tensor) -> None:
        if not waiting:  # a second backward pass: what it needs is still there
            return
        storages, make = waiting
        # Before `make`, so that nothing of this pass is held longer than autograd holds it.
        waiting.clear()
        tensors = []
        for storage, size, (shape, stride, offset, dtype) in zip(
            storages, sizes, layouts, strict=True
        ):
            storage.resize_(size)
            # A tensor of its own on this storage: writing is no change of what autograd keeps.
            x = torch.empty(0, dtype=dtype, device=device)
            tensors.append(x.set_(storage, offset, shape, stride))
        with torch.no_grad():
            make(*tensors)

    trigger.register_hook(fill)


def _hooked() -> bool:
    """Whether saved tensors go through hooks."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
