"""One training step and one evaluation, on megatron-core's schedules."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.batch import Batch, make_batch
from megatron_lt2.parallel import platform
from megatron_lt2.training.indexers import prepare_step
from megatron_lt2.training.setup import TrainingParts


@dataclass
class StepResult:
    """What one optimizer step did. loss_sum, tokens and exit_sums are this rank's share, 0 but on
    the last pipeline stage.

    exit_sums: sums over tokens of what the loss is made of, by `LT2Model.part_names`; of the loss
        "exits" each loop's cross entropy, then each loop's exit probability [2 T].
    """

    loss_sum: Tensor
    tokens: Tensor
    grad_norm: float
    applied: bool
    exit_sums: Tensor = field(default_factory=lambda: torch.zeros(0))


class DataFeed:
    """This rank's part of micro-batches, on the device, with the time that the trainer waited.

    Context-parallel ranks read the same sequences, and each keeps its own stretch of them.
    """

    def __init__(self, source: Iterator[dict[str, Tensor]], config: RunConfig, eod: int) -> None:
        self._source, self._config, self._eod = source, config, eod
        self.waited_s = 0.0

    @property
    def source(self) -> Iterator[dict[str, Tensor]]:
        """The micro-batches on the host."""
        return self._source

    def __iter__(self) -> "DataFeed":
        return self

    def close(self) -> None:
        """Let go of the loader, which ends its workers: they ignore SIGTERM."""
        self._source = iter(())

    def __next__(self) -> Batch:
        started = time.perf_counter()
        raw = next(self._source)
        self.waited_s += time.perf_counter() - started
        size = self._config.parallel.context
        batch = make_batch(
            raw["tokens"].long(),
            raw["labels"].long(),
            raw["loss_mask"].float(),
            eod=self._eod,
            isolate_documents=self._config.data.isolate_documents,
            rank=parallel_state.get_context_parallel_rank() if size > 1 else 0,
            size=size,
        )
        return batch.to(platform.device())


def forward_step(feed: DataFeed, model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """megatron-core's forward step: losses of a micro-batch, and how to reduce them."""
    batch = next(feed)
    losses = model(
        batch.tokens,
        batch.positions,
        labels=batch.labels,
        packed_seq_params=batch.packing,
        parts=True,
    )

    def reduce(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        sums = (losses.float() * batch.loss_mask).sum((-2, -1))
        tokens = batch.loss_mask.sum().to(torch.int)
        # The schedule scales the returned loss in place and frees it, so it is a copy.
        return sums[0].clone(), tokens, {"sums": torch.cat([sums.detach(), tokens.float()[None]])}

    return losses, reduce


def train_step(
    config: RunConfig,
    parts: TrainingParts,
    feed: Any,
    count: int,
    accepts: Callable[[Tensor], bool] | None = None,
) -> StepResult:
    """`count` micro-batches forward and backward, one optimizer step, one schedule step.

    Args:
        config: of the run.
        parts: what is trained.
        feed: yields this rank's micro-batches.
        count: micro-batches.
        accepts: is given `_run_schedule`'s sums; where it says no, the optimizer step is left out.
    """
    step = int(parts.scheduler.num_steps)
    prepare_step(config, parts.model, step)
    parts.model.begin_step(step)
    sums = run_backward(config, parts, feed, count)
    parts.lr = float(parts.optimizer.param_groups[0]["lr"])
    applied, grad_norm = False, 0.0
    if accepts is None or accepts(sums):
        applied, grad_norm, _ = parts.optimizer.step()
    parts.scheduler.step(1)
    return StepResult(sums[0], sums[-1], float(grad_norm or 0.0), bool(applied), sums[1:-1])


def run_backward(config: RunConfig, parts: TrainingParts, feed: Any, count: int) -> Tensor:
    """Fresh gradients of `count` micro-batches, reduced over the ranks; `_run_schedule`'s sums."""
    parts.ddp.zero_grad_buffer()
    parts.optimizer.zero_grad()
    return _run_schedule(config, parts, feed, count, forward_only=False)


@torch.no_grad()
def evaluate_batch(config: RunConfig, parts: TrainingParts, feed: Any, count: int) -> Tensor:
    """`_run_schedule`'s sums over `count` micro-batches, forward only; the caller sets the mode."""
    return _run_schedule(config, parts, feed, count, forward_only=True)


@torch.no_grad()
def evaluate(config: RunConfig, parts: TrainingParts, feed: DataFeed, count: int) -> float:
    """Mean loss a token over `count` micro-batches a rank, over all ranks, in nats."""
    parts.ddp.eval()
    sums = _run_schedule(config, parts, feed, count, forward_only=True)
    parts.ddp.train()
    return mean_over_ranks(sums[0], sums[-1])


def exit_means(
    exit_sums: Tensor | float, tokens: Tensor, names: Sequence[str] | None = None
) -> dict[str, float]:
    """Means of what the loss is made of, over all ranks, by `names`; nothing of a loss without
    parts or of no step. A collective call.

    names: default: those of the loss "exits", each loop's cross entropy and exit probability.
    """
    if not isinstance(exit_sums, Tensor) or not len(exit_sums):
        return {}
    everything = torch.cat([exit_sums.double(), tokens.double()[None]])
    dist.all_reduce(
        everything, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    dist.all_reduce(everything, group=parallel_state.get_pipeline_model_parallel_group())
    means = (everything[:-1] / everything[-1]).tolist()
    if names is None:
        loops = range(1, len(exit_sums) // 2 + 1)
        names = [f"loss_loop_{t}" for t in loops] + [f"exit_share_{t}" for t in loops]
    return dict(zip(names, means, strict=True))


def mean_over_ranks(loss_sum: Tensor, tokens: Tensor) -> float:
    """Sum of losses over sum of tokens, on every rank; a collective call.

    Tensor-parallel ranks have the same sums; of the pipeline stages all but the last have zeros.
    """
    both = torch.stack([loss_sum.double(), tokens.double()])
    dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(both, group=parallel_state.get_pipeline_model_parallel_group())
    return float(both[0] / both[1])


def _run_schedule(
    config: RunConfig, parts: TrainingParts, feed: Any, count: int, *, forward_only: bool
) -> Tensor:
    """Sums over this rank's tokens, zeros but on the last pipeline stage: of the loss, of what it
    is made of (`StepResult.exit_sums`), and their number."""
    rows, length = config.training.micro_batch_size, config.data.sequence_length
    if parts.pipeline is None:
        reports = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=feed,
            model=[parts.ddp],
            num_microbatches=count,
            seq_length=length,
            micro_batch_size=rows,
            forward_only=forward_only,
        )
    else:
        packed = config.data.isolate_documents
        reports = parts.pipeline.run(
            forward_step,
            feed,
            count=count,
            rows=1 if packed else rows,
            length=rows * length if packed else length,
            forward_only=forward_only,
        )
    if not reports:
        numbers = 2 + (2 * config.model.loops if config.model.loss == "exits" else 0)
        return torch.zeros(numbers, dtype=torch.double, device=platform.device())
    return torch.stack([report["sums"] for report in reports]).double().sum(0)
