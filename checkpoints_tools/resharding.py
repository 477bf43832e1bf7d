"""Rewriting a checkpoint: its weights alone, in another dtype, or a whole copy to go on from.

Another number of ranks needs none of this: a checkpoint holds whole tensors, and is read at any
layout.
"""

import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools import side_files
from checkpoints_tools.checkpoint_writer import write_tensors
from checkpoints_tools.hf_folder import new_folder
from checkpoints_tools.mappings.base import check_names
from checkpoints_tools.mappings.lt2 import fp32_names, lt2_mappings
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.progress import progress_bar
from checkpoints_tools.safetensors_files import Spec
from checkpoints_tools.write_behind import reuse_memory
from megatron_lt2.config.schema import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

NOTHING_NEEDED = (
    "note: other ranks need no conversion; start with another parallel.tensor, parallel.pipeline "
    "or number of ranks, and the checkpoint is read as it is"
)


def reshard(
    checkpoint: Path,
    output: Path,
    *,
    dtype: str = "as-saved",
    keep_optimizer: bool = False,
    progress: bool = True,
) -> list[str]:
    """Make a run folder that holds one checkpoint; returns lines to print.

    Args:
        checkpoint: run folder, checkpoints folder or iteration folder.
        output: the run folder to make.
        dtype: "as-saved", "float32" or "bfloat16"; what training keeps in fp32 stays so.
        keep_optimizer: copy everything; a run can then resume there.
        progress: show a bar over the tensors on a terminal.

    Raises:
        ValueError: one line that says what is missing or does not fit.
        OSError: the disk is full or a folder cannot be written.
    """
    from megatron_lt2.config.load import load_saved
    from megatron_lt2.training.checkpoint_files import folder_name, publish, read_manifest

    reuse_memory()
    source = find_checkpoint(checkpoint)
    config, manifest = load_saved(source / "run_config.yaml"), read_manifest(source)
    if keep_optimizer and dtype != "as-saved":
        raise ValueError(
            f"--dtype {dtype}: the optimizer's state belongs to weights as they are saved; leave "
            "out --keep-optimizer or --dtype"
        )
    run = source.absolute().parent.parent
    step = int(manifest["step"])
    facts = {k: v for k, v in manifest.items() if k not in ("files", "step")}
    with new_folder(output) as folder:
        temporary = folder / "checkpoints" / (folder_name(step) + ".tmp")
        temporary.mkdir(parents=True)
        if keep_optimizer:
            for name in manifest["files"]:
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source / name, temporary / name)
        else:
            _write_weights(source, temporary, config, dtype, step, progress=progress)
            facts = {**facts, "weights_only": True, "time": time.time()}
            facts.pop("layout", None)
        publish(temporary, step, facts)
        for name in (side_files.SOURCE, "tokenizer"):
            if (run / name).is_dir():
                shutil.copytree(run / name, folder / name)
    kind = "the whole state" if keep_optimizer else "weights only"
    return [f"{output}: {kind} of step {step}, from {source}", NOTHING_NEEDED]


def _write_weights(
    source: Path, target: Path, config: RunConfig, dtype: str, step: int, *, progress: bool
) -> None:
    import torch

    shutil.copyfile(source / "run_config.yaml", target / "run_config.yaml")
    tensors = PlainCheckpoint(source)
    specs = _specs(tensors, config, dtype)

    def read(name: str) -> "Tensor":
        return tensors[name].to(getattr(torch, specs[name].dtype))

    with progress_bar(len(specs), shown=progress) as bar:
        write_tensors(target, specs, read, common={"step": step}, done=bar.update)


def _specs(tensors: PlainCheckpoint, config: RunConfig, dtype: str) -> Mapping[str, Spec]:
    table = lt2_mappings(config.model)
    check_names(tensors, table)
    fixed = fp32_names(config.model)
    specs: dict[str, Any] = {}
    for mapping in table:
        shape = tensors.shape(mapping.source)
        mapping.check_shape(shape)
        keep = dtype == "as-saved" or fixed.intersection(mapping.targets)
        specs[mapping.source] = Spec(tensors.dtype(mapping.source) if keep else dtype, shape)
    return specs
