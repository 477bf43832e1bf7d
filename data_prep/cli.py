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


def run_tool(work: Callable[[], None]) -> int:
    """Run a tool's work; the exit code.

    Bad input, an unwritable disk and a missing package become one line on stderr.
    """
    try:
        with _sigterm_raises():
            work()
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
    return 0


class Progress:
    """A bar on a terminal, else a line now and then; both on stderr.

    Args:
        total_bytes: size of all inputs together.
    """

    def __init__(self, total_bytes: int) -> None:
        self._total = max(1, total_bytes)
        self._start = self._last = time.monotonic()
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

    def update(self, bytes_read: int, documents: int, tokens: int) -> None:
        """Report totals so far."""
        if self._bar is not None:
            self._bar.set_postfix_str(f"{documents} documents, {tokens / 1e6:.1f}M tokens", False)
            self._bar.update(bytes_read - self._bar.n)
            return
        now = time.monotonic()
        if now - self._last >= SECONDS_BETWEEN_LINES:
            self._last = now
            print(
                f"tokenize: {100 * bytes_read / self._total:.0f} % of the input, {documents} "
                f"documents, {tokens / 1e6:.1f}M tokens, "
                f"{tokens / (now - self._start):,.0f} tokens/s",
                file=sys.stderr,
                flush=True,
            )
