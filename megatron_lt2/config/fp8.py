"""Sizes that FP8 takes: its matrix products want multiples of 16 in every dimension."""

from collections.abc import Iterator

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT, recurrent_mixer
from megatron_lt2.model.pattern import expand_pattern

MULTIPLE = 16


def check_fp8(config: RunConfig) -> None:
    """Refuse sizes that FP8 products do not take.

    Raises:
        ConfigError: names the setting, the value and the fix.
    """
    recipe = config.precision.fp8
    if recipe == "none":
        return
    if config.precision.dtype == "fp32":
        raise ConfigError(
            f"precision.fp8 {recipe} keeps weights in bf16, but precision.dtype is fp32; set it to "
            "auto or bf16"
        )
    for name in ("tensor", "pipeline"):
        ranks = getattr(config.parallel, name)
        if ranks > 1:
            raise ConfigError(
                f"precision.fp8 {recipe} was not tried with parallel.{name} {ranks}; set "
                f"parallel.{name} 1 or precision.fp8 none"
            )
    for what, size, fix in _sizes(config):
        if size % MULTIPLE:
            raise ConfigError(
                f"precision.fp8 {recipe}: {what} is {size} on a rank, and FP8 products need a "
                f"multiple of {MULTIPLE}; change {fix}"
            )


def _sizes(config: RunConfig) -> Iterator[tuple[str, int, str]]:
    """Dimensions of matrix products on one rank, and the setting that changes each."""
    model, parallel = config.model, config.parallel
    yield "the width of the residual stream", model.hidden_size, "model.hidden_size"
    yield "the inner width of the SwiGLU", model.ffn_width, "model.ffn_hidden_size"
    tokens = config.training.micro_batch_size * config.data.sequence_length // parallel.context
    yield "the tokens of a micro-batch", tokens, "data.sequence_length"
    names = set(expand_pattern(model.pattern, model.num_layers, MIXER_NAMES))
    for name in sorted(names & set(RECURRENT)):
        layout = recurrent_mixer(name)(model.mixer_settings(name)).layout
        rows = sum(map(layout.rows, layout.sections))
        yield f"the projection of model.{name}", rows, f"model.{name}.num_heads or its head sizes"
        values = layout.heads * layout.head_v_dim
        yield f"the output of model.{name}", values, f"model.{name}.head_v_dim"
    if names & {"full", "window"}:
        channels = model.num_heads * model.attention_head_dim
        yield "the output of attention", channels, "model.head_dim"
        keys = model.kv_heads * model.attention_head_dim
        yield "the keys of attention", keys, "model.head_dim"
