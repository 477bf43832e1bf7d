"""ci/setup_env.sh with environments that are not its own: it uses them and leaves them alone."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def source(venv: Path) -> subprocess.CompletedProcess[str]:
    """Source the script with LT2_VENV and without any interpreter that could build one."""
    environment = {**os.environ, "LT2_VENV": str(venv), "LT2_PYTHON": "/bin/false"}
    command = f'. "{ROOT}/ci/setup_env.sh" && command -v python'
    return subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, timeout=60
    )


def environment(folder: Path, stamp: str | None) -> Path:
    """A folder with the tests' own interpreter, built by the script if there is a stamp."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    if stamp is not None:
        (folder / ".lt2-built").touch()
        (folder / ".lt2-stamp").write_text(f"{stamp}\n123 456\n")
    return folder


def test_one_of_another_checkout_is_used_and_not_rebuilt(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    environment(venv, f"1 /another/check out {venv}")
    before = sorted(p.name for p in venv.rglob("*"))
    found = source(venv)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(venv / "bin/python")
    assert sorted(p.name for p in venv.rglob("*")) == before


def test_one_that_was_not_built_here_is_used(tmp_path: Path) -> None:
    found = source(environment(tmp_path / "venv", None))
    assert found.returncode == 0, found.stderr


def test_one_of_this_checkout_with_other_requirements_is_built_again(tmp_path: Path) -> None:
    venv = environment(tmp_path / "venv", "0 older")
    found = source(venv)
    assert found.returncode != 0 and "LT2_PYTHON=/bin/false" in found.stderr
