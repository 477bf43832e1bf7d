"""How far an unfinished output is: one durable line for each finished slice of the input.

A slice counts when its tokens are on the disk and its line after them. A run that was killed leaves
the lines of its finished slices; the next one cuts the files back to the last of them and goes on.
The last line may be torn; it is then dropped. The file is locked while a run is at work, which also
keeps two runs from writing one output.
"""

import errno
import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lt2.atomic import fsync_directory


def journal_path(prefix: str | os.PathLike[str]) -> Path:
    """Where the journal of an output lies."""
    return Path(f"{os.fspath(prefix)}.progress.partial")


class Journal:
    """Opens and locks the journal of an output; `lines` are those of an earlier run.

    Raises:
        ValueError: another process writes the same output.
        OSError: the folder is missing or cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str]) -> None:
        self.path = journal_path(prefix)
        self._stream = self._open_locked()
        self.lines: list[dict[str, Any]] = []
        good = 0
        for line in self._stream.read().split(b"\n")[:-1]:
            try:
                self.lines.append(json.loads(line))
            except ValueError:
                break
            good += len(line) + 1
        self._stream.truncate(good)
        self._stream.seek(good)

    def _open_locked(self) -> Any:
        while True:
            stream = open(self.path, "a+b")  # noqa: SIM115 - closed by `close`
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    stream.close()
                    raise ValueError(f"{self.path}: another run is writing this output") from None
                # Some network filesystems have no locks; the output is still renamed as a whole.
            # The run that held the lock may have removed the file between our open and our lock.
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(stream.fileno()), self.path.stat()):
                    stream.seek(0)
                    return stream
            stream.close()

    def append(self, line: dict[str, Any]) -> None:
        """Add a line; it is on the disk when this returns."""
        self._stream.write(json.dumps(line).encode() + b"\n")
        self._stream.flush()
        os.fsync(self._stream.fileno())
        if not self.lines:
            fsync_directory(self.path.absolute().parent)
        self.lines.append(line)

    def rewrite(self, lines: list[dict[str, Any]]) -> None:
        """Start over with these lines."""
        self._stream.truncate(0)
        self._stream.seek(0)
        self.lines = []
        for line in lines:
            self.append(line)

    def close(self, *, remove: bool) -> None:
        """Let go of the lock; `remove` when nothing is left to go on from."""
        if remove:
            with suppress(OSError):
                self.path.unlink()
        with suppress(OSError):
            self._stream.close()
