"""Triton kernels for SwiGLU, see `megatron_lt2.kernels.swiglu`."""

from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

BLOCK = 1024
"""Channels of a row a program takes."""


def launch_forward(x: Tensor) -> Tensor:
    """[n, 2 F] -> [n, F]; rows may be slices of wider ones."""
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    _forward_kernel[grid](x, y, x.stride(0), F=width, BLOCK=BLOCK, num_warps=4)
    return y


def launch_backward(x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of x [n, 2 F] and the output [n, F] from x and dy [n, F]."""
    rows, width = dy.shape
    dy = dy if dy.stride(1) == 1 else dy.contiguous()
    dx, y = x.new_empty(x.shape), x.new_empty(rows, width)
    grid = (rows, triton.cdiv(width, BLOCK))
    _backward_kernel[grid](
        x, dy, dx, y, x.stride(0), dy.stride(0), F=width, BLOCK=BLOCK, num_warps=4
    )
    return dx, y


if triton is not None:

    @triton.jit
    def _forward_kernel(x, y, stride, F: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < F
        gate = tl.load(x + row * stride + at, inside, 0).to(tl.float32)
        up = tl.load(x + row * stride + F + at, inside, 0).to(tl.float32)
        out = gate * tl.sigmoid(gate) * up
        tl.store(y + row * F + at, out.to(y.dtype.element_ty), inside)

    @triton.jit
    def _backward_kernel(x, dy, dx, y, x_stride, dy_stride, F: tl.constexpr, BLOCK: tl.constexpr):
        row = tl.program_id(0).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < F
        gate = tl.load(x + row * x_stride + at, inside, 0).to(tl.float32)
        up = tl.load(x + row * x_stride + F + at, inside, 0).to(tl.float32)
        d = tl.load(dy + row * dy_stride + at, inside, 0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        d_gate = d * up * sigmoid * (1 + gate * (1 - sigmoid))
        tl.store(dx + row * 2 * F + at, d_gate.to(dx.dtype.element_ty), inside)
        tl.store(dx + row * 2 * F + F + at, (d * silu).to(dx.dtype.element_ty), inside)
        tl.store(y + row * F + at, (silu * up).to(y.dtype.element_ty), inside)
