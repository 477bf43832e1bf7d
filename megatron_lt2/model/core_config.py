"""From a RunConfig to megatron-core's TransformerConfig.

Everything that our schema does not name can be set under `megatron.transformer`; what the schema
does name is refused there, so that one value has one place.
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_lt2.config.megatron_fields import check_names
from megatron_lt2.config.schema import RunConfig, round_up

VOCAB_MULTIPLE = 16
"""Embedding rows are padded to this many a tensor-parallel rank: FP8 needs multiples of 16."""

FP8_RECIPES = {"delayed": "delayed", "current": "tensorwise", "block": "blockwise"}
"""`precision.fp8` in megatron-core's words."""


@dataclass
class CoreConfig(TransformerConfig):
    """megatron-core's config, with what LT2's own layers have to know."""

    context_exchange: str = "state"
    """`parallel.context_exchange`, for linear mixers."""

    recompute_cheap: bool = False
    """`memory.recompute_cheap`."""

    recompute_layers: float = 0.0
    """`memory.recompute_layers`."""


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
        "context_exchange": parallel.context_exchange,
        "recompute_cheap": config.memory.recompute_cheap,
        "recompute_layers": config.memory.recompute_layers,
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
    if config.precision.fp8 != "none":
        values |= {
            "fp8": "hybrid",
            "fp8_recipe": FP8_RECIPES[config.precision.fp8],
            # Of delayed scaling: the largest number of the last steps.
            "fp8_amax_history_len": 16,
            "fp8_amax_compute_algo": "max",
        }
    if parallel.pipeline > 1:
        values["pipeline_model_parallel_layout"] = _stage_layout(config)
        # A stage's output is dead once it is sent; only its place in the graph is needed.
        values["deallocate_pipeline_outputs"] = True
    values.update(passthrough(config.megatron.transformer, TransformerConfig, "transformer"))
    if values.get("fp32_residual_connection"):
        values["pipeline_dtype"] = torch.float32
    return CoreConfig(**values)


def _stage_layout(config: RunConfig) -> list[list[str]]:
    """What megatron-core builds on each pipeline stage."""
    layers = config.parallel.stage_layers(config.model.num_layers)
    stages = [["decoder"] * count for count in layers]
    return [["embedding", *stages[0]], *stages[1:-1], [*stages[-1], "loss"]]


def passthrough(given: dict[str, Any], target: type, section: str) -> dict[str, Any]:
    """Check fields given under `megatron.<section>` against megatron-core's dataclass `target`.

    Raises:
        ConfigError: unknown field (with the nearest known one), or one that the schema owns.
    """
    check_names(section, given, [f.name for f in fields(target)])
    return dict(given)
