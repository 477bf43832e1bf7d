"""Llama and models that say they are one, SmolLM2 among them: one pass, pre-norm."""

from collections.abc import Mapping
from typing import Any

from checkpoints_tools.mappings.family import (
    PLAIN_DEFAULTS,
    PLAIN_NEUTRAL,
    Family,
    plain_run_config,
    plain_values,
)
from checkpoints_tools.mappings.parts import plain_decoder
from megatron_lt2.config.schema import RunConfig


def _values(config: RunConfig) -> dict[str, Any]:
    switches = {"norm_mode": "pre", "inter_loop_norm": False, "exit_gate": False, "loss": "final"}
    return plain_values(config, "Llama", loops=1, **switches)


def _read(fields: Mapping[str, Any]) -> RunConfig:
    return plain_run_config(fields)


FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    table=plain_decoder,
    values=_values,
    read=_read,
    defaults=PLAIN_DEFAULTS,
    neutral=PLAIN_NEUTRAL,
)
