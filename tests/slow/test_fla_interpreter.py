"""FLA's Triton kernels, interpreted on the CPU in fp32, against the plain PyTorch operations.

The interpreter must be switched on before Triton is first imported, hence a process of its own:
the first test starts this file again with TRITON_INTERPRET=1, and the others run there.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

pytest.importorskip("fla")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.slow
inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")

if INTERPRETING:
    import tests.interpreter  # noqa: F401
    from megatron_lt2.kernels.conv import causal_conv1d
    from megatron_lt2.kernels.gdn import gated_delta_rule
    from megatron_lt2.kernels.norms import gated_rms_norm


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """Fill new tensors with NaN, so that a kernel that reads what it never wrote is found out."""
    torch.use_deterministic_algorithms(True)
    assert torch.utils.deterministic.fill_uninitialized_memory and torch.empty(1).isnan()
    yield
    torch.use_deterministic_algorithms(False)


def assert_backends_agree(call, inputs: dict[str, Tensor]) -> None:
    """Outputs and all gradients of `call(backend, **inputs)` agree between the backends."""
    results = {}
    for backend in ("torch", "fla"):
        outputs = [y for y in call(backend, **inputs) if y is not None]
        random = torch.Generator().manual_seed(5)
        loss = sum((y.float() * torch.randn(y.shape, generator=random)).sum() for y in outputs)
        results[backend] = outputs, torch.autograd.grad(loss, list(inputs.values()))
    for ours, theirs in zip(results["torch"][0], results["fla"][0], strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)
    for name, ours, theirs in zip(inputs, results["torch"][1], results["fla"][1], strict=True):
        error = (theirs - ours).norm() / ours.norm()
        assert error < 1e-5, f"gradient of {name}: relative error {error:.2e}"


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def gdn_inputs(batch: int, length: int, documents: int, with_state: bool) -> dict[str, Tensor]:
    heads, key, value = 2, 12, 20
    inputs = {
        "q": normal(batch, length, heads, key, seed=0),
        "k": normal(batch, length, heads, key, seed=1),
        "v": normal(batch, length, heads, value, seed=2),
        "g": -normal(batch, length, heads, seed=3).square(),
        "beta": normal(batch, length, heads, seed=4).sigmoid(),
    }
    if with_state:
        inputs["initial_state"] = normal(documents, heads, key, value, seed=5)
    return {name: x.requires_grad_() for name, x in inputs.items()}


@inside
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize(
    "borders",
    [None, torch.tensor([0, 1, 65, 67, 70]), torch.tensor([0, 64, 70], dtype=torch.int32)],
    ids=["rows", "packed-int64", "packed-int32"],
)
def test_gdn(borders: Tensor | None, with_state: bool) -> None:
    if borders is None:
        batch, length, documents = 2, 67, 2
    else:
        batch, length, documents = 1, int(borders[-1]), len(borders) - 1

    def call(backend: str, q, k, v, g, beta, initial_state=None):
        return gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            backend=backend,
            initial_state=initial_state,
            cu_seqlens=borders,
            output_final_state=with_state,
        )

    assert_backends_agree(call, gdn_inputs(batch, length, documents, with_state))


@inside
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bounds", [None, [0, 1, 3, 65, 70]])
def test_conv(bounds: list[int] | None, activation: str | None) -> None:
    batch, length = (2, 67) if bounds is None else (1, bounds[-1])
    documents = batch if bounds is None else len(bounds) - 1
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    inputs = {
        "x": normal(batch, length, 10, seed=0),
        "weight": normal(10, 4, seed=1),
        "state": normal(documents, 10, 3, seed=2),
    }

    def call(backend: str, x, weight, state):
        return causal_conv1d(
            x,
            weight,
            backend=backend,
            activation=activation,
            initial_state_NDW=state,
            cu_seqlens=borders,
            output_final_state=True,
        )

    assert_backends_agree(call, {name: x.requires_grad_() for name, x in inputs.items()})


@inside
def test_conv_of_a_strided_input() -> None:
    """The model hands over a slice of a wider, transposed tensor."""

    def call(backend: str, wide, weight):
        x = wide.transpose(0, 1)[..., 2:12]
        return causal_conv1d(x, weight, backend=backend)

    inputs = {"wide": normal(67, 2, 16, seed=0), "weight": normal(10, 4, seed=1)}
    assert_backends_agree(call, {name: x.requires_grad_() for name, x in inputs.items()})


@inside
def test_gated_norm() -> None:
    def call(backend: str, x, gate, weight):
        return [gated_rms_norm(x, gate, weight, 1e-3, backend=backend)]

    inputs = {
        "x": normal(2, 35, 3, 20, seed=0),
        "gate": normal(2, 35, 3, 20, seed=1),
        "weight": normal(20, seed=2),
    }
    assert_backends_agree(call, {name: x.requires_grad_() for name, x in inputs.items()})
