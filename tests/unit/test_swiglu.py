"""SwiGLU: the plain form against autograd, the Triton kernels (interpreted) against the plain form.

The interpreter must be switched on before Triton is first imported, hence a process of its own.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.kernels.swiglu import swiglu, swiglu_backward
from megatron_lt2.ops import swiglu as ops

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")

if INTERPRETING:
    from megatron_lt2.kernels import swiglu_triton


@pytest.mark.skipif(
    INTERPRETING or importlib.util.find_spec("triton") is None,
    reason="is the process that this test starts",
)
def test_in_a_process_with_the_interpreter():
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _numbers(rows, width, dtype=torch.float64, scale=3.0):
    generator = torch.Generator().manual_seed(width)
    x = scale * torch.randn(*rows, 2 * width, generator=generator, dtype=torch.float64)
    dy = torch.randn(*rows, width, generator=generator, dtype=torch.float64)
    return x.to(dtype), dy.to(dtype)


def _plain(x):
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.mark.parametrize("rows", [(5,), (3, 2)])
def test_the_plain_form_is_what_autograd_differentiates(rows):
    x, dy = _numbers(rows, 7)
    x.requires_grad_()
    expected = _plain(x)
    (dx,) = torch.autograd.grad(expected, x, dy)
    torch.testing.assert_close(swiglu(x, backend="torch"), expected)
    got, again = swiglu_backward(x.detach(), dy, backend="torch")
    torch.testing.assert_close(got, dx, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(again, expected.detach(), rtol=1e-14, atol=1e-14)


def test_large_inputs_saturate():
    x, dy = _numbers((4,), 6, scale=300.0)
    got, again = ops.swiglu_backward(x, dy)
    assert got.isfinite().all() and again.isfinite().all()


def test_16_bit_numbers_are_rounded_once():
    x, dy = _numbers((9,), 33, torch.bfloat16)
    exact = _plain(x.double())
    assert torch.equal(ops.swiglu(x), _plain(x.float()).bfloat16())
    error = (ops.swiglu(x).double() - exact).abs() / exact.abs()
    assert error.max() <= 2**-8
    dx, again = ops.swiglu_backward(x, dy)
    assert dx.dtype == again.dtype == torch.bfloat16 and torch.equal(again, ops.swiglu(x))


@inside
@pytest.mark.parametrize("rows, width", [(1, 1), (3, 37), (2, 1024), (2, 1027), (1, 2500)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_kernels(rows, width, dtype):
    x, dy = _numbers((rows,), width, dtype)
    bound = {"rtol": 3e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2e-3, "atol": 1e-6}
    torch.testing.assert_close(swiglu_triton.launch_forward(x), ops.swiglu(x), **bound)
    for got, expected in zip(
        swiglu_triton.launch_backward(x, dy), ops.swiglu_backward(x, dy), strict=True
    ):
        assert got.is_contiguous()
        torch.testing.assert_close(got, expected, **bound)


@inside
def test_kernels_take_slices_of_wider_rows():
    x, dy = _numbers((3,), 19, torch.float32)
    wide_x, wide_dy = torch.full((3, 50), torch.nan), torch.full((3, 30), torch.nan)
    wide_x[:, 4:42], wide_dy[:, 2:21] = x, dy
    torch.testing.assert_close(swiglu_triton.launch_forward(wide_x[:, 4:42]), ops.swiglu(x))
    for given in (wide_dy[:, 2:21], dy.t().contiguous().t()):
        got = swiglu_triton.launch_backward(wide_x[:, 4:42], given)
        for one, expected in zip(got, ops.swiglu_backward(x, dy), strict=True):
            torch.testing.assert_close(one, expected)


@inside
def test_the_choice_of_backend_reaches_them(monkeypatch):
    from megatron_lt2.kernels import swiglu as kernels

    calls = []
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(swiglu_triton, name)
        monkeypatch.setattr(
            swiglu_triton,
            name,
            lambda *given, launch=launch, name=name: calls.append(name) or launch(*given),
        )
    monkeypatch.setattr(kernels, "use_fla", lambda backend: backend == "fla")
    x, dy = _numbers((3, 2), 5, torch.float32)
    torch.testing.assert_close(swiglu(x, backend="fla"), ops.swiglu(x))
    got = swiglu_backward(x, dy, backend="fla")
    for one, expected in zip(got, ops.swiglu_backward(x, dy), strict=True):
        assert one.shape == expected.shape
        torch.testing.assert_close(one, expected)
    assert calls == ["launch_forward", "launch_backward"]
