"""Building what a step needs: model, gradient buffers, optimizer, schedule."""

from collections.abc import Callable
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
from megatron_lt2.parallel.loop_pipeline import LoopPipeline, build_loop_pipeline
from megatron_lt2.parallel.weight_gradient import expect_no_gradient
from megatron_lt2.training.fp8_device import check_fp8_device
from megatron_lt2.training.schedule import (
    build_optimizer,
    build_scheduler,
    check_optimizer_fields,
)


@dataclass
class TrainingParts:
    """The objects of a run that hold state.

    model: LT2Model, on a pipeline the layers of this stage.
    pipeline: how the schedule reaches it on a pipeline, else None.
    """

    model: Any
    ddp: Any
    optimizer: Any
    scheduler: Any
    dtype: torch.dtype
    kernels: str
    pipeline: LoopPipeline | None = None
    lr: float = 0.0
    """Learning rate of the step made last."""

    @torch.no_grad()
    def gather_parameters(self) -> None:
        """Make the parameters whole after a step; a collective call of the data-parallel ranks.

        With overlap, megatron-core gathers what the ranks updated only when a layer is used again.
        """
        if self.ddp.ddp_config.overlap_param_gather:
            self.ddp.start_param_sync(force_sync=True)


@dataclass(frozen=True)
class Variation:
    """What a run trains beside a plain LT2Model.

    model_class: called as LT2Model; None: LT2Model.
    prepare: given the model with its initial weights, before DDP lays out gradient buffers: what
        does not require a gradient then is left alone.
    learning_rates: (pattern of parameter names, peak rate), the first that fits counts; the others
        have `optimizer.lr`.
    """

    model_class: Any = None
    prepare: Callable[[Any], None] = lambda model: None
    learning_rates: tuple[tuple[str, float], ...] = ()


def build_parts(config: RunConfig, variation: Variation = Variation()) -> TrainingParts:  # noqa: B008
    """Model with initial weights, DDP, optimizer and schedule, on this rank's device.

    Raises:
        ConfigError: a megatron-core setting is unknown or contradicts the schema, or the kernels
            asked for cannot run here; says what to change or install.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    from megatron_lt2.model.init import initialise
    from megatron_lt2.model.lt2_model import LT2Model

    on_gpu = platform.has_gpu()
    parallel = config.parallel
    dtype = resolve_dtype(config, on_gpu)
    if dtype == torch.bfloat16 and not parallel.distributed_optimizer:
        raise ConfigError(
            "parallel.distributed_optimizer false cannot save the fp32 parameters of a bf16 model; "
            "set it to true, which also works on one rank"
        )
    try:
        kernels = resolve_backend(config.precision.kernels, platform.device().type)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    check_fp8_device(config.precision.fp8)
    try:
        core = transformer_config(config, on_gpu)
        ddp_fields = passthrough(config.megatron.ddp, DistributedDataParallelConfig, "ddp")
        check_optimizer_fields(config)
        model: Any = (variation.model_class or LT2Model)(
            core,
            config.model,
            padded_vocab_size=padded_vocab_size(config),
            max_sequence_length=config.data.sequence_length,
            kernels=kernels,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
            stage_layers=parallel.stage_layers(config.model.num_layers),
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(" ".join(str(error).split())) from error
    if on_gpu:
        model.cuda()
    initialise(model, config.model, config.training.seed)
    variation.prepare(model)

    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    overlap = parallel.overlap_grad_reduce
    overlap = on_gpu and replicas > 1 if overlap is None else overlap
    gather = parallel.overlap_param_gather
    gather = overlap if gather is None else gather
    gather = gather and parallel.distributed_optimizer
    ddp_values: dict[str, Any] = {
        "grad_reduce_in_fp32": True,
        "use_distributed_optimizer": parallel.distributed_optimizer,
        "overlap_grad_reduce": overlap,
        "overlap_param_gather": gather,
    }
    ddp_values.update(ddp_fields)
    ddp = DistributedDataParallel(core, DistributedDataParallelConfig(**ddp_values), model)
    if not ddp.ddp_config.overlap_grad_reduce:
        expect_no_gradient(model.parameters())
    optimizer = build_optimizer(config, ddp, dtype, gather, variation.learning_rates)
    pipeline, schedule = None, core
    if parallel.pipeline > 1:
        pipeline = build_loop_pipeline(model, core, config.model.loops, model.decoder.carries)
        schedule = pipeline.config
    schedule.finalize_model_grads_func = _finalizing(ddp)
    schedule.grad_scale_func = optimizer.scale_loss
    schedule.no_sync_func = ddp.no_sync if overlap else None
    # On a pipeline, DDP's own hooks start both, when a weight is ready or needed: the schedule
    # would start them once a loop.
    if overlap and pipeline is None:
        schedule.grad_sync_func = ddp.start_grad_sync
    if gather and pipeline is None:
        schedule.param_sync_func = ddp.start_param_sync
    if gather:
        _wait_before_mixers(ddp, model)
    ddp.broadcast_params()
    return TrainingParts(
        model=model,
        ddp=ddp,
        optimizer=optimizer,
        scheduler=build_scheduler(config, optimizer),
        dtype=dtype,
        kernels=kernels,
        pipeline=pipeline,
    )


def _wait_before_mixers(ddp: Any, model: Any) -> None:
    """Have every parameter of a mixer gathered before the mixer runs.

    DDP waits for a module's parameters when the module is called, but mixers read weights of
    modules that they do not call (fused projections, convolutions): those could be of the last
    step.
    """
    wait = ddp._make_forward_pre_hook()

    def before(mixer: torch.nn.Module, *unused: Any) -> None:
        for module in mixer.modules():
            wait(module)

    for layer in model.decoder.layers:
        layer.self_attention.register_forward_pre_hook(before)


def _finalizing(ddp: Any) -> Callable[..., None]:
    """megatron-core's last work on the gradients, on `ddp` whatever chunks the schedule has."""
    from megatron.core.distributed import finalize_model_grads

    def finalize(chunks: list[Any], *args: Any, **options: Any) -> None:
        finalize_model_grads([ddp], *args, **options)

    return finalize
