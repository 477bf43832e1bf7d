"""DSA's indexers in training: which stage they are in, when they are sampled, what they report."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.mixers.dsa_layer import DSAMixer
from megatron_lt2.mixers.indexer import IndexerReport
from megatron_lt2.parallel import platform


def indexed_layers(model: Any) -> Iterator[DSAMixer]:
    """The `dsa` layers of this rank's model."""
    for module in model.modules():
        if isinstance(module, DSAMixer):
            yield module


def prepare_step(config: RunConfig, model: Any, step: int) -> None:
    """Set the stage of the step that follows `step` done ones, and whether it is sampled.

    The last step before a report is. An evaluation stays in the stage of the step before it.
    """
    sampling = (step + 1) % config.logging.interval == 0
    for layer in indexed_layers(model):
        layer.dense = step < layer.settings.dense_steps
        layer.sampling = sampling


def indexer_means(config: RunConfig, model: Any) -> dict[str, float]:
    """What the indexers did since the last call, over all layers and ranks, by the name of the
    metric; nothing of a model without them. A collective call.

    indexer_loss: KL divergence from attention to the indexer, nats a query, layer and loop.
    selected_mass_loop_t: share of dense attention's mass that the selected keys hold.
    selected_overlap_loop_t: share of a query's keys that loop t - 1 selected too.
    """
    loops = config.model.loops
    sums = torch.zeros(2 + 4 * loops, dtype=torch.double, device=platform.device())
    for layer in indexed_layers(model):
        report = layer.report
        sums[0] += report.loss
        sums[1] += report.queries
        for start, found in ((2, report.held), (2 + 2 * loops, report.shared)):
            for loop, (total, count) in found.items():
                sums[start + 2 * loop] += total
                sums[start + 2 * loop + 1] += count
        layer.report = IndexerReport()
    if "dsa" not in str(config.model.pattern):  # on every rank alike
        return {}
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.all_reduce(sums, group=parallel_state.get_pipeline_model_parallel_group())
    names = ["indexer_loss"]
    names += [f"selected_mass_loop_{t + 1}" for t in range(loops)]
    names += [f"selected_overlap_loop_{t + 1}" for t in range(loops)]
    pairs = sums.view(-1, 2).tolist()
    return {name: x / n for name, (x, n) in zip(names, pairs, strict=True) if n}
