"""What the tests of interpreted kernels share.

The interpreter must be switched on before Triton is first imported, hence a process of its own:
the first test of a file starts the file again with TRITON_INTERPRET=1, and the others run there.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")
outside = pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")

if INTERPRETING:
    import tests.interpreter  # noqa: F401


def run_inside(file: str) -> None:
    """Run the tests of a file that are marked `inside`."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-rs", file]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def nan_in_fresh_memory() -> Iterator[None]:
    """Fill new tensors with NaN, so that a kernel that reads what it never wrote is found out."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


# Sums over all tokens with terms of both signs: what is left of fp32 after the cancellation.
SUMMED = ("A_log", "dt_bias")
SUMMED_FACTOR = 20


def assert_backends_agree(
    call: Callable[[str, dict[str, Tensor]], list[Tensor]],
    inputs: dict[str, Tensor],
    tolerance: float = 1e-5,
) -> None:
    """Outputs and all gradients of `call(backend, inputs)` agree between the backends.

    Args:
        call: runs the kernel.
        inputs: leaves; torch gets their values in fp32.
        tolerance: largest relative error, 20 times larger for gradients summed over all tokens.
    """
    results = {}
    for backend in ("torch", "fla"):
        x = {
            name: (y.float() if backend == "torch" else y).detach().requires_grad_()
            for name, y in inputs.items()
        }
        outputs = call(backend, x)
        random = torch.Generator().manual_seed(5)
        weights = [torch.randn(y.shape, generator=random) for y in outputs]
        loss = sum((y.float() * w).sum() for y, w in zip(outputs, weights, strict=True))
        results[backend] = outputs, torch.autograd.grad(loss, list(x.values()))
    assert len(results["torch"][0]) == len(results["fla"][0])
    names = [f"output {n}" for n in range(len(results["fla"][0]))]
    names += [f"gradient of {name}" for name in inputs]
    ours, theirs = ([*results[b][0], *results[b][1]] for b in ("torch", "fla"))
    errors = {
        name: ((z.float() - y.float()).norm() / y.float().norm().clamp_min(1e-30)).item()
        for name, y, z in zip(names, ours, theirs, strict=True)
    }
    # `not <=` also catches nan.
    bad = {
        name: error
        for name, error in errors.items()
        if not error <= tolerance * (SUMMED_FACTOR if name.split()[-1] in SUMMED else 1)
    }
    assert not bad, f"relative errors above {tolerance}: {bad}"
