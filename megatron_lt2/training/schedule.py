"""megatron-core's optimizer and learning-rate schedule from our config."""

from collections.abc import Sequence
from dataclasses import fields
from fnmatch import fnmatchcase
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig as CoreOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer_config import (
    ParamKey,
    ParamPredicate,
    ParamWithNamePredicate,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler, ParamGroupOverride

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.model.core_config import passthrough
from megatron_lt2.training import multi_tensor
from megatron_lt2.training.optimizer_state import fuse


def check_optimizer_fields(config: RunConfig) -> dict[str, Any]:
    """The fields given under `megatron.optimizer`.

    Raises:
        ValueError: one is unknown, or owned by the schema.
    """
    return passthrough(config.megatron.optimizer, CoreOptimizerConfig, "optimizer")


def peak_and_final_lr(config: RunConfig) -> tuple[float, float]:
    """Learning rate after the warm-up and at the end."""
    optimizer = config.optimizer
    final = optimizer.lr * 1e-6 if optimizer.min_lr is None else optimizer.min_lr
    return optimizer.lr, final


def build_optimizer(
    config: RunConfig,
    ddp_model: Any,
    dtype: torch.dtype,
    overlap_param_gather: bool,
    learning_rates: Sequence[tuple[str, float]] = (),
) -> Any:
    """AdamW over the DDP-wrapped model; per-channel parameters and rho are not decayed.

    learning_rates: (pattern of parameter names, peak rate), the first that fits counts; the final
        rate is as much lower as that of the others.

    Raises:
        ValueError: `megatron.optimizer` names an unknown field, or one that the schema owns.
    """
    optimizer = config.optimizer
    peak, final = peak_and_final_lr(config)
    values: dict[str, Any] = {
        "optimizer": "adam",
        "lr": peak,
        "min_lr": final,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.betas[0],
        "adam_beta2": optimizer.betas[1],
        "adam_eps": optimizer.eps,
        "clip_grad": optimizer.clip_grad,
        "bf16": dtype == torch.bfloat16,
        "params_dtype": dtype,
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
        "overlap_param_gather": overlap_param_gather,
    }
    values.update(check_optimizer_fields(config))
    known = {f.name for f in fields(CoreOptimizerConfig)}
    assert known >= set(values), "megatron-core renamed an optimizer setting"
    # Matrices are decayed; what acts a channel or a head (norms, decay rates, conv taps, rho)
    # is not.
    undecayed = ParamKey(predicate=ParamPredicate(name="per_channel", fn=_is_per_channel))
    # A group of their own for what stays in fp32: megatron-core 0.19.2's distributed optimizer
    # reorders a group that mixes dtypes and then saves it under the wrong order. The values repeat
    # the defaults.
    decay = optimizer.weight_decay
    own_dtype = ParamPredicate(name="other_dtype", fn=lambda p: p.dtype != dtype)
    made = get_megatron_optimizer(
        CoreOptimizerConfig(**values),
        [ddp_model],
        config_overrides={
            undecayed: ParamGroupOverride(wd_mult=0.0),
            ParamKey(predicate=own_dtype): ParamGroupOverride(start_wd=decay, end_wd=decay),
            **_rates(learning_rates, final / peak if peak else 0.0),
        },
    )
    fuse(made)
    multi_tensor.install()
    return made


def _rates(
    rules: Sequence[tuple[str, float]], final_share: float
) -> dict[ParamKey, ParamGroupOverride]:
    """A parameter belongs to the first pattern that fits its name."""
    patterns = [pattern for pattern, _ in rules]

    def first_to_fit(name: str) -> str | None:
        own = name.removeprefix("module.")
        return next((pattern for pattern in patterns if fnmatchcase(own, pattern)), None)

    return {
        ParamKey(
            with_name_predicate=ParamWithNamePredicate(
                name=f"rate of {pattern}",
                fn=lambda parameter, name, pattern=pattern: first_to_fit(name) == pattern,
            )
        ): ParamGroupOverride(max_lr=rate, min_lr=rate * final_share)
        for pattern, rate in rules
    }


def _is_per_channel(parameter: torch.nn.Parameter) -> bool:
    return parameter.dim() == 1 or hasattr(parameter, "lt2_per_channel")


def build_scheduler(config: RunConfig, optimizer: Any) -> OptimizerParamScheduler:
    """Linear warm-up, then the chosen shape; counted in steps."""
    settings, steps = config.optimizer, config.training.steps
    peak, final = peak_and_final_lr(config)
    shape = settings.schedule
    return OptimizerParamScheduler(
        optimizer,
        # Not 0: the first step would change nothing.
        init_lr=peak / max(1, settings.warmup_steps),
        max_lr=peak,
        min_lr=final,
        lr_warmup_steps=settings.warmup_steps,
        lr_decay_steps=steps,
        lr_decay_style="WSD" if shape == "wsd" else shape,
        start_wd=settings.weight_decay,
        end_wd=settings.weight_decay,
        wd_incr_steps=steps,
        wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
        wsd_decay_steps=settings.decay_steps or max(1, steps // 10),
        lr_wsd_decay_style=settings.decay_shape,
    )
