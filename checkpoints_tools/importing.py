"""Import: a Hugging Face folder, or a Megatron-LM checkpoint, becomes a run to start training from.

Tensors are fused and written one after another; those of a Hugging Face folder are copied as bytes
to where they belong. Everything is written under a temporary name:
an import exists completely or not at all.
"""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools import side_files
from checkpoints_tools.byte_copy import meta, runs_of
from checkpoints_tools.checkpoint_writer import write_tensors
from checkpoints_tools.hf_folder import new_folder
from checkpoints_tools.mappings.base import check_targets
from checkpoints_tools.mappings.registry import family_of_config
from checkpoints_tools.progress import progress_bar
from checkpoints_tools.safetensors_files import SafetensorsFolder, Spec
from checkpoints_tools.write_behind import reuse_memory
from megatron_lt2.config.schema import RunConfig

if TYPE_CHECKING:
    from torch import Tensor

    from checkpoints_tools.streaming_storage import Fill
    from megatron_lt2.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class ImportResult:
    """What was written."""

    folder: Path
    family: str
    tensors: int
    parameters: int


@dataclass(frozen=True)
class Source:
    """What an import reads.

    config: only `model` and `data.sequence_length` are set.
    specs: training's tensors, in the order in which they are written.
    read: gives one of them, until the next is asked for.
    fill: writes the bytes of one of them to a place in an open file; None where `read` must do.
    """

    config: RunConfig
    family: str
    specs: Mapping[str, Spec]
    read: Callable[[str], "Tensor"]
    parameters: int
    facts: Mapping[str, Any]
    fill: "Fill | None" = None


