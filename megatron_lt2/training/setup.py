"""Building what a step needs: model, gradient buffers, optimizer, schedule."""

from dataclasses import dataclass
from typing import Any

import torch

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.kernels.backend import resolve_backend
from megatron_lt2.model.core_config import (
    padded_vocab_size,
    passthrough,
    resolve_dtype,
    transformer_config,
)
from megatron_lt2.parallel import platform
from megatron_lt2.training.schedule import (
    build_optimizer,
    build_scheduler,
    check_optimizer_fields,
)

DDP_OWNED = {
    "use_distributed_optimizer": "parallel.distributed_optimizer",
    "overlap_grad_reduce": "parallel.overlap_grad_reduce",
    "overlap_param_gather": "parallel.overlap_param_gather",
}


@dataclass
class TrainingParts:
    """The objects of a run that hold state."""

    model: Any
    ddp: Any
    optimizer: Any
    scheduler: Any
    dtype: torch.dtype
    kernels: str
    lr: float = 0.0
    """Learning rate of the step made last."""


def build_parts(config: RunConfig) -> TrainingParts:
    """Model with initial weights, DDP, optimizer and schedule, on this rank's device.

    Raises:
        ConfigError: a megatron-core setting is unknown or contradicts the schema, or the kernels
            asked for cannot run here; says what to change or install.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )

    from megatron_lt2.model.init import initialise
    from megatron_lt2.model.lt2_model import LT2Model

    on_gpu = platform.has_gpu()
    dtype = resolve_dtype(config, on_gpu)
    if dtype == torch.bfloat16 and not config.parallel.distributed_optimizer:
        raise ConfigError(
            "parallel.distributed_optimizer false cannot save the fp32 parameters of a bf16 model; "
            "set it to true, which also works on one rank"
        )
    try:
        kernels = resolve_backend(config.precision.kernels, platform.device().type)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    try:
        core = transformer_config(config, on_gpu)
        ddp_fields = passthrough(
            config.megatron.ddp, DistributedDataParallelConfig, "ddp", DDP_OWNED
        )
        check_optimizer_fields(config)
        model: Any = LT2Model(
            core,
            config.model,
            padded_vocab_size=padded_vocab_size(config),
            max_sequence_length=config.data.sequence_length,
            kernels=kernels,
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if on_gpu:
        model.cuda()
    initialise(model, config.model, config.training.seed)

    replicas = parallel_state.get_data_parallel_world_size()
    overlap = config.parallel.overlap_grad_reduce
    overlap = on_gpu and replicas > 1 if overlap is None else overlap
    gather = config.parallel.overlap_param_gather
    gather = overlap if gather is None else gather
    gather = gather and config.parallel.distributed_optimizer
    ddp_values: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": config.parallel.distributed_optimizer,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": gather,
    }
    ddp_values.update(ddp_fields)
    ddp = DistributedDataParallel(core, DistributedDataParallelConfig(**ddp_values), model)
    optimizer = build_optimizer(config, ddp, dtype, gather)
    core.finalize_model_grads_func = finalize_model_grads
    core.grad_scale_func = optimizer.scale_loss
    core.no_sync_func = ddp.no_sync if overlap else None
    if overlap:
        core.grad_sync_func = ddp.start_grad_sync
    if gather:
        core.param_sync_func = ddp.start_param_sync
    ddp.broadcast_params()
    return TrainingParts(
        model=model,
        ddp=ddp,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        dtype=dtype,
        kernels=kernels,
    )
