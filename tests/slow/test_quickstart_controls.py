"""Control runs of the quickstart: the mixers must matter for its validation loss.

LT2TEST_CONTROL_STEPS=N makes both runs N steps long instead of the config's; with few steps they
can be tried, but the demanded difference does not hold.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from megatron_lt2.tools.metrics_file import loss_curves, read_records

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "launchers" / "configs" / "quickstart.yaml"
PLAIN = ["-m", "megatron_lt2.train"]
ZEROED = ["tests/slow/zeroed_mixers.py"]

pytestmark = pytest.mark.slow


def _steps() -> int:
    configured = yaml.safe_load(CONFIG.read_text())["training"]["steps"]
    return int(os.environ.get("LT2TEST_CONTROL_STEPS") or configured)


def _call(*arguments: object) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "LT2_FORCE_CPU": "1"}
    # Each of the two ranks takes one core, as in the quickstart.
    environment.pop("OMP_NUM_THREADS", None)
    subprocess.run(
        [sys.executable, *map(str, arguments)], check=True, cwd=ROOT, env=environment, timeout=3600
    )


def _shortened(steps: int) -> list[object]:
    """The config's schedule, its warm-up and decay shrunk with the number of steps."""
    values = yaml.safe_load(CONFIG.read_text())
    share = steps / values["training"]["steps"]
    warmup, decay = (values["optimizer"][name] for name in ("warmup_steps", "decay_steps"))
    return [
        *("--training.steps", steps),
        *("--optimizer.warmup_steps", int(warmup * share)),
        *("--optimizer.decay_steps", max(1, int(decay * share))),
    ]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of the quickstart's token files, made with its own commands."""
    folder = tmp_path_factory.mktemp("quickstart")
    text, tokenizer = folder / "corpus.jsonl", folder / "tokenizer"
    _call("data_prep/corpus.py", "--output", folder)
    _call(
        *("data_prep/train_tokenizer.py", "--input", text),
        *("--output", tokenizer, "--vocab-size", 4096),
    )
    _call(
        *("data_prep/tokenize.py", "--input", text, "--tokenizer", tokenizer),
        *("--output", folder / "corpus", "--append-eod", "--workers", 2),
    )
    return folder / "corpus"


def _validation_loss(program: list[str], corpus: Path, run: Path, steps: int) -> float:
    _call(
        *("-m", "megatron_lt2.tools.spawn", "--nproc", 2, "--", *program, "--config", CONFIG),
        *("--run_dir", run, "--data.path", corpus, *_shortened(steps)),
    )
    curves = loss_curves(read_records(run / "metrics.jsonl"))
    assert curves.eval_steps[-1] == steps
    assert curves.final_eval is not None
    return curves.final_eval


def test_mixers_matter(corpus: Path, tmp_path: Path) -> None:
    steps = _steps()
    plain = _validation_loss(PLAIN, corpus, tmp_path / "plain", steps)
    zeroed = _validation_loss(ZEROED, corpus, tmp_path / "zeroed", steps)
    print(f"validation loss after {steps} steps: {plain:.4f}, with zeroed mixers {zeroed:.4f}")
    assert zeroed - plain >= 0.1