def import_model(
    source: Path,
    output: Path,
    *,
    model: Path | None = None,
    tokenizer: Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> ImportResult:
    """Make a run folder whose only checkpoint, of step 0, holds the weights.

    Args:
        source: Hugging Face folder, or iteration folder of a Megatron-LM torch_dist checkpoint.
        output: the run folder to make.
        model: YAML file with the `model` section of a Megatron-LM checkpoint.
        tokenizer: tokenizer folder or tokenizer.json; default: the one in `source`.
        overwrite: replace an import that is already there.
        progress: show a bar over the tensors on a terminal.

    Raises:
        ValueError: one line that names the field, tensor or file that is wrong.
        OSError: the disk is full or a folder cannot be written.
    """
    if not source.is_dir():
        raise ValueError(f"{source}: no such folder")
    reuse_memory()
    given = _open(source, model)
    loaded = _tokenizer(source, tokenizer, given.config)
    with new_folder(output, overwrite=overwrite, ours=is_import, kind="imported run") as folder:
        _write(folder, given, progress=progress)
        if (source / "config.json").is_file():
            side_files.keep(source, folder)
        if loaded is not None:
            loaded.save(folder / "tokenizer")
    return ImportResult(output, given.family, len(given.specs), given.parameters)


def is_import(folder: Path) -> bool:
    """Whether a folder is an import that no training has touched: another may replace it."""
    return (folder / MODEL_FILE).is_file() and not (folder / "metrics.jsonl").exists()


MODEL_FILE = "architecture.yaml"
"""The `model` section of an import, to be given to training with --config."""


def _open(source: Path, model: Path | None) -> Source:
    if (source / "config.json").is_file():
        if model is not None:
            raise ValueError(f"--model {model}: {source} has a config.json, which says it all")
        return open_hf(source)
    from checkpoints_tools.megatron_source import open_megatron

    return open_megatron(source, model)


def open_hf(folder: Path) -> Source:
    """The training tensors of a Hugging Face folder.

    Raises:
        ValueError: names the field, tensor or file that is wrong.
    """
    fields = side_files.read_config(folder)
    family = family_of_config(fields, folder / "config.json")
    try:
        config = family.run_config(fields)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{folder}: {error}") from None
    table = {mapping.source: mapping for mapping in family.table(config.model)}
    tensors = SafetensorsFolder(folder)
    check_targets(tensors.shapes, list(table.values()), str(folder))
    specs = {
        name: Spec(tensors.dtype(mapping.targets[0]), mapping.written_shape())
        for name, mapping in table.items()
    }

    scratch = Scratch()

    def read(name: str) -> "Tensor":
        mapping, whole = table[name], scratch.tensor(specs[name])
        for target, place in zip(mapping.targets, mapping.places(whole), strict=True):
            tensors.fill(target, place)
        return whole

    def fill(name: str, stream: Any, place: int) -> None:
        mapping, whole = table[name], meta(specs[name].shape, specs[name].dtype)
        for target, view in zip(mapping.targets, mapping.places(whole), strict=True):
            tensors.copy_bytes(target, stream, runs_of(view, place))

    for mapping in table.values():
        _same_dtype(mapping.targets, tensors)
    return Source(
        config=config,
        family=family.name,
        specs=specs,
        read=read,
        parameters=sum(entry.count for entry in tensors.entries.values()),
        facts={"from": folder.absolute().name, "family": family.name},
        fill=fill,
    )


class Scratch:
    """Memory for one tensor after another: fresh memory for each takes longer than reading it."""

    def __init__(self) -> None:
        self._bytes: Any = None

    def tensor(self, spec: Spec) -> "Tensor":
        """A tensor with nothing in particular in it, which the next call takes back."""
        import numpy as np
        import torch

        if self._bytes is None or len(self._bytes) < spec.nbytes:
            self._bytes = None
            self._bytes = np.empty(spec.nbytes, np.uint8)
        # By way of numpy, because its storage then ends with the tensor, and storages are saved.
        flat = torch.from_numpy(self._bytes[: spec.nbytes])
        return flat.view(getattr(torch, spec.dtype)).view(spec.shape)


def _same_dtype(names: tuple[str, ...], tensors: SafetensorsFolder) -> None:
    for name in names:
        if tensors.dtype(name) != tensors.dtype(names[0]):
            raise ValueError(
                f"{tensors.folder}: {name} is {tensors.dtype(name)}, {names[0]} is "
                f"{tensors.dtype(names[0])}; they are one tensor in training, so must have one "
                "dtype"
            )


def _tokenizer(source: Path, given: Path | None, config: RunConfig) -> "Tokenizer | None":
    from megatron_lt2.data.tokenizer import load_tokenizer

    if given is None and not (source / "tokenizer.json").is_file():
        print(f"warning: {source}: no tokenizer.json; name one with --tokenizer", file=sys.stderr)
        return None
    tokenizer = load_tokenizer(given or source)
    vocab_size = config.model.vocab_size
    assert vocab_size is not None
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, the model knows "
            f"{vocab_size} only; it is not the tokenizer of this model"
        )
    return tokenizer


def _write(folder: Path, given: Source, *, progress: bool) -> None:
    import yaml

    from megatron_lt2 import __version__
    from megatron_lt2.config.load import to_yaml
    from megatron_lt2.training.checkpoint_files import folder_name, publish

    temporary = folder / "checkpoints" / (folder_name(0) + ".tmp")
    temporary.mkdir(parents=True)
    (temporary / "run_config.yaml").write_text(to_yaml(given.config), encoding="utf-8")
    with progress_bar(len(given.specs), shown=progress) as bar:
        write_tensors(
            temporary,
            given.specs,
            given.read,
            common={"step": 0},
            done=bar.update,
            fill=given.fill,
        )
    publish(
        temporary,
        0,
        {
            "tokens": 0,
            "weights_only": True,
            "imported": dict(given.facts),
            "time": time.time(),
            "versions": {"megatron_lt2": __version__},
        },
    )
    model = {"model": asdict(given.config.model)}
    (folder / MODEL_FILE).write_text(yaml.safe_dump(model, sort_keys=False), encoding="utf-8")
