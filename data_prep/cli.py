"""What the command line tools here share: faults as one line, clean-up on signals, progress."""

import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

USER_FAULT = 2
"""Exit code of a fault that the message explains (argparse uses the same)."""

SECONDS_BETWEEN_LINES = 20.0
"""How often progress is reported when it does not go to a terminal."""


class Terminated(BaseException):
    """SIGTERM arrived; raised so that partial files are removed on the way out."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


SKIPPED = 3
"""Exit code of a run that finished and left out faulty input, as it was told to."""


def run_tool(work: Callable[[], int | None]) -> int:
    """Run a tool's work; the exit code, which the work may choose.

    Bad input, an unwritable disk and a missing package become one line on stderr.
    """
    try:
        with _sigterm_raises():
            return work() or 0
    except KeyboardInterrupt:
        print("interrupted; nothing was left under a final name", file=sys.stderr)
        return 128 + signal.SIGINT
    except Terminated:
        print("terminated; nothing was left under a final name", file=sys.stderr)
        return 128 + signal.SIGTERM
    except ModuleNotFoundError as error:
        print(
            f"error: the Python package {error.name!r} is missing here; install this project's "
            "packages into this Python, or use the one that has them",
            file=sys.stderr,
        )
        return USER_FAULT
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        print(f"error: {place}{error.strerror or error}", file=sys.stderr)
        return USER_FAULT
    except (ValueError, RuntimeError) as error:
        print(f"error: {' '.join(str(error).splitlines())}", file=sys.stderr)
        return USER_FAULT


class Progress:
    """A bar on a terminal, else a line now and then; both on stderr.

    Args:
        total_bytes: size of all inputs together.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._start = self._last = time.monotonic()
        self._first_bytes = self._text = self._first_documents = 0
        self._bar: Any = None
        if sys.stderr.isatty():
            import tqdm

            self._bar = tqdm.tqdm(total=total_bytes, unit="B", unit_scale=True, desc="tokenize")

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, bytes_read: int, documents: int = 0) -> None:
        """Say what an earlier run has done already: it does not count for the speed."""
        self._first_bytes, self._first_documents = bytes_read, documents
        self._start = self._last = time.monotonic()
        if self._bar is not None:
            self._bar.update(bytes_read)

    def update(self, bytes_read: int, documents: int, tokens: int, text_bytes: int) -> None:
        """Report totals so far, and the text of one batch."""
        self._text += text_bytes
        now = time.monotonic()
        seconds = max(now - self._start, 1e-9)
        rate = (documents - self._first_documents) / seconds
        speed = f"{rate:,.0f} documents/s, {self._text / seconds / 1e6:.1f} MB/s"
        if self._bar is not None:
            self._bar.set_postfix_str(f"{tokens / 1e6:.1f}M tokens, {speed}", False)
            self._bar.update(bytes_read - self._bar.n)
            return
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            new = max(1, bytes_read - self._first_bytes)
            left = seconds * max(0, self._total - bytes_read) / new
            print(
                f"tokenize: {100 * bytes_read / self._total:.0f} % of the input, {documents} "
                f"documents, {tokens / 1e6:.1f}M tokens, {speed}, "
                f"{tokens / seconds:,.0f} tokens/s, {_clock(left)} left",
                file=sys.stderr,
                flush=True,
            )


def _clock(seconds: float) -> str:
    """h:mm:ss."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"
