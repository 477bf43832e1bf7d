"""One Slurm for all tests of this folder; it is stopped whatever happens."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.e2e.conftest import config, data  # noqa: F401 - fixtures
from tests.e2e.runs import TINY
from tests.slurm.cluster import Cluster, missing_tools

STEPS = 100


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """Four nodes; folder names of sockets are short, so not below pytest's own folder."""
    if missing := missing_tools():
        pytest.skip(f"no {', '.join(missing)} here; as root: bash ci/slurm_local/install.sh")
    folder = Path(tempfile.mkdtemp(prefix="lt2-slurm-"))
    running = None
    try:
        running = Cluster(folder / "s")
        yield running
    finally:
        if running is not None:
            running.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def settings(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """A tiny run that is long enough to be disturbed."""
    changed = {
        **TINY,
        "data": {**TINY["data"], "path": str(data / "corpus")},
        "training": {**TINY["training"], "steps": STEPS, "eval_interval": 50},
        "optimizer": {**TINY["optimizer"], "decay_steps": 40},
        "checkpoint": {"interval": 10, "keep": 2},
    }
    path = tmp_path_factory.mktemp("settings") / "tiny.yaml"
    path.write_text(yaml.safe_dump(changed))
    return path
