"""On a machine that has never run, and on one that has: the first step, and what it compiles."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_lt2.tuning.table import shipped_file

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "launchers/configs/lt2_1b3.yaml")
COLD_S, WARM_S = 90.0, 30.0


def first_step(cache: Path) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_CACHE_DIR", "RANK")}
    environment.update(LT2_CACHE_DIR=str(cache), PYTHONPATH=str(ROOT))
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("first_step_run.py")), CONFIG],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_first_step(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    if not shipped_file(f"sm_{major}{minor}").exists():
        pytest.skip(f"no tuned configurations for sm_{major}{minor}")
    cold, warm = first_step(tmp_path), first_step(tmp_path)
    for report in (
        cold,
        warm,
    ):  # all of it was found ahead; torch.compile's have a cache of their own
        assert [name for name in report["compiled"] if not name.startswith("triton_")] == []
    assert cold["first_step_done_s"] < COLD_S, cold
    assert warm["first_step_done_s"] < WARM_S, warm
    assert warm["warmup_s"] < 3
