"""Norm and scaling of all gradients at once, where megatron-core goes through them one by one.

Without Transformer Engine and Apex, megatron-core 0.19.2 waits for the GPU once a gradient to learn
its norm, some two hundred times a step, and clips through a copy of each.
"""

from typing import Any

import torch
from megatron.core.optimizer import clip_grads
from torch import Tensor


def install() -> None:
    """Have gradient clipping work on lists of tensors; other libraries' kernels stay."""
    current: Any = clip_grads
    if current.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm":
        current.l2_norm_impl = _norm
    if current.multi_tensor_scale_impl.__name__ == "local_multi_tensor_scale":
        current.multi_tensor_scale_impl = _scale


def _norm(chunk: int, overflow: Any, lists: list[list[Tensor]], each: bool) -> tuple[Tensor, None]:
    """Euclidean norm [1] of all numbers in a list of tensors, in the words of Apex's kernel."""
    (tensors,) = lists
    return torch.stack(torch._foreach_norm(tensors)).norm().reshape(1), None


def _scale(chunk: int, overflow: Any, lists: list[list[Tensor]], factor: float) -> None:
    """Write the first list times a number into the second."""
    source, target = lists
    same = all(a.data_ptr() == b.data_ptr() for a, b in zip(source, target, strict=True))
    if not same:
        torch._foreach_copy_(target, source)
    torch._foreach_mul_(target, factor)
