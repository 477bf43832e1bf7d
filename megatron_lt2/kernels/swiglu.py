"""SwiGLU with a choice of kernel, forward and backward apart.

They are no autograd function of their own: the feed-forward layer joins them with the product that
follows (megatron_lt2/parallel/feed_forward.py), so that their output need not be kept.
"""

from torch import Tensor

from ..ops import swiglu as ops
from . import swiglu_triton
from .backend import use_fla


def swiglu(x: Tensor, *, backend: str) -> Tensor:
    """silu(gate) * up of x = [gate | up], [..., 2 F] -> [..., F].

    Args:
        x: contiguous but for the stride of rows.
        backend: "fla" (a Triton kernel of ours) or "torch".
    """
    if not use_fla(backend):
        return ops.swiglu(x)
    y = swiglu_triton.launch_forward(x.reshape(-1, x.shape[-1]))
    return y.view(*x.shape[:-1], -1)


def swiglu_backward(x: Tensor, dy: Tensor, *, backend: str) -> tuple[Tensor, Tensor]:
    """Gradient of x [..., 2 F] from dy [..., F], and `swiglu(x)` once more, in one pass."""
    if not use_fla(backend):
        return ops.swiglu_backward(x, dy)
    dx, y = swiglu_triton.launch_backward(x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1]))
    return dx.view(x.shape), y.view(dy.shape)
