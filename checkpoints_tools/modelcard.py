"""The README.md of an exported model: what it is, how it was trained, how to load it.

Only facts that the run left behind are stated; what is unknown is left out. Paths of the training
machine are cut down to file names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_lt2.config.schema import RunConfig

SIZES = ("num_heads", "head_k_dim", "head_v_dim")
INITIAL = ("a_init_", "dt_", "input_bias", "forget_bias_")
"""Starts of the names of settings that concern initial values only."""

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- lt2
- looped-transformer
- linear-attention
---

# {title}

A looped language model of the LT2 family (arXiv 2605.20670): {layers} stored layers run {loops}
times with the same weights. It was trained with megatron_lt2 {version} and exported from step
{step}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
inputs = tokenizer(["Once upon a time"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=64)))
```

`folder` is this folder. The model's code lies here too and needs only torch and transformers (5.6
or later); read it before you trust it. With flash-linear-attention installed, 16-bit weights on a
CUDA device use its kernels. Batches are padded on the left; padded rows give the same numbers as
alone. The cache has one slot per (loop, layer), {slots} in all.

## Architecture

| | |
|---|---|
{architecture}

## Training

| | |
|---|---|
{training}

This is a model as pretraining left it: it continues text, and was not tuned to follow instructions
or to avoid harmful output.
"""


def render_card(
    title: str,
    config: RunConfig,
    hf: Mapping[str, Any],
    *,
    parameters: int,
    dtype: str,
    manifest: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    tokenizer_sha256: str,
    version: str,
) -> str:
    """The text of the card.

    Args:
        title: name of the exported folder.
        config: resolved run config.
        hf: arguments of LT2Config.
        parameters: stored parameters.
        dtype: of the exported weights.
        manifest: the checkpoint's manifest.json.
        records: metrics.jsonl of the run, in order; those after the checkpoint's step are ignored.
        tokenizer_sha256: identity of the tokenizer.
        version: of megatron_lt2.
    """
    step = manifest["step"]
    return _TEMPLATE.format(
        title=title,
        layers=hf["num_hidden_layers"],
        loops=hf["loops"],
        slots=hf["num_hidden_layers"] * hf["loops"],
        version=version,
        step=step,
        architecture=_rows(_architecture(hf, parameters, dtype)),
        training=_rows(_training(config, manifest, records, tokenizer_sha256)),
    )


def _rows(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)


def _architecture(hf: Mapping[str, Any], parameters: int, dtype: str) -> dict[str, Any]:
    mixers = Counter(hf["mixers"])
    facts: dict[str, Any] = {
        "parameters": f"{parameters:,} ({dtype})",
        "layers x loops": f"{hf['num_hidden_layers']} x {hf['loops']}",
        "mixers": ", ".join(f"{count} {name}" for name, count in sorted(mixers.items())),
        "loop residual": hf["loop_residual"],
        "width / SwiGLU width": f"{hf['hidden_size']} / {hf['intermediate_size']}",
    }
    if mixers.keys() & {"full", "window"}:
        facts["attention"] = (
            f"{hf['num_attention_heads']} heads of {hf['head_dim']}, "
            f"{hf['num_key_value_heads']} key/value heads, "
            f"output gate {'on' if hf['attention_output_gate'] else 'off'}, "
            f"rotary base {hf['rope_theta']:g}"
        )
    if "window" in mixers:
        facts["window"] = f"{hf['window_size']} tokens, with the heads of full attention"
    for name, settings in hf["mixer_settings"].items():
        facts[name] = _linear_mixer(settings)
    facts["vocabulary"] = (
        f"{hf['vocab_size']:,} ids, {'tied' if hf['tie_word_embeddings'] else 'untied'} head"
    )
    facts["training length"] = f"{hf['max_position_embeddings']} tokens"
    return facts


def _linear_mixer(settings: Mapping[str, Any]) -> str:
    """One line on a linear mixer; how it was initialised is left out."""
    sizes = (
        f"{settings['num_heads']} heads, {settings['head_k_dim']} key and "
        f"{settings['head_v_dim']} value channels a head"
    )
    more = [
        f"{name.replace('_', ' ')} {str(value).lower()}"
        for name, value in settings.items()
        if name not in SIZES and not name.startswith(INITIAL)
    ]
    return ", ".join([sizes, *more])


def _training(
    config: RunConfig,
    manifest: Mapping[str, Any],
    records: Sequence[Mapping[str, Any]],
    tokenizer_sha256: str,
) -> dict[str, Any]:
    step, tokens = manifest["step"], manifest.get("tokens")
    training, optimizer = config.training, config.optimizer
    return {
        "steps": f"{step} of {training.steps}",
        "tokens": None if tokens is None else f"{tokens:,}",
        "last training loss": _last_loss(records, "train", step),
        "last validation loss": _last_loss(records, "eval", step),
        "data": ", ".join(Path(path).name for path in config.data.path) or None,
        "tokenizer.json": f"SHA-256 {tokenizer_sha256}",
        "sequences a step": f"{training.global_batch_size} of {config.data.sequence_length} tokens",
        "optimizer": (
            f"AdamW, betas {optimizer.betas[0]:g} and {optimizer.betas[1]:g}, weight decay "
            f"{optimizer.weight_decay:g}, gradient clipping {optimizer.clip_grad:g}"
        ),
        "learning rate": (
            f"{optimizer.lr:g}, {optimizer.schedule}, {optimizer.warmup_steps} warm-up steps"
        ),
        "precision": None if config.precision.dtype == "auto" else config.precision.dtype,
        "seed": training.seed,
    }


def _last_loss(records: Sequence[Mapping[str, Any]], kind: str, step: int) -> str | None:
    for record in reversed(records):
        usable = record.get("kind") == kind and record.get("split", "valid") != "test"
        if usable and record.get("loss") is not None and record.get("step", step + 1) <= step:
            return f"{record['loss']:.4f} nat/token (step {record['step']})"
    return None
