"""What a run stood on: versions, device, git commit, the variables that steer it."""

import os
import platform as host_platform
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import torch

from megatron_lt2.kernels.backend import detect_apex

PACKAGES = (
    "megatron-lt2",
    "torch",
    "triton",
    "megatron-core",
    "fla-core",
    "transformer-engine",
    "transformers",
    "numpy",
)

STEERING = ("LT2_", "SLURM_JOB_ID", "SLURM_NNODES", "CUDA_VISIBLE", "NCCL_", "OMP_NUM_THREADS")

APEX = {
    "nvidia": "NVIDIA Apex, used by megatron-core",
    "unrelated": (
        "PyPI's `apex`, an unrelated package, ignored; NVIDIA's is built from its repository"
    ),
    None: "absent",
}


def describe_environment(variables: Mapping[str, str]) -> str:
    """A text for env.txt, one fact a line."""
    lines = [f"python {host_platform.python_version()} on {host_platform.platform()}"]
    for name in PACKAGES:
        try:
            lines.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            lines.append(f"{name} absent")
    lines.append(f"apex: {APEX[detect_apex()]}")
    if torch.cuda.is_available():
        lines.append(f"device {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}")
    lines.append(f"git {_git_commit()}")
    for name in sorted(variables):
        if name.startswith(STEERING):
            lines.append(f"{name}={variables[name]}")
    return "\n".join(lines) + "\n"


def job_note() -> str:
    """Which Slurm job this is and how often it was started again; empty elsewhere."""
    job = os.environ.get("SLURM_JOB_ID")
    return f"; job {job}, restart {os.environ.get('SLURM_RESTART_COUNT') or 0}" if job else ""


def apex_note() -> str | None:
    """A line for the console where an `apex` is installed that is not NVIDIA's."""
    found = detect_apex()
    return f"note: the `apex` found here is {APEX[found]}" if found == "unrelated" else None


def _git_commit() -> str:
    here = Path(__file__).resolve().parent
    try:
        found = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found.stdout.strip()
