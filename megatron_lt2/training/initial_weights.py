"""Starting a run from the weights of a checkpoint: `checkpoint.init_from`.

The optimizer is new and the step is 0; only what the model computes is taken over. It is read at
any layout, in any of the dtypes. Everything that the model has must be there and nothing else: a
tensor that is missing would keep its random values without a word.
"""

import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved
from megatron_lt2.config.mixers import SPARSE, WindowConfig
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT
from megatron_lt2.model.pattern import expand_pattern, loop_windows
from megatron_lt2.training import checkpoint_files as files
from megatron_lt2.training.setup import TrainingParts

SOURCE = "source"
"""Folder of a run with what an import found beside the weights; exports give it back."""

NOT_WEIGHTS = ("optimizer.", "chained_", "rng", "common_state", "opt_param_scheduler")
"""Beginnings of the names of what else a checkpoint holds."""

NOT_ARCHITECTURE = ("init", "loss", "exit_entropy", "dsa.loss_weight", "dsa.dense_steps")
"""Fields of `model` that say how it is trained."""


def find(path: str) -> Path:
    """The iteration folder meant by `checkpoint.init_from`: itself, or a run's newest complete one.

    Raises:
        ConfigError: nothing complete is there.
    """
    folder = Path(path)
    inside = folder / "checkpoints"
    if (folder / files.MANIFEST).is_file():
        try:
            files.read_manifest(folder)
        except ValueError as error:
            raise ConfigError(f"checkpoint.init_from {path}: {error}") from None
        return folder
    newest = files.newest_complete(inside if inside.is_dir() else folder)
    if newest is None:
        raise ConfigError(
            f"checkpoint.init_from {path}: no complete checkpoint there; name a run folder or an "
            "iter_ folder (checkpoints_tools/convert.py import makes one of a Hugging Face folder)"
        )
    return newest


def differences(saved: ModelConfig, now: ModelConfig) -> list[str]:
    """What sets two architectures apart, as 'model.loops 4 (here 2)'; settings of mixers that
    neither uses do not count."""
    then, here = dict(_facts(saved)), dict(_facts(now))
    return [
        f"{name} {then.get(name)!r} (here {here.get(name)!r})"
        for name in {**then, **here}
        if then.get(name) != here.get(name)
    ]


def _facts(model: ModelConfig) -> Iterator[tuple[str, Any]]:
    mixers = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    windows = loop_windows(
        model.pattern, model.num_layers, model.loops, model.window.size, MIXER_NAMES
    )
    resolved = {
        "pattern": mixers if windows is None else windows,
        "num_kv_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "ffn_hidden_size": model.ffn_width,
    }
    for field in fields(model):
        value: Any = resolved.get(field.name, getattr(model, field.name))
        if field.name in NOT_ARCHITECTURE:
            continue
        own = field.name in (*RECURRENT, *SPARSE)
        if own or isinstance(value, WindowConfig):
            if field.name not in mixers:
                continue
            value = model.mixer_settings(field.name) if own else value
        if hasattr(value, "__dataclass_fields__"):
            for inner in fields(value):
                if f"{field.name}.{inner.name}" in NOT_ARCHITECTURE:
                    continue
                yield f"model.{field.name}.{inner.name}", getattr(value, inner.name)
        else:
            yield f"model.{field.name}", value


def check_architecture(folder: Path, model: ModelConfig) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        ConfigError: names every field that differs.
    """
    saved = load_saved(folder / "run_config.yaml").model
    if found := differences(saved, model):
        raise ConfigError(
            f"checkpoint.init_from {folder}: its model is another one: {', '.join(found)}; set "
            "these as there"
        )


@torch.no_grad()
def load_weights(
    model: Any, folder: Path, metadata: dict[str, Any], without: tuple[str, ...] = ()
) -> None:
    """Fill `model` from a checkpoint, whatever layout and dtype it has; a collective call.

    Args:
        model: LT2Model of this rank.
        folder: iteration folder.
        metadata: for megatron-core's `sharded_state_dict`.
        without: beginnings of names that keep their values, whatever the checkpoint has there.

    Raises:
        ConfigError: tensors are missing, unknown, of another shape, or cannot be read.
    """
    template = model.sharded_state_dict(metadata=metadata)
    # Written by layers that have state beside their weights; ours do not.
    template = {
        name: value
        for name, value in template.items()
        if "_extra_state" not in name and not name.startswith(without)
    }
    try:
        _check_names(_keys(template), folder, without)
        state = dist_checkpointing.load({"model": template}, str(folder))
    except ConfigError:
        raise
    except Exception as error:  # megatron-core, torch and pickle have errors of their own each
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(f"checkpoint.init_from {folder}: cannot be loaded ({reason})") from None
    model.load_state_dict(state["model"], strict=not without)


def load_model_weights(model: Any, folder: Path, without: tuple[str, ...] = ()) -> None:
    """`load_weights` over this run's process groups."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    load_weights(model, folder, {"dp_cp_group": group}, without)


def _keys(template: dict[str, Any]) -> set[str]:
    keys: set[str] = set()
    for value in template.values():
        if isinstance(value, ShardedTensorFactory):
            built = value.build()
            parts = built.values() if isinstance(built, dict) else built
            keys |= {part.key for part in parts}
        elif isinstance(value, ShardedTensor):
            keys.add(value.key)
    return keys


def _check_names(own: set[str], folder: Path, without: tuple[str, ...] = ()) -> None:
    """The tensors of the model, over all ranks, must be those of the checkpoint."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    wanted = set().union(*gathered)
    saved = dist_checkpointing.load_tensors_metadata(str(folder))
    present = {
        name
        for name in saved
        if not name.startswith((*NOT_WEIGHTS, *without)) and "_extra_state" not in name
    }
    problems = []
    if missing := sorted(wanted - present):
        problems.append(f"missing: {', '.join(missing)}")
    if unknown := sorted(present - wanted):
        problems.append(f"unknown: {', '.join(unknown)}")
    if problems:
        raise ConfigError(
            f"checkpoint.init_from {folder}: its tensors are not those of this model; "
            + "; ".join(problems)
        )


def keep_source(folder: Path, run: Path) -> None:
    """Copy what an import kept beside the weights into another run, on one rank."""
    source, target = folder.absolute().parent.parent / SOURCE, run / SOURCE
    if source.is_dir() and not target.exists():
        temporary = run / f".{SOURCE}.partial"
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(source, temporary)
        temporary.rename(target)


def take_over(config: RunConfig, parts: TrainingParts, metadata: dict[str, Any]) -> dict[str, Any]:
    """Fill the parts of a new run from `checkpoint.init_from`; a collective call.

    Args:
        config: of the new run.
        parts: whose model is filled; the optimizer's own copies of the weights follow.
        metadata: for megatron-core's `sharded_state_dict`.

    Returns:
        `from`, what the weights are called, and their `step`.

    Raises:
        ConfigError: no checkpoint is there, or it belongs to another model.
    """
    path = config.checkpoint.init_from
    assert path is not None
    folder = find(path)
    check_architecture(folder, config.model)
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    load_weights(parts.model, folder, {**metadata, "dp_cp_group": group})
    parts.optimizer.reload_model_params()
    manifest = files.read_manifest(folder)
    if dist.get_rank() == 0:
        run = Path(config.run_dir)
        run.mkdir(parents=True, exist_ok=True)
        keep_source(folder, run)
    name = (manifest.get("imported") or {}).get("from", folder.absolute().parent.parent.name)
    return {"from": name, "step": manifest["step"]}
