"""Sliding-window attention on a GPU in bf16 against the plain form in fp32, with gradients."""

import pytest
import torch

from megatron_lt2.kernels.window import fla_window_attention, window_attention
from megatron_lt2.ops import window as ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kernel", ["as chosen", "fla"])
@pytest.mark.parametrize("bounds", [None, [0, 1, 2, 700, 700, 1000]], ids=["row", "packed"])
@pytest.mark.parametrize("window", [1, 256])
def test_window_attention(kernel: str, bounds: list[int] | None, window: int) -> None:
    generator = torch.Generator().manual_seed(3)
    shapes = ((1, 1000, 16, 128), (1, 1000, 4, 128), (1, 1000, 4, 128))
    inputs = [torch.randn(s, generator=generator).bfloat16().cuda() for s in shapes]
    direction = torch.randn(shapes[0], generator=generator).cuda()
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32).cuda()

    def run(fast: bool) -> list[torch.Tensor]:
        dtype = torch.bfloat16 if fast else torch.float32
        tensors = [x.to(dtype, copy=True).requires_grad_() for x in inputs]
        if not fast:
            out = ops.window_attention(*tensors, window, cu_seqlens=borders)
        elif kernel == "fla":
            out = fla_window_attention(*tensors, window, cu_seqlens=borders)
        else:
            out = window_attention(*tensors, window, backend="fla", cu_seqlens=borders)
        gradients = torch.autograd.grad((out.float() * direction).sum(), tensors)
        return [out.detach(), *gradients]

    for name, got, expected in zip("oqkv", run(True), run(False), strict=True):
        error = (got.float() - expected).norm() / expected.norm().clamp_min(1e-6)
        limit = 2e-2 if expected.norm() > 1e-3 else 1e3  # window 1: q and k have no influence
        assert error < limit, f"{name}: relative error {error:.1e}"
