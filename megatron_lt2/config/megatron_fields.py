"""Names that `megatron.*` may set: the fields of megatron-core's dataclasses, without importing it.

A slip would otherwise be found only when the model is built, behind torch's import and after the
run folder has been opened. The names are read from megatron-core's source as it is installed.
"""

import ast
import difflib
import importlib.util
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from megatron_lt2.config.errors import ConfigError

CLASSES = {
    "transformer": (
        ("core/model_parallel_config.py", "ModelParallelConfig"),
        ("core/transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (
        ("core/distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),
    ),
    "optimizer": (("core/optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""Where the fields of each section are declared: the class that is set, after those above it."""

OWNED: dict[str, dict[str, str]] = {
    "transformer": {
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
        "fp8": "precision.fp8",
        "fp8_recipe": "precision.fp8",
        "recompute_granularity": "memory.recompute_layers",
        "recompute_method": "memory.recompute_layers",
        "recompute_num_layers": "memory.recompute_layers",
        "recompute_modules": "memory.recompute_cheap",
        "gradient_accumulation_fusion": "precision.dtype",
    },
    "ddp": {
        "use_distributed_optimizer": "parallel.distributed_optimizer",
        "overlap_grad_reduce": "parallel.overlap_grad_reduce",
        "overlap_param_gather": "parallel.overlap_param_gather",
    },
    "optimizer": {
        "lr": "optimizer.lr",
        "min_lr": "optimizer.min_lr",
        "weight_decay": "optimizer.weight_decay",
        "adam_beta1": "optimizer.betas",
        "adam_beta2": "optimizer.betas",
        "adam_eps": "optimizer.eps",
        "clip_grad": "optimizer.clip_grad",
        "bf16": "precision.dtype",
        "params_dtype": "precision.dtype",
        "use_distributed_optimizer": "parallel.distributed_optimizer",
        "overlap_param_gather": "parallel.overlap_param_gather",
    },
}
"""Fields that the schema owns, and where it does."""

ARCHITECTURE = (
    *("normalization", "gated_linear_unit", "activation_func", "add_bias_linear", "add_qkv_bias"),
    *("qk_layernorm", "qk_l2_norm", "attention_dropout", "window_size", "multi_latent_attention"),
    *("experimental_attention_variant", "linear_attention_freq", "moe_layer_freq"),
    *("init_method", "init_method_std", "output_layer_init_method", "embedding_init_method"),
    *("embedding_init_method_std", "perform_initialization", "use_cpu_initialization"),
    *("calculate_per_token_loss", "hetereogenous_dist_checkpoint", "pipeline_dtype"),
    *("overlap_p2p_comm", "batch_p2p_comm", "use_ring_exchange_p2p", "variable_seq_lengths"),
    *("defer_embedding_wgrad_compute", "overlap_moe_expert_parallel_comm"),
    *("cross_entropy_loss_fusion", "cross_entropy_fusion_impl", "fp8_output_proj"),
    "num_microbatches_with_partial_activation_checkpoints",
)
"""Fields that LT2's layers, initial weights or trainer fix: set, they do nothing or break."""

FSDP = (
    *("use_megatron_fsdp", "use_custom_fsdp", "data_parallel_sharding_strategy"),
    *("outer_dp_sharding_strategy", "num_distributed_optimizer_instances"),
)
"""Fields of `ddp` that ask for another wrapper than the one in which looped layers are proved."""


@cache
def field_names(section: str) -> tuple[str, ...] | None:
    """Fields of a section's dataclass; None where megatron-core's source cannot be read."""
    spec = importlib.util.find_spec("megatron")
    for folder in [] if spec is None else list(spec.submodule_search_locations or []):
        names: list[str] = []
        for file, name in CLASSES[section]:
            path = Path(folder) / file
            found = _fields_of(path, name) if path.is_file() else []
            if not found:
                break
            names += found
        else:
            return tuple(dict.fromkeys(names))
    return None


def _fields_of(path: Path, name: str) -> list[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return [
                item.target.id
                for item in node.body
                if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
            ]
    return []


def check_names(section: str, given: Iterable[str], known: Iterable[str] | None) -> None:
    """Refuse names under `megatron.<section>` that megatron-core does not know or LT2 sets itself.

    Args:
        section: "transformer", "ddp" or "optimizer".
        given: the names.
        known: the dataclass's fields; None: not known, so only those that LT2 sets are refused.

    Raises:
        ConfigError: names the field, and the nearest known one or the setting that owns it.
    """
    for name in given:
        setting = f"megatron.{section}.{name}"
        if name in OWNED[section]:
            raise ConfigError(f"{setting} is owned by {OWNED[section][name]}; set that instead")
        if section == "transformer" and name in ARCHITECTURE:
            raise ConfigError(
                f"{setting} has no effect: LT2's layers, initial weights and trainer fix it; "
                "leave it out"
            )
        if section == "ddp" and name in FSDP:
            raise ConfigError(
                f"{setting} is not served: looped layers run in plain DDP; leave it "
                "out and shard with parallel.distributed_optimizer, parallel.tensor or "
                "parallel.pipeline"
            )
        names = None if known is None else list(known)
        if names is not None and name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            kind = CLASSES[section][-1][1]
            raise ConfigError(f"{setting} is no field of megatron-core's {kind}{hint}")
