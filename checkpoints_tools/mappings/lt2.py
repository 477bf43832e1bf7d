"""LT2: the table from training names to those of `megatron_lt2/hf`, and the configuration.

Layers are numbered over the whole model. A linear mixer's table follows from its layout
(megatron_lt2/recurrent), so a new one needs nothing here. Its fused projection is one matrix in
memory but one tensor a section in a checkpoint, so nothing has to be cut.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from checkpoints_tools.mappings.base import AddAxis, TensorMapping, convert_all
from checkpoints_tools.mappings.family import Family
from checkpoints_tools.mappings.parts import attention, embedding, head, renamed, swiglu
from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.model.pattern import expand_pattern, loop_windows
from megatron_lt2.ops.sparse_layout import indexer_rows, output_width, sections
from megatron_lt2.recurrent.names import RECURRENT, recurrent_mixer

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("full", "window")
MIXERS = (*ATTENTION, *SPARSE, *RECURRENT)

SANDWICH = {
    "post_mixer_layernorm": "input_layernorm_2",
    "post_mlp_layernorm": "post_attention_layernorm_2",
}
"""Norms behind mixer and SwiGLU, which add to those before them."""


def _linear(model: ModelConfig, name: str, source: str, target: str) -> list[TensorMapping]:
    d, layout = model.hidden_size, recurrent_mixer(name)(model.mixer_settings(name)).layout
    table: list[TensorMapping] = []

    def same(key: str, new: str, *shape: int) -> None:
        table.append(TensorMapping(f"{source}.{key}", (f"{target}.{new}",), shape))

    for part, section in layout.sections.items():
        rows, width = layout.rows(part), layout.width(part)
        way = "proj" if section.rank is None else "down"
        same(f"in_proj.weight.{part}", f"{part}_{way}.weight", rows, d)
        if section.conv:
            conv = f"{target}.{part}_conv1d.weight"
            shape = (rows, layout.conv_size)
            table.append(AddAxis(f"{source}.conv1d.weight.{part}", (conv,), shape))
            if layout.conv_bias:
                same(f"conv1d.bias.{part}", f"{part}_conv1d.bias", rows)
        if section.rank is not None:
            same(f"up.{part}.weight", f"{part}_up.weight", width, rows)
            if section.bias:
                same(f"up.{part}.bias", f"{part}_up.bias", width)
    for own, weight in layout.weights.items():
        same(own, own, weight.channels * layout.heads)
    same("out_norm.weight", "o_norm.weight", layout.norm_channels)
    same("out_proj.weight", "o_proj.weight", d, layout.heads * layout.head_v_dim)
    return table


def _sparse(model: ModelConfig, name: str, source: str, target: str) -> list[TensorMapping]:
    """Sparse attention: a tensor a projection on both sides."""
    d, settings = model.hidden_size, model.mixer_settings(name)
    table = [
        renamed(f"{source}.in_proj.weight.{part}", f"{target}.{part}_proj.weight", rows, d)
        for part, rows in sections(name, settings).items()
    ]
    if name == "dsa":
        table += [
            renamed(f"{source}.indexer.{part}", f"{target}.indexer.{part}_proj.weight", rows, d)
            for part, rows in indexer_rows(settings).items()
        ]
    width = output_width(name, settings)
    return [*table, renamed(f"{source}.out_proj.weight", f"{target}.o_proj.weight", d, width)]


def _windows(model: ModelConfig) -> list[list[int | None]] | None:
    return loop_windows(model.pattern, model.num_layers, model.loops, model.window.size, MIXERS)


def _scheduled_pattern(mixers: list[str], windows: list[list[int | None]]) -> str:
    """The pattern of layers whose masks change between loops."""

    def item(name: str, window: int | None) -> str:
        if name not in ATTENTION:
            return name
        return "full" if window is None else f"window={window}"

    parts = ("+".join(map(item, mixers, row)) for row in windows)
    return "->".join(parts)


def _mixers(model: ModelConfig) -> list[str]:
    return expand_pattern(model.pattern, model.num_layers, MIXERS)


def fp32_names(model: ModelConfig) -> frozenset[str]:
    """Hugging Face names of the tensors that are fp32 whatever dtype is asked for: rho and the
    linear mixers' own parameters."""
    names = {"model.loop_residual"}
    for i, mixer in enumerate(_mixers(model)):
        if mixer in RECURRENT:
            own = recurrent_mixer(mixer)(model.mixer_settings(mixer)).layout.weights
            names |= {f"model.layers.{i}.mixer.{name}" for name in own}
    return frozenset(names)


