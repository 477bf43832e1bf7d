"""Leaving early in good order: signals and time limits end in a saved checkpoint and a code."""

import signal
import time
from types import FrameType

import torch
import torch.distributed as dist

from megatron_lt2.parallel import platform

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_SAVED = 75
"""The run is not finished but saved; the same command continues it (sysexits' TEMPFAIL)."""


class ExitRequest:
    """Collects SIGUSR1, SIGTERM and the time limit; `agreed` makes all ranks stop at the same step.

    The handler only sets a flag. A second SIGTERM has its usual effect, so that a stuck run
    can be ended.
    """

    def __init__(self, after_minutes: float | None = None) -> None:
        self._name: str | None = None
        self._deadline = time.monotonic() + after_minutes * 60 if after_minutes else None
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._name = signal.Signals(number).name
        if number == signal.SIGTERM:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def agreed(self) -> bool:
        """Whether any rank was asked to stop; a collective call."""
        late = self._deadline is not None and time.monotonic() > self._deadline
        if late and self._name is None:
            self._name = "training.exit_after_minutes"
        flag = torch.tensor([int(self._name is not None)], device=platform.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    @property
    def reason(self) -> str:
        """What asked this rank to stop."""
        return self._name or "another rank"
