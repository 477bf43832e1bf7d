"""The README.md of an exported model: what it is, how it was trained, how to load it.

Only facts that the run left behind are stated; what is unknown is left out. Paths of the training
machine are cut down to file names.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.model.pattern import expand_pattern
from megatron_lt2.recurrent.names import RECURRENT

SIZES = ("num_heads", "head_k_dim", "head_v_dim")
INITIAL = ("a_init_", "dt_", "input_bias", "forget_bias_")
"""Starts of the names of settings that concern initial values only."""

_TEMPLATE = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
{tags}
---

# {title}

{what} It was trained with megatron_lt2 {version} and exported from step {step}.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(folder{trust})
model = AutoModelForCausalLM.from_pretrained(folder{trust})
inputs = tokenizer(["Once upon a time"], return_tensors="pt", padding=True)
print(tokenizer.batch_decode(model.generate(**inputs, max_new_tokens=64)))
```

`folder` is this folder. {use}

## Architecture

| | |
|---|---|
{architecture}

## Training

| | |
|---|---|
{training}

{curve}This is a model as training left it; nothing was done here to make it follow instructions or
avoid harmful output.
"""

_TAGS = {
    "lt2": ("lt2", "looped-transformer", "linear-attention"),
    "ouro": ("ouro", "looped-transformer"),
    "llama": ("llama",),
}

_WHAT = {
    "lt2": (
        "A looped language model of the LT2 family (arXiv 2605.20670): {layers} stored layers run "
        "{loops}\ntimes with the same weights."
    ),
    "ouro": (
        "A looped language model of the Ouro family (arXiv 2510.25741): {layers} stored layers run "
        "{loops}\ntimes with the same weights, and a gate says after each loop how likely a token "
        "leaves."
    ),
    "llama": "A language model of the Llama architecture with {layers} layers.",
}

_USE = {
    "lt2": """The model's code lies here too and needs only torch and transformers (5.6
or later); read it before you trust it. With flash-linear-attention installed, 16-bit weights on a
CUDA device use its kernels. Batches are padded on the left; padded rows give the same numbers as
alone. The cache has one slot per (loop, layer), {slots} in all.""",
    "ouro": """The model's code is Ouro's own; it lies here if the model that training
started from came with it.""",
    "llama": "transformers has the model's code.",
}

POINTS = 12
"""Rows of the table of losses."""


@dataclass(frozen=True)
class CardFacts:
    """What a card is made of.

    title: name of the exported folder.
    family: name of the family.
    config: resolved run config.
    parameters: stored parameters.
    dtype: of the exported weights.
    manifest: the checkpoint's manifest.json.
    records: metrics.jsonl of the run, in order; those after the checkpoint's step are ignored.
    tokenizer_sha256: identity of the tokenizer, if there is one.
    version: of megatron_lt2.
    """

    title: str
    family: str
    config: RunConfig
    parameters: int
    dtype: str
    manifest: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]]
    tokenizer_sha256: str | None
    version: str


def render_card(facts: CardFacts) -> str:
    """The text of the card."""
    model, family = facts.config.model, facts.family
    counts = {
        "layers": model.num_layers,
        "loops": model.loops,
        "slots": model.num_layers * model.loops,
    }
    return _TEMPLATE.format(
        title=facts.title,
        tags="\n".join(f"- {tag}" for tag in _TAGS[family]),
        what=_WHAT[family].format(**counts),
        use=_USE[family].format(**counts),
        trust="" if family == "llama" else ", trust_remote_code=True",
        version=facts.version,
        step=facts.manifest["step"],
        architecture=_rows(_architecture(facts)),
        training=_rows(_training(facts)),
        curve=_curve(facts.records, facts.manifest["step"]),
    )


def _rows(facts: Mapping[str, Any]) -> str:
    return "\n".join(f"| {name} | {value} |" for name, value in facts.items() if value is not None)


def _architecture(facts: CardFacts) -> dict[str, Any]:
    model = facts.config.model
    mixers = Counter(_mixers(model))
    table: dict[str, Any] = {
        "parameters": f"{facts.parameters:,} ({facts.dtype})",
        "layers x loops": f"{model.num_layers} x {model.loops}",
        "mixers": ", ".join(f"{count} {name}" for name, count in sorted(mixers.items())),
        "loop residual": model.loop_residual,
        "width / SwiGLU width": f"{model.hidden_size} / {model.ffn_width}",
    }
    if mixers.keys() & {"full", "window"}:
        table["attention"] = (
            f"{model.num_heads} heads of {model.attention_head_dim}, "
            f"{model.kv_heads} key/value heads, "
            f"output gate {'on' if model.attention.output_gate else 'off'}, "
            f"rotary base {model.rope.theta:g}"
        )
    if "window" in mixers:
        table["window"] = f"{model.window.size} tokens, with the heads of full attention"
    for name in SPARSE:
        if name in mixers:
            settings = asdict(model.mixer_settings(name))
            table[name] = ", ".join(f"{key} {value}" for key, value in settings.items())
    for name in RECURRENT:
        if name in mixers:
            table[name] = _linear_mixer(asdict(model.mixer_settings(name)))
    table["vocabulary"] = (
        f"{model.vocab_size:,} ids, {'tied' if model.tie_embeddings else 'untied'} head"
    )
    table["training length"] = f"{facts.config.data.sequence_length} tokens"
    return table


def _mixers(model: ModelConfig) -> list[str]:
    return expand_pattern(model.pattern, model.num_layers, ("full", "window", *SPARSE, *RECURRENT))


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


def _training(facts: CardFacts) -> dict[str, Any]:
    manifest, records, config = facts.manifest, facts.records, facts.config
    step, tokens = manifest["step"], manifest.get("tokens")
    start = (manifest.get("imported") or manifest.get("init_from") or {}).get("from")
    if manifest.get("weights_only") and not step:
        return {"started from": start, "steps": "0"}
    training, optimizer = config.training, config.optimizer
    return {
        "started from": start,
        "steps": f"{step} of {training.steps}",
        "tokens": None if tokens is None else f"{tokens:,}",
        "last training loss": _last_loss(records, "train", step),
        "last validation loss": _last_loss(records, "eval", step),
        "data": ", ".join(Path(path).name for path in config.data.path) or None,
        "tokenizer.json": facts.tokenizer_sha256 and f"SHA-256 {facts.tokenizer_sha256}",
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


def _curve(records: Sequence[Mapping[str, Any]], step: int) -> str:
    """The training loss at about `POINTS` steps up to `step`, as a section; "" without records."""
    losses = {
        record["step"]: record["loss"]
        for record in records
        if record.get("kind") == "train"
        and record.get("loss") is not None
        and record.get("step", step + 1) <= step
    }
    if len(losses) < 2:
        return ""
    steps = sorted(losses)
    every = max(1, -(-len(steps) // POINTS))
    shown = steps[::-1][::every][::-1]
    rows = "\n".join(f"| {at} | {losses[at]:.4f} |" for at in shown)
    return f"## Loss\n\n| step | training loss, nat/token |\n|---|---|\n{rows}\n\n"
