"""Ouro (arXiv 2510.25741): sandwich norms, the final norm after every loop, an early-exit gate."""

from collections.abc import Mapping
from typing import Any

from checkpoints_tools.mappings.base import TensorMapping
from checkpoints_tools.mappings.family import (
    PLAIN_DEFAULTS,
    PLAIN_NEUTRAL,
    Family,
    plain_run_config,
    plain_values,
)
from checkpoints_tools.mappings.parts import plain_decoder, renamed
from megatron_lt2.config.schema import ModelConfig, RunConfig

SWITCHES: Mapping[str, Any] = {"norm_mode": "sandwich", "inter_loop_norm": True, "exit_gate": True}


def _table(model: ModelConfig) -> list[TensorMapping]:
    gate = "model.early_exit_gate"
    return [
        *plain_decoder(model, sandwich=True),
        renamed("decoder.exit_gate.weight", f"{gate}.weight", 1, model.hidden_size),
        renamed("decoder.exit_gate.bias", f"{gate}.bias", 1),
    ]


def _values(config: RunConfig) -> dict[str, Any]:
    model = config.model
    return {
        **plain_values(config, "Ouro", **SWITCHES),
        "total_ut_steps": model.loops,
        "layer_types": ["full_attention"] * model.num_layers,
    }


def _read(fields: Mapping[str, Any]) -> RunConfig:
    return plain_run_config(fields, loops=fields["total_ut_steps"], **SWITCHES)


FAMILY = Family(
    name="ouro",
    architecture="OuroForCausalLM",
    table=_table,
    values=_values,
    read=_read,
    defaults={**PLAIN_DEFAULTS, "total_ut_steps": 4},
    neutral=PLAIN_NEUTRAL,
    free=frozenset(("early_exit_threshold", "early_exit_step", "sliding_window"))
    | {"max_window_layers"},
)
