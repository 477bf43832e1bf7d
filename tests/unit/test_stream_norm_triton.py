"""The Triton kernels of the residual stream's norm, interpreted on the CPU, against plain torch.

The interpreter must be switched on before Triton is first imported, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")

if INTERPRETING:
    from megatron_lt2.kernels.stream_norm import stream_norm, stream_norm_and_skip


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _run(backend, x, weight, skip, dy):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    same, y = stream_norm_and_skip(x, weight, 1e-6, backend=backend)
    outputs, gradients = [y], [dy]
    if skip is not None:
        outputs, gradients = [same, y], [skip, dy]
    return (same.detach(), y.detach(), *torch.autograd.grad(outputs, (x, weight), gradients))


@inside
@pytest.mark.parametrize("with_skip", [False, True])
@pytest.mark.parametrize("rows, width", [(1, 6), (7, 100), (600, 48), (3, 2048)])
def test_equals_torch(rows, width, with_skip):
    generator = torch.Generator().manual_seed(rows)
    x, skip, dy = (torch.randn(rows, 1, width, generator=generator) for _ in range(3))
    weight = 1 + 0.3 * torch.randn(width, generator=generator)
    found = _run("fla", x, weight, skip if with_skip else None, dy)
    wanted = _run("torch", x, weight, skip if with_skip else None, dy)
    assert torch.equal(found[0], x)
    for ours, plain in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)


@inside
def test_sixteen_bits_are_rounded_once():
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(9, 1, 96, generator=generator).bfloat16() for _ in range(2))
    weight = (1 + 0.3 * torch.randn(96, generator=generator)).bfloat16()
    found = _run("fla", x, weight, dy, dy)
    wanted = _run("torch", x.double(), weight.double(), dy.double(), dy.double())
    for ours, exact in zip(found[1:], wanted[1:], strict=True):
        # The interpreter cuts off where a GPU rounds.
        torch.testing.assert_close(ours.double(), exact, rtol=2**-7, atol=2**-7)


@inside
def test_only_the_skip_is_used():
    x = torch.randn(4, 1, 8, requires_grad=True)
    same, _ = stream_norm_and_skip(x, torch.ones(8, requires_grad=True), 1e-6, backend="fla")
    (gradient,) = torch.autograd.grad(same.sum(), x)
    assert torch.equal(gradient, torch.ones_like(x))
    assert stream_norm(x.detach(), torch.ones(8), 1e-6, backend="fla").shape == x.shape
