"""Export of a checkpoint to a Hugging Face folder.

Weights are renamed and written one after another: those that keep their dtype and lie in one piece
are copied as bytes, others are read, so memory stays at a few tensors.
Everything is written under a temporary name: an export exists completely or not at all.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools import side_files
from checkpoints_tools.byte_copy import meta, runs_of
from checkpoints_tools.hf_configs import keep_config, special_ids, write_configs
from checkpoints_tools.hf_folder import new_folder
from checkpoints_tools.mappings.base import TensorMapping, check_names
from checkpoints_tools.mappings.family import Family
from checkpoints_tools.mappings.registry import FAMILIES, family_of_run
from checkpoints_tools.model_code import copy_model_code
from checkpoints_tools.modelcard import CardFacts, render_card
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.progress import progress_bar
from checkpoints_tools.safetensors_files import Spec
from checkpoints_tools.safetensors_writer import MAX_SHARD_BYTES, SafetensorsWriter
from checkpoints_tools.write_behind import reuse_memory
from megatron_lt2.config.schema import RunConfig

if TYPE_CHECKING:
    import torch

    from megatron_lt2.data.tokenizer import Tokenizer

DTYPES = ("as-saved", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    folder: Path
    checkpoint: Path
    family: str
    step: int
    parameters: int
    dtype: str


@dataclass(frozen=True)
class _Run:
    """What is exported: one checkpoint and what lies around it."""

    folder: Path
    checkpoint: Path
    config: RunConfig
    manifest: Mapping[str, Any]


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    family: str | None = None,
    tokenizer: Path | None = None,
    dtype: str = "as-saved",
    shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    progress: bool = True,
) -> ExportResult:
    """Write a Hugging Face folder.

    Args:
        checkpoint: a run folder, its checkpoints folder (the newest complete one is taken) or one
            iteration folder.
        output: the folder to make.
        family: how the tensors are named; default: that of the model which the run started from,
            else the first of `registry.PREFERRED` that has such a model.
        tokenizer: tokenizer folder or tokenizer.json; default: the one that the run keeps.
        dtype: of the exported weights, one of `DTYPES`; what training keeps in fp32 stays so.
        shard_bytes: largest size of a weights file.
        overwrite: replace an export that is already there.
        progress: show a bar over the tensors on a terminal.

    Raises:
        ValueError: one line that says what is missing or does not fit.
        OSError: the disk is full or a folder cannot be written.
    """
    from megatron_lt2.config.load import load_saved
    from megatron_lt2.training.checkpoint_files import read_manifest

    reuse_memory()
    source = find_checkpoint(checkpoint)
    config = load_saved(source / "run_config.yaml")
    run = _Run(source.absolute().parent.parent, source, config, read_manifest(source))
    kept = side_files.kept_config(run.folder)
    chosen = _family(config, kept, family)
    if kept is not None and not _still_true(kept, chosen, config):
        kept = None
    loaded = _tokenizer(run, tokenizer)
    tensors = PlainCheckpoint(source)
    table = chosen.table(config.model)
    check_names(tensors, table)
    specs = _specs(tensors, table, dtype, chosen.fp32(config.model))
    main_dtype = next(iter(specs.values())).dtype

    with new_folder(output, overwrite=overwrite) as folder:
        writer = SafetensorsWriter(folder, specs, shard_bytes)
        _write_weights(writer, tensors, table, progress=progress)
        if kept is not None:
            side_files.give_back(run.folder, folder)
            keep_config(folder, kept, main_dtype)
        _write_tokenizer_and_config(folder, run, chosen, loaded, main_dtype, kept is None)
        if chosen.name == "lt2":
            copy_model_code(folder, chosen.values(config)["mixers"])
        card = render_card(_card_facts(run, output, chosen, loaded, writer, main_dtype))
        (folder / "README.md").write_text(card, encoding="utf-8")
    step = run.manifest["step"]
    return ExportResult(output, source, chosen.name, step, writer.parameters, main_dtype)


def _family(config: RunConfig, kept: Mapping[str, Any] | None, name: str | None) -> Family:
    if name is not None and name not in FAMILIES:
        raise ValueError(f"--family {name}: known are {', '.join(sorted(FAMILIES))}")
    if name is None and kept is not None:
        candidate = FAMILIES.get(kept.get("model_type", ""))
        if candidate is not None and candidate.fits(config):
            return candidate
    return family_of_run(config, name)


def _still_true(kept: Mapping[str, Any], family: Family, config: RunConfig) -> bool:
    """Whether the config.json that came with the model describes what is exported."""
    if kept.get("model_type") != family.name:
        return False
    then, now = family.values(family.run_config(kept)), family.values(config)
    return {**then, "max_position_embeddings": 0} == {**now, "max_position_embeddings": 0}


def _specs(
    tensors: PlainCheckpoint, table: list[TensorMapping], dtype: str, fp32: frozenset[str]
) -> dict[str, Spec]:
    """What is going to be written."""
    specs = {}
    for mapping in table:
        mapping.check_shape(tensors.shape(mapping.source))
        saved = tensors.dtype(mapping.source)
        for name, shape in zip(mapping.targets, mapping.target_shapes(), strict=True):
            wanted = saved if dtype == "as-saved" else dtype
            # What the source had in another dtype than fp32 stays as it was.
            specs[name] = Spec(saved if name in fp32 else wanted, shape)
    return specs


def _write_weights(
    writer: SafetensorsWriter,
    tensors: PlainCheckpoint,
    table: list[TensorMapping],
    *,
    progress: bool,
) -> None:
    try:
        with progress_bar(len(table), shown=progress) as bar:
            for mapping in table:
                if not _copy_bytes(writer, tensors, mapping):
                    parts = mapping.convert(tensors[mapping.source])
                    for name, tensor in zip(mapping.targets, parts, strict=True):
                        writer.add(name, cast(tensor, writer.specs[name].dtype))
                    del parts, tensor
                bar.update()
        writer.close()
    finally:
        writer.end_file()


def _copy_bytes(
    writer: SafetensorsWriter, tensors: PlainCheckpoint, mapping: TensorMapping
) -> bool:
    """Write the targets of a tensor without reading it, if that can be done."""
    saved = tensors.dtype(mapping.source)
    if any(writer.specs[name].dtype != saved for name in mapping.targets):
        return False
    if (found := tensors.in_file(mapping.source)) is None:
        return False
    path, begin = found
    places = mapping.places(meta(tensors.shape(mapping.source), saved))
    for name, view in zip(mapping.targets, places, strict=True):
        writer.add_bytes(name, path, runs_of(view, begin))
    return True


def cast(tensor: "torch.Tensor", dtype: str) -> "torch.Tensor":
    """The tensor in the dtype asked for, contiguous."""
    import torch

    target = tensor.dtype if dtype == "as-saved" else getattr(torch, dtype)
    return tensor.to(target).contiguous()


def _tokenizer(run: _Run, given: Path | None) -> "Tokenizer | None":
    """The tokenizer to export; None if the run keeps none and came from a folder without one."""
    from megatron_lt2.data.tokenizer import load_tokenizer

    kept = run.folder / "tokenizer"
    if given is None and not kept.is_dir():
        if side_files.kept_config(run.folder) is not None:
            return None
        raise ValueError(f"{kept}: the run keeps no tokenizer; name one with --tokenizer")
    tokenizer = load_tokenizer(given or kept)
    vocab_size = run.config.model.vocab_size
    assert vocab_size is not None
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, the model knows "
            f"{vocab_size} only; it is not the tokenizer of this run"
        )
    if given is not None and kept.is_dir():
        own = load_tokenizer(kept)
        if own.sha256 != tokenizer.sha256:
            print(
                f"warning: {tokenizer.path} is not the tokenizer that the run was trained with "
                f"({own.path})",
                file=sys.stderr,
            )
    return tokenizer


def _write_tokenizer_and_config(
    folder: Path,
    run: _Run,
    family: Family,
    tokenizer: "Tokenizer | None",
    dtype: str,
    write_config: bool,
) -> None:
    """The tokenizer, and configs where none came with the model.

    A tokenizer that came with the model is given back as it was.
    """
    from megatron_lt2.data.tokenizer import load_tokenizer

    came_along = (folder / "tokenizer.json").is_file()
    ids: dict[str, Any] = {}
    if tokenizer is not None and not (
        came_along and load_tokenizer(folder).sha256 == tokenizer.sha256
    ):
        tokenizer.save(folder)
        ids = special_ids(folder, tokenizer)
    if write_config:
        write_configs(folder, run.config, family, ids, dtype)


def _card_facts(
    run: _Run,
    output: Path,
    family: Family,
    tokenizer: "Tokenizer | None",
    writer: SafetensorsWriter,
    dtype: str,
) -> CardFacts:
    from megatron_lt2 import __version__

    return CardFacts(
        title=output.absolute().name,
        family=family.name,
        config=run.config,
        parameters=writer.parameters,
        dtype=dtype,
        manifest=run.manifest,
        records=_metrics(run.folder),
        tokenizer_sha256=None if tokenizer is None else tokenizer.sha256,
        version=__version__,
    )


def _metrics(run: Path) -> list[dict[str, Any]]:
    from megatron_lt2.tools.metrics_file import read_records

    path = run / "metrics.jsonl"
    return read_records(path) if path.is_file() else []
