"""Steps that must not reach the weights: a loss or a gradient that is NaN or infinite, loss spikes.

Such a step is skipped: data, schedule and step count go on, weights and Adam's moments stay. All
ranks decide together, from one reduced number a step and one read of the gradient buffer. On the
first bad step of a row the step is run again under hooks, which find the rank and the layer where
the first value that is no number came up (`fault_finder.py`).
"""

import math
import statistics
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lt2.config.schema import TrainingConfig
from megatron_lt2.parallel import platform
from megatron_lt2.training.setup import TrainingParts
from megatron_lt2.training.steps import mean_over_ranks

SPIKE_WINDOW = 64
"""Losses whose median a spike is measured by."""
SPIKE_MINIMUM = 16
"""No step is called a spike before so many."""


class DivergedError(RuntimeError):
    """Too many bad steps in a row; on every rank at once."""


class StepGuard:
    """Decides on each step whether the optimizer may use it.

    Args:
        settings: max_bad_steps and spike_factor.
        parts: whose gradients are looked at.
    """

    def __init__(self, settings: TrainingConfig, parts: TrainingParts) -> None:
        self.settings, self.parts = settings, parts
        self.in_a_row = 0
        self.total = 0
        self.why = ""
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)

    def accepts(self, sums: Tensor) -> bool:
        """Whether the step with these sums may be applied; a collective call.

        Args:
            sums: this rank's loss first and its number of tokens last, after the backward pass.
        """
        self.why = self._problem(sums)
        self.in_a_row = self.in_a_row + 1 if self.why else 0
        self.total += bool(self.why)
        return not self.why

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, so that a resumed run decides as the undisturbed one."""
        return {"in_a_row": self.in_a_row, "total": self.total, "losses": list(self._losses)}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self.in_a_row, self.total = int(state["in_a_row"]), int(state["total"])
        self._losses = deque(state["losses"], maxlen=SPIKE_WINDOW)

    def _problem(self, sums: Tensor) -> str:
        loss_is_bad = not_finite(sums)
        grads_are_bad = torch.zeros_like(loss_is_bad)
        for buffer in (*self.parts.ddp.buffers, *self.parts.ddp.expert_parallel_buffers):
            # One pass without a temporary: a sum is finite only if every term is.
            grads_are_bad = grads_are_bad | not_finite(buffer.grad_data.sum())
        flags = torch.stack([loss_is_bad, grads_are_bad]).to(platform.device(), torch.int32)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        bad_loss, bad_grads = flags.tolist()
        if bad_loss:
            return "the loss is NaN or infinite"
        if bad_grads:
            return "a gradient is NaN or infinite"
        return self._spike(sums) if self.settings.spike_factor is not None else ""

    def _spike(self, sums: Tensor) -> str:
        assert self.settings.spike_factor is not None
        loss = mean_over_ranks(sums[0], sums[-1])
        if len(self._losses) >= SPIKE_MINIMUM:
            usual = statistics.median(self._losses)
            if loss > self.settings.spike_factor * usual and math.isfinite(usual):
                return (
                    f"the loss {loss:.4f} is over {self.settings.spike_factor:g} times the "
                    f"median {usual:.4f} of the last {len(self._losses)} steps"
                )
        self._losses.append(loss)
        return ""


def not_finite(tensor: Tensor) -> Tensor:
    """Whether any element is NaN or infinite, as a scalar that stays on the device."""
    return ~torch.isfinite(tensor).all()
