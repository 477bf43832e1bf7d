"""A sign of life, and an end to runs that give none.

Rank 0 writes RUN/heartbeat.json, at most one a few seconds: time, phase, step, job. Every rank
watches itself: a thread sees whether the rank still comes past `beat`. Ranks wait for each other in
collective calls, so when one hangs all do, and all print the stacks of all their threads, the one
that hangs first among them, and leave with EXIT_HUNG. SIGUSR2 prints the stacks at any time,
without ending anything, even while a library holds the interpreter.
"""

import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lt2.training.signals import EXIT_HUNG

WRITE_EVERY_S = 10.0
START_FACTOR = 4
"""Building the index of the data and compiling kernels may take this much longer than a step."""
LAST_WORDS_S = 5.0
"""Between a rank's stacks and its end, so that no rank dies before the others have printed."""


def dump_stacks_on_signal() -> None:
    """SIGUSR2 writes the stacks of all threads to stderr."""
    with suppress(ValueError, OSError):  # stderr is closed
        faulthandler.register(signal.SIGUSR2, file=2, all_threads=True)


class Heartbeat:
    """One rank's sign of life.

    Args:
        run_dir: folder of the run.
        rank: of this process.
        hang_minutes: without a beat for so long the process ends; None: never.
    """

    def __init__(self, run_dir: str | Path, rank: int, hang_minutes: float | None) -> None:
        self.path, self.rank = Path(run_dir) / "heartbeat.json", rank
        self.limit_s = hang_minutes * 60 if hang_minutes else None
        self.phase, self.step, self.started = "start", 0, False
        self._last = time.monotonic()
        self._written = float("-inf")
        self._closed = threading.Event()
        if self.limit_s is not None:
            threading.Thread(target=self._watch, name="hang watchdog", daemon=True).start()

    def beat(self, phase: str, step: int, **facts: Any) -> None:
        """This rank lives and is about to do `phase` at `step`.

        Args:
            phase: "start", "train", "evaluate", "save", "stop" or "finished".
            step: optimizer steps done.
            facts: written along by rank 0.
        """
        self._last = time.monotonic()
        # The first step, which may compile kernels, is over at the second "train".
        self.started = self.started or phase == self.phase == "train"
        changed, self.phase, self.step = phase != self.phase, phase, step
        if self.rank == 0 and (changed or self._last - self._written >= WRITE_EVERY_S):
            self._written = self._last
            self._write(facts)

    def close(self) -> None:
        """No more watching."""
        self._closed.set()

    def _write(self, facts: dict[str, Any]) -> None:
        value = {
            "time": round(time.time(), 3),
            "phase": self.phase,
            "step": self.step,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "restart": int(os.environ.get("SLURM_RESTART_COUNT") or 0),
            **facts,
        }
        temporary = self.path.with_suffix(".tmp")
        with suppress(OSError):  # a full disk must not end a run
            temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
            os.replace(temporary, self.path)

    def _watch(self) -> None:
        assert self.limit_s is not None
        while not self._closed.wait(min(10.0, self.limit_s / 10)):
            limit = self.limit_s if self.started else self.limit_s * START_FACTOR
            silent = time.monotonic() - self._last
            if silent > limit:
                self._end(silent)

    def _end(self, silent_s: float) -> None:
        print(
            f"rank {self.rank} hangs: {silent_s:.0f} s without progress in phase '{self.phase}' "
            f"after step {self.step} (training.hang_minutes); its stacks:",
            file=sys.stderr,
            flush=True,
        )
        with suppress(ValueError, OSError):
            faulthandler.dump_traceback(file=2, all_threads=True)
        sys.stdout.flush()
        time.sleep(LAST_WORDS_S)
        os._exit(EXIT_HUNG)
