"""Documents of finished shards, in order and a bounded number of bytes at a time."""

import json
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep.indexed_shard import shard_lengths
from data_prep.tar_shard import BLOCK, padding
from megatron_lt2.data.manifest import Manifest, shards_of

PIECE_BYTES = 1 << 24
"""Tokens that are read at a time; a longer document comes alone."""


class Piece(NamedTuple):
    """Consecutive documents."""

    data: bytes
    """Their tokens, in the dtype of the manifest."""
    lengths: list[int]
    metadata: list[bytes] | None


def pieces_of_output(prefix: str, manifest: Manifest) -> Iterator[Piece]:
    """Every document of an output.

    Raises:
        ValueError: a file ends too early.
        OSError: a file cannot be read.
    """
    for shard in shards_of(prefix, manifest):
        if manifest["format"] == "megatron":
            yield from _indexed_pieces(shard.stem, shard.documents, manifest)
        else:
            yield from _tar_pieces(shard.stem, manifest)


def has_metadata(manifest: Manifest) -> bool:
    """Whether documents carry metadata."""
    return bool(manifest.get("options", {}).get("metadata"))


def _groups(costs: np.ndarray) -> Iterator[tuple[int, int]]:
    """Runs of documents of at most `PIECE_BYTES` bytes, or of one document."""
    ends = np.cumsum(costs, dtype=np.int64)
    start = 0
    while start < len(costs):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + PIECE_BYTES, side="right"))
        stop = min(max(stop, start + 1), start + (1 << 16))
        yield start, min(stop, len(costs))
        start = stop


def _indexed_pieces(stem: str, documents: int, manifest: Manifest) -> Iterator[Piece]:
    lengths = shard_lengths(stem, documents)
    item = np.dtype(manifest["dtype"]).itemsize
    sidecar = open(f"{stem}.docs.jsonl", "rb") if has_metadata(manifest) else None  # noqa: SIM115
    try:
        with open(f"{stem}.bin", "rb") as stream:
            for start, stop in _groups(lengths.astype(np.int64) * item):
                some = lengths[start:stop].tolist()
                data = stream.read(sum(some) * item)
                if len(data) != sum(some) * item:
                    raise ValueError(f"{stem}.bin: ends before document {stop - 1}")
                said = None
                if sidecar is not None:
                    said = [sidecar.readline().rstrip(b"\n") for _ in some]
                yield Piece(data, some, said)
    finally:
        if sidecar is not None:
            sidecar.close()


def tar_index(stem: str) -> np.ndarray:
    """int64 [documents, 2]: where the ids of each document begin, and how many there are."""
    return np.fromfile(f"{stem}.tar.idx", dtype="<i8").reshape(-1, 2)


def _tar_pieces(stem: str, manifest: Manifest) -> Iterator[Piece]:
    index = tar_index(stem)
    item = np.dtype(manifest["dtype"]).itemsize
    with_metadata = has_metadata(manifest)
    with open(f"{stem}.tar", "rb") as stream:
        for start, stop in _groups(index[:, 1] * item + 2 * BLOCK):
            data, said = [], []
            for place, length in index[start:stop].tolist():
                stream.seek(place)
                data.append(stream.read(length * item))
                if len(data[-1]) != length * item:
                    raise ValueError(f"{stem}.tar: ends before its documents do")
                if with_metadata:
                    stream.seek(len(padding(stream.tell())), 1)
                    said.append(_json_member(stream, stem))
            lengths = index[start:stop, 1].tolist()
            yield Piece(b"".join(data), lengths, said if with_metadata else None)


def _json_member(stream: BinaryIO, stem: str) -> bytes:
    """The next member of a tar, which must be JSON."""
    header = stream.read(BLOCK)
    if b".json\0" not in header[:100]:
        raise ValueError(f"{stem}.tar: a sample has no .json right behind its .npy")
    data = stream.read(int(header[124:135], 8))
    json.loads(data)
    return data
