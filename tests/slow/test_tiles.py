"""Our block sizes for FLA's gated delta rule against FLA's own, interpreted on the CPU.

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
    from megatron_lt2.kernels.gdn import gated_delta_rule
    from megatron_lt2.tuning import tiles


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


def _gradients(lengths):
    generator = torch.Generator().manual_seed(1)
    length = 130

    def make(*shape):
        return torch.randn(1, length, 2, *shape, generator=generator)

    inputs = [make(96), make(96), make(192), -make().abs(), make().sigmoid()]
    inputs = [x.requires_grad_() for x in inputs]
    borders = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    out, _ = gated_delta_rule(*inputs, backend="fla", cu_seqlens=borders)
    weights = torch.randn(out.shape, generator=generator)
    return torch.autograd.grad(out, inputs, weights)


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("lengths", [None, [1, 65, 64]], ids=["one document", "packed"])
def test_the_same_gradients(lengths, monkeypatch):
    import fla.ops.gated_delta_rule.chunk as chunk

    monkeypatch.setattr(chunk, "chunk_bwd_dqkwg", chunk.chunk_bwd_dqkwg)  # puts it back
    plain = _gradients(lengths)
    calls = []
    tiles.install()
    real = tiles._launch
    monkeypatch.setattr(tiles, "_launch", lambda **kw: calls.append(1) or real(**kw))
    ours = _gradients(lengths)
    assert calls
    for one, other in zip(plain, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4)


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")
def test_only_heads_that_fit():
    assert tiles.fits(96, 192)
    assert not any(tiles.fits(k, v) for k, v in ((128, 256), (64, 128), (72, 192), (96, 96)))
