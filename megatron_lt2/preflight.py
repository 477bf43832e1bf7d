"""What can be checked of a run without a GPU, before one is held: `train --check`.

Settings across fields, data and tokenizer, the run folder: whether it can be written, has room for
checkpoints, and belongs to a run of these settings. Nothing is written.
"""

import os
import shutil
from pathlib import Path

from megatron_lt2.config.checks import check_config
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.manifest import read_manifest, token_files
from megatron_lt2.model.counting import count_parameters
from megatron_lt2.training import resume
from megatron_lt2.training.checkpoint_files import complete_checkpoints

SPARE_CHECKPOINTS = 2
"""A checkpoint is removed only after a newer one is durable, so two lie side by side."""


def check_run(config: RunConfig, world_size: int, *, need_data: bool = True) -> None:
    """Refuse what could not train; the vocabulary must be resolved if there is data.

    Args:
        config: what was asked for.
        world_size: ranks that will be started.
        need_data: whether the token files must exist already.

    Raises:
        ConfigError: names the setting, its value and the fix.
    """
    check_config(config, world_size, need_data=False)
    if need_data:
        for prefix in config.data.prefixes:
            try:
                read_manifest(prefix)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            _check_readable(prefix)
    _check_writable(config.run_dir)
    _check_same_run(config)
    if config.model.vocab_size is not None:
        _check_room(config)


def checkpoint_bytes(config: RunConfig) -> int:
    """Estimated size of one checkpoint: weights, and AdamW's fp32 weights and two moments."""
    weights = 4 if config.precision.dtype == "fp32" else 2
    return count_parameters(config.model) * (weights + 12)


def existing_folder(path: str | os.PathLike[str]) -> Path:
    """The folder itself, or the nearest one above it that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder


def _check_readable(prefix: str) -> None:
    for path in token_files(prefix, read_manifest(prefix)):
        if not os.access(path, os.R_OK):
            raise ConfigError(
                f"data.path {prefix}: {path} cannot be read by this user; change its permissions"
            )


def _check_writable(run_dir: str) -> None:
    folder = existing_folder(run_dir)
    if not folder.is_dir():
        raise ConfigError(f"run_dir {run_dir}: {folder} is no folder; choose another run_dir")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"run_dir {run_dir}: {folder} cannot be written; change its permissions or choose "
            "another run_dir"
        )


def _check_same_run(config: RunConfig) -> None:
    good, _ = complete_checkpoints(Path(config.run_dir) / "checkpoints")
    if not good:
        return
    if not config.checkpoint.resume:
        raise ConfigError(
            f"{good[-1].parent}: has checkpoints, and checkpoint.resume is false; choose another "
            "run_dir or set checkpoint.resume true"
        )
    complaint = resume.refusal(load_saved(good[-1] / "run_config.yaml"), config)
    if complaint is not None:
        raise ConfigError(f"{good[-1]}: {complaint}")


def _check_room(config: RunConfig) -> None:
    """Room for the checkpoints that lie side by side, less those that are there already."""
    size = checkpoint_bytes(config)
    good, _ = complete_checkpoints(Path(config.run_dir) / "checkpoints")
    needed = size * max(1, SPARE_CHECKPOINTS - len(good))
    folder = existing_folder(config.run_dir)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"run_dir {config.run_dir}: {folder} has {free / 1e9:.1f} GB free, and checkpoints of "
            f"about {size / 1e9:.1f} GB each need {needed / 1e9:.1f} GB; free some or choose "
            "another run_dir"
        )
