"""Keeping the disk and the memory busy with the right thing while a large file is written.

- A file that is only synced when it is complete leaves the disk idle until then. `WriteBehind` asks
  for what is written so far, in a thread, while the next tensors are read.
- glibc gives large blocks back to the system at once, and the system clears them before it gives
  them out again; for tensors one after another that takes longer than to read them.
  `reuse_memory` has it keep them.
"""

import contextlib
import ctypes
import os
import threading
from typing import Any

EVERY = 256 * 1024**2
"""Bytes between two requests."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT = 1024**3


class WriteBehind:
    """Flushes a file behind its writer.

    Args:
        stream: an open file.
    """

    def __init__(self, stream: Any) -> None:
        self._descriptor = stream.fileno()
        self._waiting = 0
        self._thread: threading.Thread | None = None
        self._error: OSError | None = None

    def wrote(self, count: int) -> None:
        """Count bytes; from time to time, have them flushed."""
        self._waiting += count
        if self._waiting >= EVERY and (self._thread is None or not self._thread.is_alive()):
            self._waiting = 0
            self._thread = threading.Thread(target=self._flush)
            self._thread.start()

    def finish(self) -> None:
        """Wait for the thread; call it before the file is closed.

        Raises:
            OSError: what was flushed did not reach the disk.
        """
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _flush(self) -> None:
        try:
            os.fdatasync(self._descriptor)
        except OSError as error:
            self._error = error


def reuse_memory() -> None:
    """Have glibc keep freed blocks of this process for the next ones; elsewhere nothing happens."""
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, _KEPT)
        mallopt(_M_TRIM_THRESHOLD, _KEPT)
