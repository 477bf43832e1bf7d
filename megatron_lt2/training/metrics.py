"""What a run reports: one console line an interval, metrics.jsonl (the truth), TensorBoard.

Only rank 0 writes; on the other ranks every call is a no-op.
"""

import json
import math
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO


class RunLog:
    """Console, metrics.jsonl and TensorBoard of one run.

    Args:
        run_dir: folder of the run; created on the writing rank.
        total_steps: for progress and the remaining time.
        tensorboard: also write TensorBoard files.
        active: whether this rank writes.
    """

    def __init__(
        self, run_dir: str | Path, total_steps: int, *, tensorboard: bool, active: bool
    ) -> None:
        self.total_steps, self.active = total_steps, active
        self._file: TextIO | None = None
        self._board: Any = None
        self._bar: Any = None
        self._said_full = False
        self._board_folder: Path | None = None
        if not active:
            return
        folder = Path(run_dir)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "metrics.jsonl"
        _cut_half_line(path)
        self._file = path.open("a", encoding="utf-8")
        self._board_folder = folder / "tensorboard" if tensorboard else None

    def _scalar(self, name: str, value: float, step: int) -> None:
        """A number for TensorBoard, whose file begins with the first one."""
        if self._board is None and self._board_folder is not None:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(self._board_folder))
        if self._board is not None:
            self._board.add_scalar(name, value, step)

    def start_bar(self, step: int) -> None:
        """Show a live bar below the log lines, on a terminal only."""
        if self.active and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(
                total=self.total_steps, initial=step, unit="step", dynamic_ncols=True, leave=False
            )

    def advance(self) -> None:
        """One more step is done."""
        if self._bar is not None:
            self._bar.update(1)

    def say(self, text: str) -> None:
        """One console line."""
        if not self.active:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        else:
            with suppress(OSError):  # a full disk under a job's output
                print(text, flush=True)

    def record(self, kind: str, step: int, **values: Any) -> None:
        """One record in metrics.jsonl, flushed."""
        if self._file is not None:
            facts = {"kind": kind, "step": step, "time": round(time.time(), 3), **values}
            line = {n: None if _is_no_number(v) else v for n, v in facts.items()}
            self._write(json.dumps(line) + "\n")

    def _write(self, text: str) -> None:
        """A full disk ends no run: what could not be written comes with the next record."""
        assert self._file is not None
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            if not self._said_full:
                self.say(f"WARNING: metrics.jsonl cannot be written: {error.strerror}")
            self._said_full = True
        else:
            self._said_full = False

    def event(self, kind: str, text: str, *, step: int, **values: Any) -> None:
        """A console line and a record of the same event."""
        self.say(text)
        self.record(kind, step, message=text, **values)

    def train(self, step: int, values: dict[str, float | None]) -> None:
        """Report a training interval; see `console_line` for the values."""
        self.record("train", step, **values)
        self.say(console_line(step, self.total_steps, values))
        for name, value in values.items():
            if value is not None:
                self._scalar(_board_name(name), value, step)

    def evaluation(
        self,
        step: int,
        loss: float,
        unigram: float | None,
        parts: Mapping[str, float] | None = None,
    ) -> None:
        """Report a validation loss, and in the record what it is made of."""
        self.record("eval", step, loss=loss, split="validation", **(parts or {}))
        below = ""
        if unigram is not None:
            side = "below" if loss <= unigram else "above"
            below = f", {abs(unigram - loss):.3f} {side} the unigram entropy {unigram:.4f}"
        self.say(f"step {step}: validation loss {loss:.4f}{below}")
        self._scalar("train/validation_loss", loss, step)

    def close(self) -> None:
        """Flush and close everything."""
        if self._bar is not None:
            self._bar.close()
        with suppress(OSError):
            if self._board is not None:
                self._board.close()
        with suppress(OSError):
            if self._file is not None:
                self._file.close()


def _is_no_number(value: Any) -> bool:
    """JSON has no NaN and no infinity."""
    return isinstance(value, float) and not math.isfinite(value)


def console_line(step: int, total: int, values: dict[str, float | None]) -> str:
    """step 20/400 (5%) | loss 5.1234 | grad norm 0.512 | lr 3.00e-04 | 81,920 tokens | ..."""

    def number(name: str) -> float:
        return float(values.get(name) or 0.0)

    mfu = values.get("mfu")
    parts = [
        f"step {step}/{total} ({100 * step // total}%)",
        f"loss {number('loss'):.4f}",
        f"grad norm {number('grad_norm'):.3f}",
        f"lr {number('lr'):.2e}",
        f"{int(number('tokens')):,} tokens",
        f"{number('tokens_per_s'):,.0f} tok/s",
        f"{number('tflops'):.3g} TFLOP/s a rank",
        f"MFU {mfu:.1%}" if mfu is not None else "MFU n/a",
        f"{number('memory_gb'):.2f} GB",
        f"data wait {100 * number('data_wait_s') / max(number('step_s'), 1e-9):.0f}%",
        f"{number('step_s'):.2f} s/step",
        f"{_duration(number('eta_s'))} left",
    ]
    return " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"


BY_LOOP = ("loss_loop_", "exit_share_", "indexer_", "selected_")


def _board_name(name: str) -> str:
    group = {
        "loss": "train",
        "grad_norm": "train",
        "lr": "train",
        "tokens": "train",
        "memory_gb": "memory",
        "data_wait_s": "data",
    }.get(name, "train" if name.startswith(BY_LOOP) else "perf")
    return f"{group}/{name}"


def _cut_half_line(path: Path) -> None:
    """A killed run may have left half a record at the end of the file."""
    if not path.exists():
        return
    data = path.read_bytes()
    if data and not data.endswith(b"\n"):
        path.write_bytes(data[: data.rfind(b"\n") + 1])
