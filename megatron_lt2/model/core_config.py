"""From a RunConfig to megatron-core's TransformerConfig.

Everything that our schema does not name can be set under `megatron.transformer`; what the schema
does name is refused there, so that one value has one place.
"""

import difflib
from dataclasses import fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig, round_up

VOCAB_MULTIPLE = 16
"""Embedding rows are padded to this many a tensor-parallel rank: FP8 needs multiples of 16."""

FIXED = {
    "num_layers": "model.num_layers",
    "hidden_size": "model.hidden_size",
    "ffn_hidden_size": "model.ffn_hidden_size",
    "num_attention_heads": "model.num_heads",
    "num_query_groups": "model.num_kv_heads",
    "kv_channels": "model.head_dim",
    "layernorm_epsilon": "model.norm_eps",
    "attention_output_gate": "model.attention.output_gate",
    "rotary_interleaved": "model.rope.interleaved",
    "tensor_model_parallel_size": "parallel.tensor",
    "pipeline_model_parallel_size": "parallel.pipeline",
    "context_parallel_size": "parallel.context",
    "sequence_parallel": "parallel.sequence",
    "pipeline_model_parallel_layout": "parallel.pipeline_layers",
    "num_layers_in_first_pipeline_stage": "parallel.pipeline_layers",
    "num_layers_in_last_pipeline_stage": "parallel.pipeline_layers",
    "account_for_embedding_in_pipeline_split": "parallel.pipeline_layers",
    "account_for_loss_in_pipeline_split": "parallel.pipeline_layers",
    "virtual_pipeline_model_parallel_size": "model.loops",
    "bf16": "precision.dtype",
    "params_dtype": "precision.dtype",
}
"""TransformerConfig fields that the schema owns, and where it does."""


ARCHITECTURE = (
    *("normalization", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "qk_l2_norm", "attention_dropout", "window_size", "multi_latent_attention"),
    *("experimental_attention_variant", "linear_attention_freq", "moe_layer_freq"),
    *("init_method", "init_method_std", "output_layer_init_method", "embedding_init_method"),
    *("embedding_init_method_std", "perform_initialization", "use_cpu_initialization"),
    *("calculate_per_token_loss", "hetereogenous_dist_checkpoint", "pipeline_dtype"),
    *("overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p", "variable_seq_lengths"),
    *("defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm"),
    "num_microbatches_with_partial_activation_checkpoints",
)
"""Fields that LT2's layers, initial weights or trainer fix: set, they do nothing or break."""


def resolve_dtype(config: RunConfig, on_gpu: bool) -> torch.dtype:
    """The dtype of weights and activations."""
    name = config.precision.dtype
    if name == "auto":
        name = "bf16" if on_gpu else "fp32"
    return torch.bfloat16 if name == "bf16" else torch.float32


def padded_vocab_size(config: RunConfig) -> int:
    """Embedding rows over all tensor-parallel ranks."""
    assert config.model.vocab_size is not None
    return round_up(config.model.vocab_size, VOCAB_MULTIPLE * config.parallel.tensor)


def transformer_config(config: RunConfig, on_gpu: bool) -> TransformerConfig:
    """The megatron-core config of this model.

    Raises:
        ValueError: `megatron.transformer` names an unknown field, or one that the schema owns.
    """
    model, parallel = config.model, config.parallel
    dtype = resolve_dtype(config, on_gpu)
    values: dict[str, Any] = {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_width,
        "num_attention_heads": model.num_heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.attention_head_dim,
        "layernorm_epsilon": model.norm_eps,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "attention_output_gate": model.attention.output_gate,
        "rotary_interleaved": model.rope.interleaved,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "sequence_parallel": parallel.sequence,
        "calculate_per_token_loss": True,
        # Initial values come from model/init.py.
        "perform_initialization": False,
        "use_cpu_initialization": not on_gpu,
        # Layers of a hybrid differ, so each has its own checkpoint keys.
        "hetereogenous_dist_checkpoint": True,
        "bias_activation_fusion": on_gpu,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
    }
    if parallel.pipeline > 1:
        values["pipeline_model_parallel_layout"] = _stage_layout(config)
        # A stage's output is dead once it is sent; only its place in the graph is needed.
        values["deallocate_pipeline_outputs"] = True
    values.update(passthrough(config.megatron.transformer, TransformerConfig, "transformer", FIXED))
    if values.get("fp32_residual_connection"):
        values["pipeline_dtype"] = torch.float32
    return TransformerConfig(**values)


def _stage_layout(config: RunConfig) -> list[list[str]]:
    """What megatron-core builds on each pipeline stage."""
    layers = config.parallel.stage_layers(config.model.num_layers)
    stages = [["decoder"] * count for count in layers]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def passthrough(
    given: dict[str, Any], target: type, section: str, owned: dict[str, str]
) -> dict[str, Any]:
    """Check fields given under `megatron.<section>` against megatron-core's dataclass `target`.

    Raises:
        ConfigError: unknown field (with the nearest known one), or one that the schema owns.
    """
    known = [f.name for f in fields(target)]
    for name in given:
        if name in owned:
            raise ConfigError(
                f"megatron.{section}.{name} is owned by {owned[name]}; set that instead"
            )
        if target is TransformerConfig and name in ARCHITECTURE:
            raise ValueError(
                f"megatron.{section}.{name} has no effect: LT2's layers, initial weights and "
                "trainer fix it; leave it out"
            )
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"megatron.{section}.{name} is no field of megatron-core's {target.__name__}{hint}"
            )
    return dict(given)
