"""FLA's autotuners with a table, and kernels compiled ahead; in processes of their own.

Other tests have Triton interpret kernels, which cannot be undone within a process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
CASES = (
    *("known_key", "unknown_key", "nothing_similar_fits", "other_package", "search", "no_time"),
    *("all_candidates", "other_fla", "wrong_version", "given_back"),
)


def run(script: str, *arguments: str, cache: Path) -> str:
    """A script of tests/unit on one core, with a cache folder of its own; its output."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment.update(
        PYTHONPATH=str(ROOT), TRITON_CACHE_DIR=str(cache), OMP_NUM_THREADS="1", LT2_FORCE_CPU="1"
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "unit" / script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("case", CASES)
def test_autotuners(case: str, tmp_path: Path) -> None:
    run("tuned_kernels.py", case, cache=tmp_path)


def test_every_case_is_run() -> None:
    text = (ROOT / "tests/unit/tuned_kernels.py").read_text()
    defined = {line[4:].split("(")[0] for line in text.splitlines() if line.startswith("def ")}
    assert defined - {"tuner", "table"} == set(CASES)


def test_kernels_are_compiled_ahead(tmp_path: Path) -> None:
    run("compiled_kernels.py", "own", cache=tmp_path)


@pytest.mark.slow
def test_a_whole_step_is_compiled_for_a_gpu_that_is_not_there(tmp_path: Path) -> None:
    run("compiled_kernels.py", "step", cache=tmp_path)
