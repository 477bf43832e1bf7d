"""LT2: the table from training names to those of `megatron_lt2/hf`, and the configuration.

Layers are numbered over the whole model. The fused projection of a Gated DeltaNet layer is one
matrix in memory but one tensor a section in a checkpoint, so nothing has to be cut here.
"""

from collections.abc import Callable, Iterator, Mapping
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

if TYPE_CHECKING:
    from torch import Tensor

FP32_NAMES = ("A_log", "dt_bias", "loop_residual")
"""Last parts of names whose tensors are exported in fp32 whatever dtype is asked for."""

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


def _gdn(model: ModelConfig, source: str, target: str) -> list[TensorMapping]:
    d, heads, taps = model.hidden_size, model.gdn_heads, model.gdn.conv_size
    keys, values = heads * model.gdn_head_k_dim, heads * model.gdn_head_v_dim
    projections = {
        "query": ("q_proj", keys),
        "key": ("k_proj", keys),
        "value": ("v_proj", values),
        "gate": ("g_proj", values),
        "beta": ("b_proj", heads),
        "decay": ("a_proj", heads),
    }
    convolutions = {
        "query": ("q_conv1d", keys),
        "key": ("k_conv1d", keys),
        "value": ("v_conv1d", values),
    }
    table: list[TensorMapping] = [
        TensorMapping(f"{source}.in_proj.weight.{part}", (f"{target}.{name}.weight",), (rows, d))
        for part, (name, rows) in projections.items()
    ]
    table += [
        AddAxis(f"{source}.conv1d.weight.{part}", (f"{target}.{name}.weight",), (rows, taps))
        for part, (name, rows) in convolutions.items()
    ]
    return [
        *table,
        TensorMapping(f"{source}.A_log", (f"{target}.A_log",), (heads,)),
        TensorMapping(f"{source}.dt_bias", (f"{target}.dt_bias",), (heads,)),
        TensorMapping(
            f"{source}.out_norm.weight", (f"{target}.o_norm.weight",), (model.gdn_head_v_dim,)
        ),
        TensorMapping(f"{source}.out_proj.weight", (f"{target}.o_proj.weight",), (d, values)),
    ]


MIXER_TABLES: dict[str, Callable[[ModelConfig, str, str], list[TensorMapping]]] = {
    "full": _attention,
    "gdn": _gdn,
}


def lt2_mappings(model: ModelConfig) -> list[TensorMapping]:
    """The table of one model; `model.vocab_size` must be set.

    Raises:
        ValueError: the pattern names a mixer that the modeling file does not have.
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
    mixers = expand_pattern(model.pattern, model.num_layers, tuple(MIXER_TABLES))
    for i, mixer in enumerate(mixers):
        source, target = f"decoder.layers.{i}", f"model.layers.{i}"
        table += [
            TensorMapping(
                f"{source}.input_layernorm.weight", (f"{target}.input_layernorm.weight",), (d,)
            ),
            *MIXER_TABLES[mixer](model, f"{source}.self_attention", f"{target}.mixer"),
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
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_width,
        "num_hidden_layers": model.num_layers,
        "mixers": expand_pattern(model.pattern, model.num_layers, tuple(MIXER_TABLES)),
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.attention_head_dim,
        "attention_output_gate": model.attention.output_gate,
        "loops": model.loops,
        "loop_residual": model.loop_residual,
        "rope_theta": model.rope.theta,
        "rope_interleaved": model.rope.interleaved,
        "gdn_heads": model.gdn_heads,
        "gdn_head_k_dim": model.gdn_head_k_dim,
        "gdn_head_v_dim": model.gdn_head_v_dim,
        "gdn_conv_size": model.gdn.conv_size,
        "gdn_allow_neg_eigval": model.gdn.allow_neg_eigval,
        "gdn_norm_eps": model.gdn.norm_eps,
        "rms_norm_eps": model.norm_eps,
        "max_position_embeddings": config.data.sequence_length,
        "tie_word_embeddings": model.tie_embeddings,
    }
