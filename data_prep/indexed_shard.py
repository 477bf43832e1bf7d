"""STEM.bin and STEM.idx in the format of megatron-core's IndexedDataset.

With metadata there is also STEM.docs.jsonl, one object a document, in their order.

The same bytes that megatron-core's IndexedDatasetBuilder writes (a test compares them), without
importing torch, and without anything in memory that grows: the lengths of documents are appended to
the index as they come, and its other parts are made of them at the end.
"""

import struct
from pathlib import Path

import numpy as np

from data_prep.append_file import AppendFile
from megatron_lt2.data.manifest import FileFacts

INDEX_MAGIC = b"MMIDIDX\x00\x00"
INDEX_VERSION = 1
DTYPE_CODES = {"uint16": 8, "int32": 4}
"""The numbers by which an index names the type of its tokens."""
HEADER = struct.Struct("<9sQBQQ")

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


class IndexedShard:
    """One pair of token files, under partial names.

    Args:
        stem: path without suffix; its folder must exist.
        dtype: "uint16" or "int32", little-endian on disk.
        metadata: whether there is a third file.
        keep: sizes by suffix to go on from, as `sync` gave them.
    """

    SUFFIXES = (".bin", ".idx")
    """The first is the one whose size is bounded and whose checksum says where a run stands."""
    TAIL = 0
    """Bytes that `finish` adds to it."""

    def __init__(
        self,
        stem: Path,
        dtype: str,
        metadata: bool = False,
        keep: dict[str, int] | None = None,
    ) -> None:
        keep = keep or {}
        self.dtype = dtype
        self._item = np.dtype(dtype).itemsize
        self.main = AppendFile(Path(f"{stem}.bin"), keep.get(".bin", 0))
        self.index = AppendFile(Path(f"{stem}.idx"), keep.get(".idx", 0), hashed=False)
        if not self.index.size:
            self.index.write(bytes(HEADER.size))
        self.sidecar = None
        if metadata:
            self.sidecar = AppendFile(Path(f"{stem}.docs.jsonl"), keep.get(".docs.jsonl", 0))
        self.documents = (self.index.size - HEADER.size) // 4

    def cost(self, lengths: np.ndarray, metadata: list[bytes] | None) -> np.ndarray:
        """Bytes that documents of so many tokens take in the main file."""
        return lengths.astype(np.int64) * self._item

    def add(
        self, data: bytes | memoryview, lengths: np.ndarray, metadata: list[bytes] | None
    ) -> None:
        """Append documents: their tokens in `dtype`, tokens of each, and what is said of each."""
        self.main.write(bytes(data))
        self.index.write(lengths.astype("<i4").tobytes())
        self.documents += len(lengths)
        if self.sidecar is not None:
            self.sidecar.write(b"".join(line + b"\n" for line in metadata or []))

    def sync(self) -> dict[str, int]:
        """Bring both files to the disk; their sizes by suffix."""
        sizes = {".bin": self.main.sync(), ".idx": self.index.sync()}
        if self.sidecar is not None:
            sizes[".docs.jsonl"] = self.sidecar.sync()
        return sizes

    def _files(self) -> list[AppendFile]:
        files = [self.main, self.index]
        return files if self.sidecar is None else [*files, self.sidecar]

    def finish(self) -> dict[str, FileFacts]:
        """Write the rest of the index, and bring both to the disk.

        The index holds, after a header: token type, sequence and document counts, int32 sequence
        lengths, int64 byte offsets, and int64 numbers of the first sequence of each document with
        one entry more for the end. Here every document is one sequence.
        """
        count, offset = self.documents, 0
        header = HEADER.pack(INDEX_MAGIC, INDEX_VERSION, DTYPE_CODES[self.dtype], count, count + 1)
        self.index.overwrite(0, header)
        for start in range(0, count, INDEX_PIECE):
            some = min(INDEX_PIECE, count - start)
            lengths = np.frombuffer(self.index.read(HEADER.size + 4 * start, 4 * some), "<i4")
            ends = offset + np.cumsum(lengths, dtype=np.int64) * self._item
            self.index.write(np.concatenate(([offset], ends[:-1])).astype("<i8").tobytes())
            offset = int(ends[-1])
        for start in range(0, count + 1, INDEX_PIECE):
            stop = min(start + INDEX_PIECE, count + 1)
            self.index.write(np.arange(start, stop, dtype="<i8").tobytes())
        return {file.path.name: file.finish() for file in self._files()}

    def close(self) -> None:
        """Close without a promise."""
        for file in self._files():
            file.close()


def shard_lengths(stem: str, documents: int) -> np.ndarray:
    """Tokens of each document of a finished pair, int32 [documents]."""
    return np.fromfile(f"{stem}.idx", dtype="<i4", offset=HEADER.size, count=documents)
