"""The RMS norm of the residual stream, with a choice of kernel.

A layer needs its input twice: normed, and as it is for the residual add. The two gradients that
come back are added where the norm's is made.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import use_fla


def stream_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str) -> Tensor:
    """`rms_norm` of the residual stream [..., D], whose rows are long: on torch's own kernel, or on
    ours with "fla"."""
    return stream_norm_and_skip(x, weight, eps, backend=backend)[1]


def stream_norm_and_skip(
    x: Tensor, weight: Tensor, eps: float, *, backend: str
) -> tuple[Tensor, Tensor]:
    """x once more, for the residual add behind, and its norm.

    On our kernel the gradient that comes back along the first is added where the norm's is made,
    not in a pass over memory of its own.
    """
    if not use_fla(backend) or x.dtype != weight.dtype:
        return x, F.rms_norm(x, (x.shape[-1],), weight, eps)
    return _NormAndSkip.apply(x, weight, eps)


class _NormAndSkip(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        from .rms_norm_triton import launch_forward

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        y, scale = launch_forward(rows, weight, eps)
        ctx.save_for_backward(x, weight, scale)
        ctx.set_materialize_grads(False)
        return x.view_as(x), y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, skip: Tensor | None, dy: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, None]:
        from .rms_norm_triton import launch_backward

        x, weight, scale = ctx.saved_tensors
        if dy is None:
            return skip, None, None
        rows, d = (t.reshape(-1, t.shape[-1]).contiguous() for t in (x, dy))
        extra = None if skip is None else skip.reshape(rows.shape).contiguous()
        dx, dw = launch_backward(rows, weight, scale, d, extra)
        return dx.view(x.shape), dw.to(weight.dtype), None
