"""Leaving early in good order: signals and time limits end in a saved checkpoint and a code."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from megatron_lt2.parallel import platform

EXIT_DONE = 0
EXIT_USER_ERROR = 2
EXIT_SAVED = 75
"""The run is not finished but saved; the same command continues it (sysexits' TEMPFAIL)."""
EXIT_NOT_SAVED = 74
"""The run came to an end and its last checkpoint could not be written (sysexits' IOERR)."""
EXIT_DIVERGED = 76
"""Loss or gradients stayed NaN or infinite; another start would do the same."""
EXIT_HUNG = 77
"""A rank made no progress and ended itself; another start may go well."""


class ExitRequest:
    """Collects SIGUSR1, SIGTERM, the time limit and the stop file; `agreed` makes all ranks stop at
    the same step.

    The handler only sets a flag. A second SIGTERM has its usual effect, so that a stuck run
    can be ended. The file is for starters that do not pass signals on (torchrun).

    Args:
        after_minutes: stop by itself after this time.
        stop_file: stop when this file appears; it is removed.
    """

    def __init__(
        self, after_minutes: float | None = None, stop_file: str | Path | None = None
    ) -> None:
        self._name: str | None = None
        self._file = Path(stop_file) if stop_file else None
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
        if self._file is not None and self._file.exists():
            self._name = self._name or f"the file {self._file.name}"
            with suppress(OSError):
                os.unlink(self._file)
        flag = torch.tensor([int(self._name is not None)], device=platform.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())

    def close(self) -> None:
        """Ignore what still comes: the run is saved, and a request that is repeated while Python
        ends, when it puts default handlers back, would turn the exit code into a signal's."""
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)

    @property
    def reason(self) -> str:
        """What asked this rank to stop."""
        return self._name or "another rank"
