"""Export of an LT2 checkpoint to a Hugging Face folder.

Weights are read, renamed and written one after another, so memory stays at one safetensors shard.
Everything is written under a temporary name: an export exists completely or not at all.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.hf_folder import SafetensorsWriter, new_folder
from checkpoints_tools.mappings.lt2 import (
    export_state_dict,
    fp32_names,
    lt2_config_values,
    lt2_mappings,
)
from checkpoints_tools.model_code import copy_model_code
from checkpoints_tools.modelcard import render_card
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint

if TYPE_CHECKING:
    import torch

    from megatron_lt2.data.tokenizer import Tokenizer

DTYPES = ("as-saved", "float32", "bfloat16")

AUTO_MAP = {
    "AutoConfig": "configuration_lt2.LT2Config",
    "AutoModel": "modeling_lt2.LT2Model",
    "AutoModelForCausalLM": "modeling_lt2.LT2ForCausalLM",
}


@dataclass(frozen=True)
class ExportResult:
    """What was written."""

    folder: Path
    checkpoint: Path
    step: int
    parameters: int
    dtype: str


def export_checkpoint(
    checkpoint: Path,
    output: Path,
    *,
    tokenizer: Path | None = None,
    dtype: str = "as-saved",
    overwrite: bool = False,
    progress: bool = True,
) -> ExportResult:
    """Write a Hugging Face folder.

    Args:
        checkpoint: a run folder, its checkpoints folder (the newest complete one is taken) or one
            iteration folder.
        output: the folder to make.
        tokenizer: tokenizer folder or tokenizer.json; default: the one that the run keeps.
        dtype: of the exported weights, one of `DTYPES`; what training keeps in fp32 stays so.
        overwrite: replace an export that is already there.
        progress: show a bar over the tensors on a terminal.

    Raises:
        ValueError: one line that says what is missing or does not fit.
    """
    from megatron_lt2 import __version__
    from megatron_lt2.config.load import load_saved
    from megatron_lt2.data.tokenizer import load_tokenizer
    from megatron_lt2.training.checkpoint_files import read_manifest

    source = find_checkpoint(checkpoint)
    run = source.absolute().parent.parent
    config = load_saved(source / "run_config.yaml")
    values = lt2_config_values(config)
    manifest = read_manifest(source)
    loaded_tokenizer = load_tokenizer(_tokenizer_path(run, tokenizer))
    _check_tokenizer(loaded_tokenizer, values["vocab_size"], run, given=tokenizer is not None)
    tensors = PlainCheckpoint(source)

    with new_folder(output, overwrite=overwrite) as folder:
        writer = SafetensorsWriter(folder)
        weights_dtype = None
        total = sum(len(mapping.targets) for mapping in lt2_mappings(config.model))
        converted = export_state_dict(tensors, config.model)
        keep = fp32_names(config.model)
        for name, tensor in _with_bar(converted, total, progress):
            tensor = cast(tensor, "float32" if name in keep else dtype)
            if weights_dtype is None:
                weights_dtype = tensor.dtype
            writer.add(name, tensor)
        writer.close()
        assert weights_dtype is not None
        dtype_name = str(weights_dtype).removeprefix("torch.")

        loaded_tokenizer.save(folder)
        ids = _special_ids(folder, loaded_tokenizer)
        _write_configs(folder, values, ids, dtype_name)
        copy_model_code(folder, values["mixers"])
        card = render_card(
            output.absolute().name,
            config,
            values,
            parameters=writer.parameters,
            dtype=dtype_name,
            manifest=manifest,
            records=_metrics(run),
            tokenizer_sha256=loaded_tokenizer.sha256,
            version=__version__,
        )
        (folder / "README.md").write_text(card, encoding="utf-8")
    return ExportResult(output, source, manifest["step"], writer.parameters, dtype_name)


def _tokenizer_path(run: Path, given: Path | None) -> Path:
    if given is not None:
        return given
    kept = run / "tokenizer"
    if not kept.is_dir():
        raise ValueError(f"{kept}: the run keeps no tokenizer; name one with --tokenizer")
    return kept


def _check_tokenizer(tokenizer: "Tokenizer", vocab_size: int, run: Path, *, given: bool) -> None:
    from megatron_lt2.data.tokenizer import load_tokenizer

    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"{tokenizer.path}: has ids up to {tokenizer.vocab_size - 1}, the model knows "
            f"{vocab_size} only; it is not the tokenizer of this run"
        )
    if given and (run / "tokenizer").is_dir():
        kept = load_tokenizer(run / "tokenizer")
        if kept.sha256 != tokenizer.sha256:
            print(
                f"warning: {tokenizer.path} is not the tokenizer that the run was trained with "
                f"({kept.path})",
                file=sys.stderr,
            )


def cast(tensor: "torch.Tensor", dtype: str) -> "torch.Tensor":
    """The tensor in the dtype asked for, contiguous and in memory of its own."""
    import torch

    target = tensor.dtype if dtype == "as-saved" else getattr(torch, dtype)
    return tensor.to(target, copy=True, memory_format=torch.contiguous_format)


def _with_bar(
    converted: Iterator[tuple[str, "torch.Tensor"]], total: int, progress: bool
) -> Iterator[tuple[str, "torch.Tensor"]]:
    from tqdm import tqdm

    # disable=None: only on a terminal.
    bar = tqdm(converted, total=total, unit="tensor", disable=None if progress else True)
    yield from bar


def _special_ids(folder: Path, tokenizer: "Tokenizer") -> dict[str, Any]:
    """EOS, BOS and padding ids; gives the written tokenizer a padding token and left padding.

    Rows of unequal length are padded on the left for generation, with the EOS where the tokenizer
    has no padding token (its attention mask says which positions are real).
    """
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    pad = settings.get("pad_token")
    pad_text = pad.get("content") if isinstance(pad, dict) else pad
    pad_id = tokenizer.backend.token_to_id(pad_text) if pad_text else None
    if pad_id is None:
        settings["pad_token"], pad_id = tokenizer.eos_token, tokenizer.eos_id
    settings["padding_side"] = "left"
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": tokenizer.eos_id,
        "pad_token_id": pad_id,
    }


def _write_configs(folder: Path, values: dict[str, Any], ids: dict[str, Any], dtype: str) -> None:
    from transformers import GenerationConfig

    from megatron_lt2.hf.configuration_lt2 import LT2Config

    config = LT2Config(
        **values,
        **ids,
        dtype=dtype,
        architectures=["LT2ForCausalLM"],
        auto_map=AUTO_MAP,
    )
    config.save_pretrained(folder)
    GenerationConfig(**ids).save_pretrained(folder)


def _metrics(run: Path) -> list[dict[str, Any]]:
    from megatron_lt2.tools.metrics_file import read_records

    path = run / "metrics.jsonl"
    return read_records(path) if path.is_file() else []
