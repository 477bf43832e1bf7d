"""Triton kernels for the RMS norm of the residual stream, see `megatron_lt2.kernels.stream_norm`.

The forward pass has one program a row. In the backward pass a program takes many rows and adds up
the weight's gradient of them; the sum over programs is left to torch, so results do not depend on
the order in which they end.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PROGRAMS = 528
"""Of a backward pass: four a multiprocessor of an H100 or H200."""


def launch_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [n, D] contiguous, weight [D] -> y [n, D] in x's dtype, 1 / root mean square [n] fp32."""
    rows, width = x.shape
    y, scale = torch.empty_like(x), torch.empty(rows, device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_forward_kernel[(rows,)](
        x, weight, y, scale, eps, D=width, BLOCK=block, num_warps=_warps(block)
    )
    return y, scale


def launch_backward(
    x: Tensor, weight: Tensor, scale: Tensor, dy: Tensor, skip: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Gradients of x, with `skip` [n, D] added, and of the weight, in fp32."""
    rows, width = x.shape
    programs = min(rows, PROGRAMS)
    dx = torch.empty_like(x)
    sums = torch.empty(programs, width, device=x.device, dtype=torch.float32)
    block = triton.next_power_of_2(width)
    _norm_backward_kernel[(programs,)](
        x, weight, scale, dy, dx if skip is None else skip, dx, sums, rows, programs,
        D=width, BLOCK=block, SKIP=skip is not None, num_warps=_warps(block),
    )  # fmt: skip
    return dx, sums.sum(0)


def _warps(block: int) -> int:
    return min(16, max(1, block // 512))


if triton is not None:

    @triton.jit
    def _norm_forward_kernel(
        x, weight, y, scale, eps, D: tl.constexpr, BLOCK: tl.constexpr
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        at = tl.arange(0, BLOCK)
        inside = at < D
        values = tl.load(x + row * D + at, inside, 0).to(tl.float32)
        factor = tl.rsqrt(tl.sum(values * values, 0) / D + eps)
        w = tl.load(weight + at, inside, 0).to(tl.float32)
        tl.store(y + row * D + at, (values * factor * w).to(y.dtype.element_ty), inside)
        tl.store(scale + row, factor)

    @triton.jit(do_not_specialize=["rows", "programs"])
    def _norm_backward_kernel(
        x, weight, scale, dy, skip, dx, sums, rows, programs,
        D: tl.constexpr, BLOCK: tl.constexpr, SKIP: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0)
        at = tl.arange(0, BLOCK)
        inside = at < D
        w = tl.load(weight + at, inside, 0).to(tl.float32)
        total = tl.zeros([BLOCK], dtype=tl.float32)
        place = first.to(tl.int64) * D + at
        for row in range(first, rows, programs):
            values = tl.load(x + place, inside, 0).to(tl.float32)
            d = tl.load(dy + place, inside, 0).to(tl.float32)
            factor = tl.load(scale + row)
            unit = values * factor
            total += d * unit
            dw = d * w
            out = (dw - unit * (tl.sum(dw * unit, 0) / D)) * factor
            if SKIP:
                out += tl.load(skip + place, inside, 0).to(tl.float32)
            tl.store(dx + place, out.to(dx.dtype.element_ty), inside)
            place += tl.cast(programs, tl.int64) * D
        tl.store(sums + first * D + at, total, inside)
