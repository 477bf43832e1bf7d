"""For every test: no network, no settings from the caller's shell, GPU tests only on GPUs."""

import os

import pytest

REASONS = {
    "gpu": (1, "needs a CUDA GPU (ci/gpu.sh)"),
    "multi_gpu": (2, "needs two CUDA GPUs (ci/gpu.sh)"),
}
# What would change a run's configuration, ranks or devices behind a test's back. LT2_VENV stays: it
# says where the environment is, not what a run does.
PREFIXES = ("LT2_", "SLURM_", "TORCHELASTIC_")
NAMES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TP", "PP", "CP", "MBS", "GBS", "DATA_PATH", "TOKENIZER", "EXTRA_ARGS"),
)


def pytest_configure(config: pytest.Config) -> None:
    """Clean the environment before any test module is imported."""
    for name in list(os.environ):
        if name in NAMES or (name.startswith(PREFIXES) and name != "LT2_VENV"):
            del os.environ[name]
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests that need more GPUs than there are."""
    wanted = [item for item in items if any(item.get_closest_marker(name) for name in REASONS)]
    if not wanted:
        return
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in wanted:
        for name, (needed, reason) in REASONS.items():
            if item.get_closest_marker(name) and present < needed:
                item.add_marker(pytest.mark.skip(reason=reason))
