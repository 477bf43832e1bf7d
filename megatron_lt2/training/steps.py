"""One training step and one evaluation, on megatron-core's schedules."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.batch import Batch, make_batch
from megatron_lt2.parallel import platform
from megatron_lt2.training.setup import TrainingParts


@dataclass
class StepResult:
    """What one optimizer step did. loss_sum and tokens are this rank's share, 0 but on the last
    pipeline stage."""

    loss_sum: Tensor
    tokens: Tensor
    grad_norm: float
    applied: bool


class DataFeed:
    """This rank's part of micro-batches, on the device, with the time that the trainer waited.

    Context-parallel ranks read the same sequences, and each keeps its own stretch of them.
    """

    def __init__(self, source: Iterator[dict[str, Tensor]], config: RunConfig, eod: int) -> None:
        self._source, self._config, self._eod = source, config, eod
        self.waited_s = 0.0

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
        batch.tokens, batch.positions, labels=batch.labels, packed_seq_params=batch.packing
    )

    def reduce(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = (losses.float() * batch.loss_mask).sum()
        tokens = batch.loss_mask.sum().to(torch.int)
        # The schedule scales the returned loss in place, so what is reported is a copy.
        return total, tokens, {"loss": torch.stack([total.detach().clone(), tokens.float()])}

    return losses, reduce


def train_step(config: RunConfig, parts: TrainingParts, feed: DataFeed, count: int) -> StepResult:
    """`count` micro-batches forward and backward, one optimizer step, one schedule step."""
    parts.ddp.zero_grad_buffer()
    parts.optimizer.zero_grad()
    loss_sum, tokens = _run_schedule(config, parts, feed, count, forward_only=False)
    parts.lr = float(parts.optimizer.param_groups[0]["lr"])
    applied, grad_norm, _ = parts.optimizer.step()
    parts.scheduler.step(1)
    return StepResult(loss_sum, tokens, float(grad_norm or 0.0), bool(applied))


@torch.no_grad()
def evaluate(config: RunConfig, parts: TrainingParts, feed: DataFeed, count: int) -> float:
    """Mean loss a token over `count` micro-batches a rank, over all ranks, in nats."""
    parts.ddp.eval()
    loss_sum, tokens = _run_schedule(config, parts, feed, count, forward_only=True)
    parts.ddp.train()
    return mean_over_ranks(loss_sum, tokens)


def mean_over_ranks(loss_sum: Tensor, tokens: Tensor) -> float:
    """Sum of losses over sum of tokens, on every rank; a collective call.

    Tensor-parallel ranks have the same sums; of the pipeline stages all but the last have zeros.
    """
    both = torch.stack([loss_sum.double(), tokens.double()])
    dist.all_reduce(both, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(both, group=parallel_state.get_pipeline_model_parallel_group())
    return float(both[0] / both[1])


def _run_schedule(
    config: RunConfig, parts: TrainingParts, feed: DataFeed, count: int, *, forward_only: bool
) -> tuple[Tensor, Tensor]:
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
        nothing = torch.zeros((), dtype=torch.double, device=platform.device())
        return nothing, nothing
    stacked = torch.stack([report["loss"] for report in reports]).double().sum(0)
    return stacked[0], stacked[1]
