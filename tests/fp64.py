"""Tiny models of the training side in fp64: loss and every gradient, to compare layouts of ranks.

Rounding in fp32 hides small mistakes and is taken for mistakes where gradients cancel, so weights,
gradient buffers and messages between stages are cast.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_lt2.config.schema import RunConfig
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count

Result = tuple[float, dict[str, np.ndarray]]
"""Mean loss of a token, and gradients by the names of the whole model."""


def token_losses(model: Any, labels: Tensor, logits: Tensor) -> Tensor:
    """Cross entropy of every token [b, s] from this rank's part of the vocabulary [s, b, rows]."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits, group=model.pg_collection.tp)
    chosen = whole.gather(-1, labels.t().unsqueeze(-1)).squeeze(-1)
    return (whole.logsumexp(-1) - chosen).t()


def build_in_fp64(config: RunConfig) -> Any:
    """The training parts, with all parameters random."""
    from megatron_lt2.model import init

    fill = init.initialise

    def fill_in_fp64(model: Any, *args: Any) -> None:
        fill(model, *args)
        model.double()  # before DDP lays out its buffers

    init.initialise = fill_in_fp64
    try:
        parts = build(config, restart=True)
    finally:
        init.initialise = fill
    if parts.pipeline is not None:
        parts.pipeline.config.pipeline_dtype = torch.float64
    return parts


def loss_and_gradients(config: RunConfig) -> Result:
    """Of one global batch on this layout; needs the plain optimizer and fp64 gradient buffers."""
    from megatron_lt2.training import steps

    parts = build_in_fp64(config)
    parts.ddp.zero_grad_buffer()
    feed, count = feed_of(config, range(1)), micro_batch_count(config)
    sums = steps._run_schedule(config, parts, feed, count, forward_only=False)
    loss = steps.mean_over_ranks(sums[0], sums[-1])
    return loss, global_tensors(parts, config, lambda p: p.main_grad, keep_dtype=True)


def weights_after(config: RunConfig, steps: int) -> dict[str, np.ndarray]:
    """All weights after optimizer steps.

    Without clipping, for which megatron-core wants fp32 gradients; Adam's epsilon is large, since
    with the usual one the first steps are signs of gradients.
    """
    from megatron_lt2.training.steps import train_step

    config.optimizer.clip_grad, config.optimizer.eps = 0.0, 0.1
    parts = build_in_fp64(config)
    feed, count = feed_of(config, range(steps)), micro_batch_count(config)
    for _ in range(steps):
        train_step(config, parts, feed, count)
    return global_tensors(parts, config, lambda p: p, keep_dtype=True)


def worst_error(got: Result, expected: Result) -> tuple[float, float, str]:
    """Relative error of the loss; the largest of a gradient (of its maximum), and whose it is."""
    loss, gradients = got
    assert gradients.keys() == expected[1].keys()
    errors = {
        name: float(np.abs(gradients[name] - value).max() / np.abs(value).max())
        for name, value in expected[1].items()
    }
    worst = max(errors, key=lambda name: errors[name])
    return abs(loss / expected[0] - 1), errors[worst], worst
