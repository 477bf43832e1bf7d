"""A file that grows at its end under a partial name, and can be cut back to a known size."""

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from megatron_lt2.data.manifest import FileFacts

PIECE = 1 << 22


def partial(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


class AppendFile:
    """Appends to the partial file of `path`; knows its size and, unless told not to, its SHA-256.

    Args:
        path: the final name.
        keep: how many bytes of a partial file that is there are kept; the rest is cut off.
        hashed: keep the checksum up while writing.

    Raises:
        ValueError: fewer than `keep` bytes are there.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, keep: int = 0, *, hashed: bool = True) -> None:
        self.path = path
        self._digest = hashlib.sha256() if hashed else None
        self._stream = open(partial(path), "r+b" if keep else "w+b")  # noqa: SIM115 - close()
        self.size = 0
        if keep:
            self._take_over(keep)

    def _take_over(self, keep: int) -> None:
        while self.size < keep:
            data = self._stream.read(min(PIECE, keep - self.size))
            if not data:
                self._stream.close()
                raise ValueError(f"{partial(self.path)}: has {self.size} bytes, not {keep}")
            self.size += len(data)
            if self._digest is not None:
                self._digest.update(data)
        self._stream.truncate(keep)
        self._stream.seek(keep)

    def write(self, data: bytes) -> None:
        """Append."""
        self._stream.write(data)
        self.size += len(data)
        if self._digest is not None:
            self._digest.update(data)

    def overwrite(self, place: int, data: bytes) -> None:
        """Replace bytes that are there; only for files that are not hashed."""
        assert self._digest is None and place + len(data) <= self.size
        self._stream.seek(place)
        self._stream.write(data)
        self._stream.seek(self.size)

    def read(self, place: int, size: int) -> bytes:
        """Bytes that were written before."""
        self._stream.flush()
        return os.pread(self._stream.fileno(), size, place)

    def digest(self) -> str:
        """SHA-256 of what is there so far; of an unhashed file by reading it."""
        if self._digest is not None:
            return self._digest.hexdigest()
        self._stream.flush()
        with open(partial(self.path), "rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    def sync(self) -> int:
        """Bring everything to the disk; the size."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return self.size

    def finish(self) -> FileFacts:
        """Bring everything to the disk and close; what the file is."""
        self.sync()
        facts: FileFacts = {"bytes": self.size, "sha256": self.digest()}
        self._stream.close()
        return facts

    def close(self) -> None:
        """Close without a promise."""
        with suppress(OSError):  # a full disk: closing tries to flush once more
            self._stream.close()