def lt2_mappings(model: ModelConfig) -> list[TensorMapping]:
    """The table of one model; `model.vocab_size` must be set.

    Raises:
        ValueError: the pattern names an unknown mixer.
    """
    assert model.vocab_size is not None
    d = model.hidden_size
    table: list[TensorMapping] = [embedding(model)]
    for i, mixer in enumerate(_mixers(model)):
        source, target = f"decoder.layers.{i}", f"model.layers.{i}"
        from_mixer, to_mixer = f"{source}.self_attention", f"{target}.mixer"
        table += [
            TensorMapping(
                f"{source}.input_layernorm.weight", (f"{target}.input_layernorm.weight",), (d,)
            ),
            *(
                attention(model, from_mixer, to_mixer)
                if mixer in ATTENTION
                else _sparse(model, mixer, from_mixer, to_mixer)
                if mixer in SPARSE
                else _linear(model, mixer, from_mixer, to_mixer)
            ),
            TensorMapping(
                f"{source}.pre_mlp_layernorm.weight",
                (f"{target}.post_attention_layernorm.weight",),
                (d,),
            ),
            *swiglu(model, f"{source}.mlp", f"{target}.mlp"),
        ]
        if model.norm_mode == "sandwich":
            table += [
                renamed(f"{source}.{ours}.weight", f"{target}.{theirs}.weight", d)
                for ours, theirs in SANDWICH.items()
            ]
    if model.loop_residual == "per_channel":
        table.append(
            TensorMapping("decoder.loop_residual", ("model.loop_residual",), (model.loops, d))
        )
    if model.exit_gate:
        gate = "model.early_exit_gate"
        table.append(renamed("decoder.exit_gate.weight", f"{gate}.weight", 1, d))
        table.append(renamed("decoder.exit_gate.bias", f"{gate}.bias", 1))
    return [*table, *head(model)]


def export_state_dict(
    tensors: Mapping[str, "Tensor | Callable[[], Tensor]"], model: ModelConfig
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the Hugging Face tensors of an LT2 checkpoint by name; see `convert_all`."""
    return convert_all(tensors, lt2_mappings(model))


def lt2_config_values(config: RunConfig) -> dict[str, Any]:
    """Arguments of `LT2Config` that say the same as a run's resolved config.

    Raises:
        ValueError: the vocabulary size is not resolved.
    """
    model = config.model
    if model.vocab_size is None:
        raise ValueError(
            "model.vocab_size is not set in the saved config, so it is not a resolved one"
        )
    mixers = _mixers(model)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "mixers": mixers,
        "mixer_settings": {
            name: asdict(model.mixer_settings(name))
            for name in (*SPARSE, *RECURRENT)
            if name in mixers
        },
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "attention_output_gate": model.attention.output_gate,
        "window_size": model.window.size,
        "loop_windows": _windows(model),
        "loops": model.loops,
        "loop_residual": model.loop_residual,
        **{name: getattr(model, name) for name in SWITCHES},
        "rope_theta": model.rope.theta,
        "rope_interleaved": model.rope.interleaved,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": config.data.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
    }


NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "pattern": "mixers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "attention.output_gate": "attention_output_gate",
    "window.size": "window_size",
    "loops": "loops",
    "loop_residual": "loop_residual",
    "rope.theta": "rope_theta",
    "rope.interleaved": "rope_interleaved",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
}
"""Settings of `model` and the fields of LT2Config that hold them."""

SWITCHES = ("norm_mode", "inter_loop_norm", "exit_gate")
"""Settings of `model` that LT2Config has by the same name; exports of before lack them."""


def lt2_run_config(fields: Mapping[str, Any]) -> RunConfig:
    """The inverse of `lt2_config_values`.

    Raises:
        ValueError: settings of a mixer that it does not have.
    """
    config = RunConfig()
    model = config.model
    for ours, theirs in NAMES.items():
        inner, _, name = ours.rpartition(".")
        setattr(getattr(model, inner) if inner else model, name, fields[theirs])
    for switch in SWITCHES:
        setattr(model, switch, fields.get(switch, getattr(model, switch)))
    for mixer, settings in fields["mixer_settings"].items():
        section: Any = getattr(model, mixer, None)
        for name, value in settings.items():
            if mixer not in (*SPARSE, *RECURRENT) or not hasattr(section, name):
                raise ValueError(f"config.json: mixer_settings.{mixer}.{name} is unknown")
            setattr(section, name, value)
    windows = fields.get("loop_windows")
    if windows is not None:
        model.pattern = _scheduled_pattern(list(fields["mixers"]), windows)
    config.data.sequence_length = fields["max_position_embeddings"]
    return config


FAMILY = Family(
    name="lt2",
    architecture="LT2ForCausalLM",
    table=lt2_mappings,
    values=lt2_config_values,
    read=lt2_run_config,
    defaults={"tie_word_embeddings": True},
    free=frozenset(("exit_threshold", "exit_step")),
    fp32=fp32_names,
)
