"""What layers with FLA's kernels keep for the backward pass, against `model/activations.py`.

The kernels run in Triton's interpreter, which must be switched on before Triton is first imported,
hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("fla")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

pytestmark = pytest.mark.slow

if INTERPRETING:
    import tests.interpreter  # noqa: F401
    from megatron_lt2.parallel import platform

    platform.install()

from megatron_lt2.config.mixers import (  # noqa: E402
    DeltaNetConfig,
    HGRN2Config,
    LinearAttentionConfig,
    Mamba2Config,
)
from megatron_lt2.config.schema import ModelConfig, ParallelConfig  # noqa: E402
from megatron_lt2.recurrent.names import RECURRENT  # noqa: E402

VARIANTS = {
    **{name: {} for name in RECURRENT},
    "deltanet, gated": {"deltanet": DeltaNetConfig(output_gate=True)},
    "linear, normalised": {"linear": LinearAttentionConfig(normalize=True)},
    "mamba2, groups": {"mamba2": Mamba2Config(norm="head", groups=2)},
    "hgrn2, bounded": {"hgrn2": HGRN2Config(lower_bound=0.3, norm="head")},
}


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=900, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert f"{2 * len(VARIANTS)} passed" in done.stdout


@pytest.fixture(scope="module")
def one_rank():
    from megatron_lt2.parallel.start import start_ranks, stop_ranks

    start_ranks(ParallelConfig(), 1)
    yield
    stop_ranks()


@pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")
@pytest.mark.parametrize("cheap", [False, True], ids=["", "cheap"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_keep_what_is_declared(variant, cheap, one_rank, monkeypatch) -> None:
    from megatron_lt2.mixers import linear
    from megatron_lt2.model import activations
    from tests.kept import as_on_a_gpu, kept_bytes

    as_on_a_gpu(monkeypatch)
    monkeypatch.setattr(linear, "NARROW", 8)  # sections as wide as real ones, beside it
    name = variant.split(",")[0]
    model = ModelConfig(
        num_layers=1,
        hidden_size=128,
        num_heads=4,
        ffn_hidden_size=256,
        vocab_size=61,
        pattern=name,
        loops=1,
        **VARIANTS[variant],
    )
    share = activations.Share(tokens=128, packed=False, cheap=cheap)
    declared = activations.layer_bytes(name, model, share)
    assert kept_bytes(model, share, "fla") == pytest.approx(declared, rel=0.02)
