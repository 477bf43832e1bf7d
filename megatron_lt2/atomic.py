"""Files that exist completely or not at all.

A file is written under a temporary name in the folder of its target, flushed to the disk, and then
renamed; the folder is flushed after that, because a rename is only durable once the directory is.
The temporary name carries the process id, so two writers never share one.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Flush a directory's entries; a no-op on filesystems that cannot flush directories."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fsync_file(path: str | os.PathLike[str]) -> None:
    """Flush a closed file's contents to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_durably(temporary: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Flush `temporary`, rename it to `target` (on the same filesystem), flush the folder."""
    fsync_file(temporary)
    os.replace(temporary, target)
    fsync_directory(Path(target).absolute().parent)


@contextmanager
def atomic_writer(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A binary file that appears as `path` when the block ends, and never when it raises.

    Raises:
        OSError: the folder does not exist, cannot be written, or the disk is full.
    """
    target = Path(path).absolute()
    temporary = target.parent / f".{target.name}.{os.getpid()}.partial"
    try:
        with open(temporary, "wb") as stream:
            yield stream
        replace_durably(temporary, target)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise


def write_bytes_atomic(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a whole file of bytes; see `atomic_writer`."""
    with atomic_writer(path) as stream:
        stream.write(data)


def write_text_atomic(path: str | os.PathLike[str], text: str) -> None:
    """Write a whole UTF-8 text file; see `atomic_writer`."""
    write_bytes_atomic(path, text.encode("utf-8"))


def write_json_atomic(path: str | os.PathLike[str], value: Any) -> None:
    """Write one JSON value, indented by two and ended by a newline; see `atomic_writer`."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def sha256_file(path: str | os.PathLike[str]) -> str:
    """The hexadecimal SHA-256 of a file's bytes, read in pieces.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
