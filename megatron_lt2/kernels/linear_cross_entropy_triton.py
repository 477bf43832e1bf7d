"""Triton kernels of the cross entropy, see `megatron_lt2.kernels.linear_cross_entropy`.

Both walk over rows that are as long as the vocabulary. One reads a row once and keeps a running
maximum with the sum of exponentials below it; the other writes the gradients over the logits.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

COLUMNS = 4096
"""Of a block."""

WARPS = 8


def launch_statistics(logits: Tensor, targets: Tensor, real: int, out: Tensor) -> None:
    """logits [n, v] (rows may be slices), targets [n] -> out [3, n] fp32, rows side by side."""
    tokens = len(logits)
    lowest = torch.finfo(logits.dtype).min
    _statistics_kernel[(tokens,)](
        logits, targets, out, logits.stride(0), out.stride(0), real, lowest,
        BV=_block(real), num_warps=WARPS,
    )  # fmt: skip


def launch_gradients(
    logits: Tensor, targets: Tensor, lse: Tensor, weights: Tensor, real: int
) -> None:
    """Overwrites logits [n, v]; targets, lse and weights are [n], the last two fp32."""
    tokens, columns = logits.shape
    block = _block(columns)
    _gradients_kernel[(tokens, triton.cdiv(columns, block))](
        logits, targets, lse, weights, logits.stride(0), real, columns,
        BV=block, num_warps=WARPS,
    )  # fmt: skip


def _block(columns: int) -> int:
    return min(COLUMNS, max(16, triton.next_power_of_2(columns)))


if triton is not None:

    @triton.jit
    def _statistics_kernel(
        logits_ptr, targets_ptr, out_ptr, row_stride, out_stride, real, lowest, BV: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64)
        own = logits_ptr + row * row_stride
        v = tl.arange(0, BV)
        highest = -float("inf")
        total = 0.0
        for start in range(0, real, BV):
            x = tl.load(own + start + v, mask=start + v < real, other=-float("inf"))
            x = x.to(tl.float32)
            higher = tl.maximum(highest, tl.max(x, axis=0))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
            highest = higher
        target = tl.load(targets_ptr + row)
        is_mine = (target >= 0) & (target < real)
        chosen = tl.load(own + target, mask=is_mine, other=0.0).to(tl.float32)
        chosen = tl.where(target >= real, lowest, chosen)
        tl.store(out_ptr + row, highest)
        tl.store(out_ptr + out_stride + row, total)
        tl.store(out_ptr + 2 * out_stride + row, chosen)

    @triton.jit
    def _gradients_kernel(
        logits_ptr, targets_ptr, lse_ptr, weights_ptr, row_stride, real, columns,
        BV: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        v = tl.program_id(1) * BV + tl.arange(0, BV)
        own = logits_ptr + row * row_stride + v
        lse = tl.load(lse_ptr + row)
        target = tl.load(targets_ptr + row)
        weight = tl.load(weights_ptr + row)
        x = tl.load(own, mask=v < real, other=-float("inf")).to(tl.float32)
        gradient = (tl.exp(x - lse) - tl.where(v == target, 1.0, 0.0)) * weight
        gradient = tl.where(v < real, gradient, 0.0)
        tl.store(own, gradient.to(logits_ptr.dtype.element_ty), mask=v < columns)
