"""The Triton kernels of the cross entropy, interpreted on the CPU, against plain torch.

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
    from megatron_lt2.kernels import linear_cross_entropy_triton as triton_kernels
    from megatron_lt2.ops import linear_cross_entropy as ops


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _numbers(tokens, columns, real, dtype):
    generator = torch.Generator().manual_seed(columns)
    # Rows of a wider tensor; padding columns and what lies beyond them must not be read.
    wide = torch.full((tokens, columns + 3), torch.nan, dtype=dtype)
    logits = wide[:, :columns]
    values = 4 * torch.randn(tokens, real, generator=generator)
    # The maximum grows from block to block in one row, and falls in the next.
    values[::2] += torch.linspace(0, 30, real)
    values[1::2] -= torch.linspace(0, 30, real)
    logits[:, :real] = values.to(dtype)
    targets = torch.randint(-1, columns, (tokens,), generator=generator)
    targets[0] = real - 1 if real else -1
    weights = torch.randn(tokens, generator=generator)
    weights[1::3] = 0.0
    return wide, logits, targets, weights


CASES = [(7, 37, 37), (7, 37, 30), (5, 16, 1), (3, 33, 32), (2, 9000, 8999), (2, 8192, 4096)]


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, columns, real", CASES)
def test_statistics(tokens, columns, real, dtype):
    _, logits, targets, _ = _numbers(tokens, columns, real, dtype)
    out = torch.full((3, tokens + 2), torch.nan)
    triton_kernels.launch_statistics(logits, targets, real, out[:, :tokens])
    expected = ops.row_statistics(logits, targets, real)
    torch.testing.assert_close(out[:, :tokens], expected, rtol=2e-6, atol=0)
    assert out[:, tokens:].isnan().all()


@inside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens, columns, real", [*CASES, (4, 40, 0)])
def test_gradients(tokens, columns, real, dtype):
    wide, logits, targets, weights = _numbers(tokens, columns, real, dtype)
    lse = torch.linspace(2.0, 9.0, tokens) + 30
    expected = logits.clone()
    ops.logits_to_gradients(expected, targets, lse, weights, real)
    triton_kernels.launch_gradients(logits, targets, lse, weights, real)
    # The interpreter cuts what does not fit into bf16, torch rounds: one unit in the last place.
    bound = {"rtol": 2e-6, "atol": 1e-7} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 0}
    torch.testing.assert_close(logits, expected, **bound)
    assert wide[:, columns:].isnan().all()
    assert not logits[:, real:].any()


@inside
@pytest.mark.parametrize("shift", [1, -1])
def test_a_target_beside_the_right_one_is_seen(shift):
    _, logits, targets, weights = _numbers(7, 37, 30, torch.float32)
    targets.clamp_(1, 28)
    found = ops.row_statistics(logits, targets, 30)
    other = torch.empty(3, 7)
    triton_kernels.launch_statistics(logits, targets + shift, 30, other)
    assert (other[2] - found[2]).abs().max() > 0.1


@inside
def test_nan_is_not_hidden():
    logits = torch.zeros(2, 20)
    logits[1, 7] = torch.nan
    out = torch.empty(3, 2)
    triton_kernels.launch_statistics(logits, torch.tensor([3, 3]), 20, out)
    assert out[:, 0].isfinite().all() and not out[:, 1].isfinite().all()


@inside
def test_the_choice_of_backend_reaches_them(monkeypatch):
    from megatron_lt2.kernels import linear_cross_entropy as kernels

    generator = torch.Generator().manual_seed(1)
    hidden, weight = (torch.randn(n, 5, generator=generator) for n in (11, 24))
    targets = torch.randint(19, (11,), generator=generator)
    results, calls = [], []
    for name in ("launch_statistics", "launch_gradients"):
        launch = getattr(triton_kernels, name)

        def counted(*given, launch=launch, name=name):
            calls.append(name)
            return launch(*given)

        monkeypatch.setattr(triton_kernels, name, counted)
    for backend in ("torch", "fla"):
        d_weight = torch.zeros(24, 5)
        given = {"real": 19, "backend": backend, "chunk": 4}
        found = kernels.head_statistics(hidden, weight, targets, **given)
        lse = found[0] + found[1].log()
        d_hidden = kernels.head_gradients(
            *(hidden, weight, targets, lse, torch.ones(11)),
            add=lambda dz, x, d_weight=d_weight: d_weight.addmm_(dz.t(), x),
            **given,
        )
        results.append([lse, d_hidden, d_weight])
        assert len(calls) == (6 if backend == "fla" else 0)  # three chunks, two kernels
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
