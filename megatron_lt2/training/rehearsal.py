"""One process goes through a rank's steps, to learn or to time which kernels they launch.

The model has each kind of layer of the run once, at the run's width, on rank 0 of the run's tensor-
and context-parallel layout; the other ranks are pretended, and their collective calls do nothing.
Kernels do not know how many layers there are, nor how many replicas. Values mean nothing here.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ParallelConfig, RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES
from megatron_lt2.model.pattern import expand_pattern, loop_windows
from megatron_lt2.parallel import platform
from megatron_lt2.parallel.start import build_groups, start_ranks, stop_ranks
from megatron_lt2.selftest import check_kernels
from megatron_lt2.training.setup import TrainingParts, build_parts
from megatron_lt2.training.steps import DataFeed, evaluate_batch, train_step

EOD = 0
DOCUMENTS = (1, 3, 16)
"""Documents a sequence: compilers treat an argument of 1, or a multiple of 16, apart."""

_replaced: dict[str, Any] = {}
"""What `start` put aside of torch.distributed."""


def one_of_each(config: RunConfig) -> RunConfig:
    """The run with each kind of layer once, without a pipeline; a smaller batch of one rank."""
    small = copy.deepcopy(config)
    model, training = small.model, small.training
    by_loop = loop_windows(
        model.pattern, model.num_layers, model.loops, model.window.size, MIXER_NAMES
    )
    if by_loop is None:
        names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
        model.pattern = list(dict.fromkeys(names))
        model.num_layers = len(model.pattern)
    model.dsa.dense_steps = 0  # the kernels are those of the second stage
    small.parallel.pipeline, small.parallel.pipeline_layers = 1, None
    training.global_batch_size = training.micro_batch_size
    small.data.path = "none"
    return small


def only(config: RunConfig, mixer: str, vocab_size: int) -> RunConfig:
    """The run's width and heads with one layer of `mixer`, one loop, and a small vocabulary."""
    small = copy.deepcopy(config)
    small.model.pattern, small.model.num_layers, small.model.loops = [mixer], 1, 1
    small.model.vocab_size, small.model.loss, small.model.exit_gate = vocab_size, "final", False
    small.parallel = ParallelConfig()
    small.training.micro_batch_size = small.training.global_batch_size = 1
    small.data.path = "none"
    return small


def start(parallel: ParallelConfig) -> None:
    """Be rank 0 of a tensor- and context-parallel layout whose other ranks do not exist.

    Call it in a process of its own: process groups of torch's "fake" backend answer at once.
    """
    world = parallel.tensor * parallel.context
    if world == 1:
        start_ranks(parallel, 1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if platform.has_gpu():
        torch.cuda.set_device(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    new_group = dist.new_group

    def fake_group(*args: Any, **options: Any) -> Any:
        return new_group(*args, **{**options, "backend": "fake"})

    # The fake backend cannot exchange unequal parts: nothing at all does.
    replace = {"new_group": fake_group, "all_to_all_single": lambda *args, **options: None}
    for name, function in replace.items():
        _replaced.setdefault(name, getattr(dist, name))
        setattr(dist, name, function)
    build_groups(parallel, 1)


def stop() -> None:
    """Undo `start`."""
    stop_ranks()
    for name, function in _replaced.items():
        setattr(dist, name, function)
    _replaced.clear()


def build(config: RunConfig) -> TrainingParts:
    """Model, gradient buffers and optimizer of `config`.

    Raises:
        ConfigError: the settings do not go together.
    """
    return build_parts(config)


def steps(
    config: RunConfig,
    parts: TrainingParts,
    *,
    lengths: Sequence[int] = (),
    documents: Sequence[int] = DOCUMENTS,
    before: Callable[[int], bool] = lambda length: True,
) -> None:
    """A training step of two micro-batches and an evaluation for each length and packing.

    Args:
        config, parts: as built; a model takes sequences up to data.sequence_length.
        lengths: of the sequences; default: data.sequence_length.
        documents: how many lie in a sequence, one number an own step.
        before: is asked with each length whether to go on.
    """
    for length in lengths or (config.data.sequence_length,):
        if not before(length):
            return
        now = copy.deepcopy(config)
        now.data.sequence_length = length
        for count in documents if config.data.isolate_documents else documents[:1]:
            feed = DataFeed(batches(now, count), now, eod=EOD)
            parts.ddp.train()
            train_step(now, parts, feed, 2)
        parts.ddp.eval()
        evaluate_batch(now, parts, feed, 1)


def selftest(config: RunConfig, parts: TrainingParts) -> None:
    """The comparison that a run begins with; that it finds garbage is expected here."""
    if config.precision.selftest and parts.kernels == "fla":
        try:
            check_kernels(config, parts.dtype, platform.device())
        except ConfigError:
            return


def free() -> None:
    """Give memory of models that are no longer referred to back to the GPU."""
    gc.collect()
    if platform.has_gpu():
        torch.cuda.empty_cache()


def batches(config: RunConfig, documents: int) -> Iterator[dict[str, Tensor]]:
    """Endless micro-batches of random tokens with `documents` of odd lengths a sequence."""
    shape = (config.training.micro_batch_size, config.data.sequence_length)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, max(2, config.model.vocab_size or 2), shape, generator=generator)
    for at in range(1, documents):
        tokens[:, at * shape[1] // documents + at % 2 - 1] = EOD
    labels, mask = tokens.roll(-1, 1), torch.ones(shape)
    while True:
        yield {"tokens": tokens.clone(), "labels": labels.clone(), "loss_mask": mask.clone()}
