"""PREFIX.bin, PREFIX.idx and PREFIX.manifest.json in the format of megatron-core's IndexedDataset.

The same bytes that megatron-core's IndexedDatasetBuilder writes (a test compares them), without
importing torch, and with one 32-bit length a document as the only thing that grows in memory.

Everything is written to NAME.partial beside its target. `publish` flushes the partial files and
renames them, the manifest last, so a manifest always describes complete files. The partial .bin is
locked while it is written, which keeps two runs from writing one output. A run that is killed
between two renames is finished by the next one: its manifest was already on disk.
"""

import errno
import fcntl
import hashlib
import json
import os
import struct
from array import array
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from megatron_lt2.atomic import fsync_directory
from megatron_lt2.data.manifest import FileFacts, Manifest, data_paths, manifest_path
from megatron_lt2.data.manifest import parse_manifest as parse

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
"""The numbers by which an index names the type of its tokens."""

MAX_LENGTH = np.iinfo(np.int32).max
INDEX_PIECE = 1 << 16
"""Documents whose index entries are made at a time."""


def dtype_for(vocab_size: int) -> str:
    """The narrowest token type that holds every id below `vocab_size`.

    Raises:
        ValueError: ids do not fit 32 bits.
    """
    if vocab_size <= 1 << 16:
        return "uint16"
    if vocab_size <= 1 << 31:
        return "int32"
    raise ValueError(f"token ids up to {vocab_size - 1} do not fit 32 bits")


def partial(path: Path) -> Path:
    """Where a file is written before it gets its name."""
    return path.with_name(path.name + ".partial")


class _HashingFile:
    """A binary file that knows the size and SHA-256 of what went into it."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream = stream
        self.size = 0
        self._digest = hashlib.sha256()

    def write(self, data: bytes) -> None:
        self.stream.write(data)
        self._digest.update(data)
        self.size += len(data)

    def close(self) -> FileFacts:
        self.stream.flush()
        os.fsync(self.stream.fileno())
        self.stream.close()
        return {"bytes": self.size, "sha256": self._digest.hexdigest()}


def _open_locked(path: Path) -> BinaryIO:
    """Open a partial file that no other process is writing, and empty it."""
    while True:
        stream = open(path, "ab")  # noqa: SIM115 - closed by the writer
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                stream.close()
                raise ValueError(f"{path}: another run is writing this output") from None
            # Some network filesystems have no locks; the output is still renamed as a whole.
        # The run that held the lock may have renamed the file between our open and our lock.
        if path.exists() and os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            stream.truncate(0)
            return stream
        stream.close()


class IndexedWriter:
    """Streams documents into a pair of token files; use as a context manager.

    Leaving the block without `publish`, for whatever reason, removes the partial files.

    Args:
        prefix: path without suffix; its folder must exist.
        dtype: "uint16" or "int32", little-endian on disk.

    Raises:
        ValueError: another process writes the same output.
        OSError: the folder is missing or cannot be written.
    """

    def __init__(self, prefix: str | os.PathLike[str], dtype: str) -> None:
        self.prefix = os.fspath(prefix)
        self.dtype = dtype
        self.lengths = array("i")
        self.tokens = 0
        self._bin, self._idx = data_paths(prefix)
        self._manifest = manifest_path(prefix)
        self._published = False
        self._data = _HashingFile(_open_locked(partial(self._bin)))
        for stale in (partial(self._manifest), partial(self._idx)):
            stale.unlink(missing_ok=True)

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(OSError):  # a full disk: closing tries to flush once more
            self._data.stream.close()
        if not self._published:
            for path in (self._manifest, self._idx, self._bin):
                with suppress(OSError):
                    partial(path).unlink()

    def add_documents(self, data: bytes, lengths: list[int]) -> None:
        """Append documents.

        Args:
            data: the tokens of all of them, already in `dtype`.
            lengths: tokens of each; their sum times the token size is len(data).
        """
        total = sum(lengths)
        assert total * np.dtype(self.dtype).itemsize == len(data)
        self._data.write(data)
        self.lengths.extend(lengths)
        self.tokens += total

    def finish(self) -> dict[str, FileFacts]:
        """Write the index, flush both files and say what they are; they keep their partial names.

        The index holds, after a header: token type, sequence and document counts, int32 sequence
        lengths, int64 byte offsets, and int64 numbers of the first sequence of each document with
        one entry more for the end. Here every document is one sequence.
        """
        facts = {self._bin.name: self._data.close()}
        lengths = np.frombuffer(self.lengths, dtype=np.int32)
        count = len(lengths)
        index = _HashingFile(open(partial(self._idx), "wb"))  # noqa: SIM115 - closed below
        index.write(INDEX_MAGIC)
        index.write(struct.pack("<QBQQ", INDEX_VERSION, DTYPE_CODES[self.dtype], count, count + 1))
        for start in range(0, count, INDEX_PIECE):
            index.write(lengths[start : start + INDEX_PIECE].astype("<i4").tobytes())
        offset = 0
        item = np.dtype(self.dtype).itemsize
        for start in range(0, count, INDEX_PIECE):
            ends = offset + np.cumsum(lengths[start : start + INDEX_PIECE], dtype=np.int64) * item
            index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, count + 1, INDEX_PIECE):
            stop = min(start + INDEX_PIECE, count + 1)
            index.write(np.arange(start, stop, dtype="<i8").tobytes())
        facts[self._idx.name] = index.close()
        return facts

    def publish(self, manifest: Manifest) -> None:
        """Give the finished files their names, the manifest last."""
        with open(partial(self._manifest), "w", encoding="utf-8") as stream:
            stream.write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        fsync_directory(self._bin.absolute().parent)
        # From here on a kill is harmless: the next run finds everything it needs to go on.
        self._published = True
        self._manifest.unlink(missing_ok=True)
        _rename_all(self.prefix)


def _rename_all(prefix: str) -> None:
    folder = manifest_path(prefix).absolute().parent
    for path in (*data_paths(prefix), manifest_path(prefix)):
        # Absent: renamed before a kill, or by another run that is finishing the same output now.
        with suppress(FileNotFoundError):
            os.replace(partial(path), path)
            fsync_directory(folder)


def finish_interrupted_publish(prefix: str) -> bool:
    """Complete the renames of a run that was killed between them.

    Returns:
        True if there was such a run. Leftovers of a run killed earlier than that are not touched;
        the next `IndexedWriter` overwrites them.
    """
    path = manifest_path(prefix)
    if path.exists() or not partial(path).exists():
        return False
    try:
        manifest = parse(partial(path))
    except ValueError:
        return False
    for data_path in data_paths(prefix):
        newest = partial(data_path) if partial(data_path).exists() else data_path
        if not newest.exists():
            return False
        if newest.stat().st_size != manifest["files"][data_path.name]["bytes"]:
            return False
    _rename_all(prefix)
    return True
