"""Whether this machine has FP8."""

import importlib.util

import torch

from megatron_lt2.config.errors import ConfigError

INSTALL = "pip install 'megatron_lt2[te]'"


def check_fp8_device(recipe: str) -> None:
    """Refuse a machine that has no FP8.

    Raises:
        ConfigError: the GPU or Transformer Engine is missing; says what to do.
    """
    if recipe == "none":
        return
    if not torch.cuda.is_available():
        raise ConfigError(
            f"precision.fp8 {recipe} needs a GPU with FP8 (Ada, Hopper, Blackwell), and there is "
            "no GPU here; set precision.fp8 none"
        )
    if torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError(
            f"precision.fp8 {recipe} needs a GPU with FP8 (Ada, Hopper, Blackwell), and "
            f"{torch.cuda.get_device_name()} has none; set precision.fp8 none"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ConfigError(
            f"precision.fp8 {recipe} needs Transformer Engine, which is not installed: {INSTALL}, "
            "or set precision.fp8 none"
        )
