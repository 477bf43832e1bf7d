"""LT2: the table from training names to those of `megatron_lt2/hf`, and the configuration.

Layers are numbered over the whole model. A linear mixer's table follows from its layout
(megatron_lt2/recurrent), so a new one needs nothing here. Its fused projection is one matrix in
memory but one tensor a section in a checkpoint, so nothing has to be cut.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from checkpoints_tools.mappings.base import (
    AddAxis,
    CutRows,
    SplitGroups,
    SplitRows,
    TensorMapping,
    convert_all,
)
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.model.pattern import expand_pattern
from megatron_lt2.recurrent.names import RECURRENT, recurrent_mixer

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = ("full", "window")
MIXERS = (*ATTENTION, *RECURRENT)

ONLY_VALUES = {"norm_mode": "pre", "inter_loop_norm": False, "exit_gate": False, "loss": "final"}
"""Settings of `model` that the LT2 modeling file has one value of."""


def _attention(model: ModelConfig, source: str, target: str) -> list[TensorMapping]:
    d, heads, groups = model.hidden_size, model.num_heads, model.kv_heads
    head_dim = model.attention_head_dim
    queries = heads // groups * head_dim
    gated = model.attention.output_gate
    parts = {"q_proj": queries, **({"g_proj": queries} if gated else {})}
    parts |= {"k_proj": head_dim, "v_proj": head_dim}
    return [
        SplitGroups(
            f"{source}.linear_qkv.weight",
            tuple(f"{target}.{name}.weight" for name in parts),
            (groups * sum(parts.values()), d),
            groups=groups,
            rows_per_group=tuple(parts.values()),
        ),
        TensorMapping(
            f"{source}.linear_proj.weight", (f"{target}.o_proj.weight",), (d, heads * head_dim)
        ),
    ]


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
    d, ffn = model.hidden_size, model.ffn_width
    table: list[TensorMapping] = [
        CutRows(
            "embedding.word_embeddings.weight",
            ("model.embed_tokens.weight",),
            (model.vocab_size, d),
        )
    ]
    for i, mixer in enumerate(_mixers(model)):
        source, target = f"decoder.layers.{i}", f"model.layers.{i}"
        from_mixer, to_mixer = f"{source}.self_attention", f"{target}.mixer"
        table += [
            TensorMapping(
                f"{source}.input_layernorm.weight", (f"{target}.input_layernorm.weight",), (d,)
            ),
            *(
                _attention(model, from_mixer, to_mixer)
                if mixer in ATTENTION
                else _linear(model, mixer, from_mixer, to_mixer)
            ),
            TensorMapping(
                f"{source}.pre_mlp_layernorm.weight",
                (f"{target}.post_attention_layernorm.weight",),
                (d,),
            ),
            SplitRows(
                f"{source}.mlp.linear_fc1.weight",
                (f"{target}.mlp.gate_proj.weight", f"{target}.mlp.up_proj.weight"),
                (2 * ffn, d),
                rows=(ffn, ffn),
            ),
            TensorMapping(
                f"{source}.mlp.linear_fc2.weight", (f"{target}.mlp.down_proj.weight",), (d, ffn)
            ),
        ]
    if model.loop_residual == "per_channel":
        table.append(
            TensorMapping("decoder.loop_residual", ("model.loop_residual",), (model.loops, d))
        )
    table.append(TensorMapping("decoder.final_layernorm.weight", ("model.norm.weight",), (d,)))
    if not model.tie_embeddings:
        table.append(CutRows("output_layer.weight", ("lm_head.weight",), (model.vocab_size, d)))
    return table


def export_state_dict(
    tensors: Mapping[str, "Tensor | Callable[[], Tensor]"], model: ModelConfig
) -> Iterator[tuple[str, "Tensor"]]:
    """Yield the Hugging Face tensors of an LT2 checkpoint by name; see `convert_all`."""
    return convert_all(tensors, lt2_mappings(model))


def lt2_config_values(config: RunConfig) -> dict[str, Any]:
    """Arguments of `LT2Config` that say the same as a run's resolved config.

    Raises:
        ValueError: the vocabulary size is not resolved, or an architecture switch has a value that
            the modeling file lacks.
    """
    model = config.model
    if model.vocab_size is None:
        raise ValueError(
            "model.vocab_size is not set in the saved config, so it is not a resolved one"
        )
    for name, value in ONLY_VALUES.items():
        if (given := getattr(model, name)) != value:
            raise ValueError(
                f"model.{name} is {given!r}: the exported modeling file has {value!r} only"
            )
    mixers = _mixers(model)
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "mixers": mixers,
        "mixer_settings": {
            name: asdict(model.mixer_settings(name)) for name in RECURRENT if name in mixers
        },
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "attention_output_gate": model.attention.output_gate,
        "window_size": model.window.size,
        "loops": model.loops,
        "loop_residual": model.loop_residual,
        "rope_theta": model.rope.theta,
        "rope_interleaved": model.rope.interleaved,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": config.data.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
    }
