"""What a checkpoint or a Hugging Face folder is, from its configs and tables of contents."""

import math
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checkpoints_tools import side_files
from checkpoints_tools.mappings.base import is_ignored
from checkpoints_tools.mappings.family import Family
from checkpoints_tools.mappings.registry import family_of_config, family_of_run
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.safetensors_files import SafetensorsFolder, Spec
from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.model.pattern import expand_pattern
from megatron_lt2.recurrent.names import RECURRENT

GROUPS = (
    ("embedding", ("embed_tokens",)),
    ("head", ("lm_head",)),
    ("exit gate", ("exit_gate",)),
    ("loop residual", ("loop_residual",)),
    ("norms", ("norm",)),
    ("MLP", (".mlp.",)),
    ("mixers", (".mixer.", ".self_attn.")),
)
"""Groups of parameters and what their names contain; the first that fits counts."""


def describe(path: Path, *, tensors: bool = False) -> list[str]:
    """Lines about a run, a checkpoint or a Hugging Face folder.

    Raises:
        ValueError: it is neither, or its files contradict each other.
    """
    if (path / "config.json").is_file() and not (path / "checkpoints").is_dir():
        return _describe_hf(path, tensors)
    return _describe_checkpoint(path, tensors)


def _describe_hf(folder: Path, tensors: bool) -> list[str]:
    fields = side_files.read_config(folder)
    family = family_of_config(fields, folder / "config.json")
    config = family.run_config(fields)
    weights = SafetensorsFolder(folder)
    specs = {name: Spec(weights.dtype(name), weights.entries[name].shape) for name in weights}
    files = {entry.file for entry in weights.entries.values()}
    size = sum(file.stat().st_size for file in files)
    lines = [f"{folder}: Hugging Face folder, {size / 1e9:.3f} GB in {len(files)} file(s)"]
    lines += _model(family, config, specs)
    lines += [_tokenizer(folder if (folder / "tokenizer.json").is_file() else None, config)]
    return lines + (_listing(specs) if tensors else [])


def _describe_checkpoint(path: Path, tensors: bool) -> list[str]:
    from megatron_lt2.config.load import load_saved
    from megatron_lt2.training.checkpoint_files import read_manifest

    folder = find_checkpoint(path)
    config, manifest = load_saved(folder / "run_config.yaml"), read_manifest(folder)
    checkpoint = PlainCheckpoint(folder)
    weights = {
        name: Spec(checkpoint.dtype(name), checkpoint.shape(name))
        for name in checkpoint
        if not is_ignored(name)
    }
    family = family_of_run(config)
    specs = {}
    for mapping in family.table(config.model):
        if mapping.source not in weights:
            raise ValueError(f"{folder}: {mapping.source} is missing")
        mapping.check_shape(weights[mapping.source].shape)
        for name, shape in zip(mapping.targets, mapping.target_shapes(), strict=True):
            specs[name] = Spec(weights[mapping.source].dtype, shape)
    size = sum(manifest["files"].values())
    state = any(name.startswith(("optimizer.", "chained_")) for name in checkpoint)
    lines = [
        f"{folder}: checkpoint, {size / 1e9:.3f} GB, "
        + ("weights and optimizer" if state else "weights only")
    ]
    lines += _model(family, config, specs)
    run = folder.absolute().parent.parent
    lines += [_tokenizer(run / "tokenizer" if (run / "tokenizer").is_dir() else None, config)]
    lines += _history(manifest, config)
    return lines + (_listing(weights) if tensors else [])


def _model(family: Family, config: RunConfig, specs: Mapping[str, Spec]) -> list[str]:
    model = config.model
    mixers = Counter(
        expand_pattern(model.pattern, model.num_layers, ("full", "window", *SPARSE, *RECURRENT))
    )
    sizes: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    for name, spec in specs.items():
        group = next((g for g, parts in GROUPS if any(part in name for part in parts)), "other")
        if ".mixer." in name:  # a mixer's own norm is part of it
            group = "mixers"
        sizes[group] += math.prod(spec.shape)
        dtypes[spec.dtype] += math.prod(spec.shape)
    groups = ", ".join(f"{group} {count:,}" for group, count in sizes.most_common())
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(mixers.items()))
    words = ", ".join(f"{count:,} {name}" for name, count in dtypes.most_common())
    return [
        f"family        {family.name} ({family.architecture})",
        f"layers        {model.num_layers} ({kinds}) x {model.loops} loop(s)",
        f"width         {model.hidden_size}, SwiGLU {model.ffn_width}, {model.num_heads} heads of "
        f"{model.attention_head_dim}, {model.kv_heads} key/value heads",
        f"vocabulary    {model.vocab_size:,}, {'tied' if model.tie_embeddings else 'untied'} head",
        f"rotary base   {model.rope.theta:g}, norm epsilon {model.norm_eps:g}, "
        f"{config.data.sequence_length} tokens",
        f"parameters    {sum(sizes.values()):,} in {len(specs)} tensors: {groups}",
        f"dtypes        {words}",
    ]


def _tokenizer(folder: Path | None, config: RunConfig) -> str:
    from megatron_lt2.data.tokenizer import load_tokenizer

    if folder is None:
        return "tokenizer     none"
    tokenizer = load_tokenizer(folder)
    assert config.model.vocab_size is not None
    fits = tokenizer.vocab_size <= config.model.vocab_size
    says = "fits" if fits else "DOES NOT FIT: has ids that the model does not know"
    return f"tokenizer     {tokenizer.vocab_size:,} ids, {says}; SHA-256 {tokenizer.sha256[:16]}"


def _history(manifest: Mapping[str, Any], config: RunConfig) -> list[str]:
    step, tokens = manifest["step"], manifest.get("tokens")
    lines = [f"iteration     {step}" + (f", {tokens:,} tokens" if tokens else "")]
    imported, start = manifest.get("imported"), manifest.get("init_from")
    if imported:
        lines.append(f"imported from {imported['from']} ({imported['family']})")
    if start:
        lines.append(f"started from  {start['from']}, step {start['step']}")
    if step:
        data = ", ".join(Path(prefix).name for prefix in config.data.prefixes) or "unknown"
        lines.append(
            f"trained on    {data}; {config.training.global_batch_size} sequences of "
            f"{config.data.sequence_length} tokens a step, learning rate {config.optimizer.lr:g}"
        )
    if layout := manifest.get("layout"):
        lines.append("written by    " + ", ".join(f"{k} {v}" for k, v in layout.items()))
    versions = ", ".join(f"{k} {v}" for k, v in manifest.get("versions", {}).items())
    when = manifest.get("time")
    stamp = datetime.fromtimestamp(when, UTC).strftime(", %Y-%m-%d %H:%M UTC") if when else ""
    if versions:
        lines.append(f"made with     {versions}{stamp}")
    return lines


def _listing(specs: Mapping[str, Spec]) -> list[str]:
    return [f"  {name}  {spec.dtype} {list(spec.shape)}" for name, spec in specs.items()]
