"""FLA's attention kernel, interpreted on the CPU, against the blocked form: what its window counts.

The interpreter must be switched on before Triton is first imported, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("fla")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.slow

if INTERPRETING:
    import tests.interpreter  # noqa: F401
    from megatron_lt2.kernels.window import fla_window_attention
    from megatron_lt2.ops.window import window_attention


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("lengths", [None, [1, 70, 130, 1]], ids=["one document", "packed"])
@pytest.mark.parametrize("window", [1, 9, 80, 500])
def test_fla_agrees(window, lengths):
    generator = torch.Generator().manual_seed(3)
    length = 202
    inputs = [
        torch.randn(1, length, heads, 16, generator=generator).requires_grad_()
        for heads in (4, 2, 2)
    ]
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    weights = torch.randn(1, length, 4, 16, generator=generator)
    results = []
    for function in (window_attention, fla_window_attention):
        out = function(*inputs, window, scale=0.3, cu_seqlens=cu_seqlens)
        results.append([out, *torch.autograd.grad((out * weights).sum(), inputs)])
    for name, ours, theirs in zip(("output", "dq", "dk", "dv"), *results, strict=True):
        # A window of one has no gradient of q and k: their norm is rounding.
        error = ((ours - theirs).norm() / ours.norm().clamp(min=1.0)).item()
        assert error < 3e-5, f"{name} differs by {error:.1e}"
