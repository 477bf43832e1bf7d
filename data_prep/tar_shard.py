"""STEM.tar, a WebDataset shard of token arrays, and STEM.tar.idx, where they are in it.

A sample is one document: KEY.npy, its ids as a numpy array, and with metadata KEY.json right behind
it. KEY is the number of the document in the whole output, so no two samples share one. The bytes
depend on nothing but the documents: time and owner of every member are zero.

The index has two little-endian int64 for each document: where its ids begin in the tar, in bytes,
and how many there are.
"""

import io
import tarfile
from pathlib import Path

import numpy as np

from data_prep.append_file import AppendFile
from megatron_lt2.data.manifest import FileFacts

BLOCK = 512
END = bytes(2 * BLOCK)
ARRAY_HEAD = 128
"""Bytes before the ids in a .npy of one dimension."""


def member(name: str, size: int) -> bytes:
    """The header block of a file."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(format=tarfile.USTAR_FORMAT)


def padding(size: int) -> bytes:
    """What fills up the last block."""
    return bytes(-size % BLOCK)


def array_header(dtype: str, length: int) -> bytes:
    """The head of a .npy file of one dimension."""
    stream = io.BytesIO()
    descr = np.lib.format.dtype_to_descr(np.dtype(dtype).newbyteorder("<"))
    np.lib.format.write_array_header_1_0(
        stream, {"descr": descr, "fortran_order": False, "shape": (length,)}
    )
    assert stream.tell() == ARRAY_HEAD
    return stream.getvalue()


class TarShard:
    """One tar and its index, under partial names.

    Args:
        stem: path without suffix.
        dtype: of the ids.
        first: number of the first document.
        key_prefix: in front of every key.
        keep: sizes by suffix to go on from.
    """

    SUFFIXES = (".tar", ".tar.idx")
    TAIL = len(END)

    def __init__(
        self,
        stem: Path,
        dtype: str,
        first: int,
        key_prefix: str = "",
        keep: dict[str, int] | None = None,
    ) -> None:
        keep = keep or {}
        self.dtype, self._prefix = dtype, key_prefix
        self._item = np.dtype(dtype).itemsize
        self.main = AppendFile(Path(f"{stem}.tar"), keep.get(".tar", 0))
        self.index = AppendFile(Path(f"{stem}.tar.idx"), keep.get(".tar.idx", 0))
        self.documents = self.index.size // 16
        self._first = first

    def cost(self, lengths: np.ndarray, metadata: list[bytes] | None) -> np.ndarray:
        """Bytes that documents take in the tar, a header of their own included."""
        size = ARRAY_HEAD + lengths.astype(np.int64) * self._item
        cost = BLOCK + size + -size % BLOCK
        if metadata is not None:
            size = np.array([len(said) for said in metadata])
            cost += BLOCK + size + -size % BLOCK
        return cost

    def add(
        self, data: bytes | memoryview, lengths: np.ndarray, metadata: list[bytes] | None
    ) -> None:
        """Append documents, and a line of JSON of each where there is metadata."""
        start, out, place, entries = 0, [], self.main.size, []
        for offset, length in enumerate(lengths.tolist()):
            key = f"{self._prefix}{self._first + self.documents + offset:012d}"
            ids = data[start : start + length * self._item]
            start += len(ids)
            head = array_header(self.dtype, length)
            size = len(head) + len(ids)
            entries += [place + BLOCK + len(head), length]
            parts = [member(f"{key}.npy", size), head, bytes(ids), padding(size)]
            if metadata is not None:
                said = metadata[offset]
                parts += [member(f"{key}.json", len(said)), said, padding(len(said))]
            place += sum(map(len, parts))
            out += parts
        self.main.write(b"".join(out))
        self.index.write(np.asarray(entries, dtype="<i8").tobytes())
        self.documents += len(lengths)

    def sync(self) -> dict[str, int]:
        """Bring both files to the disk; their sizes by suffix."""
        return {".tar": self.main.sync(), ".tar.idx": self.index.sync()}

    def finish(self) -> dict[str, FileFacts]:
        """Close the archive, and bring both files to the disk."""
        self.main.write(END)
        return {file.path.name: file.finish() for file in (self.main, self.index)}

    def close(self) -> None:
        """Close without a promise."""
        self.main.close()
        self.index.close()
