"""Bytes of a plain or compressed file, a piece at a time, checked to their very end.

A cut gzip, zstd or xz file is an error, never a shorter corpus. The bytes of the file are hashed
while they stream past, for the manifest.
"""

import hashlib
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from data_prep.inputs import InputError, Source

PLAIN_BYTES = 1 << 20
CHUNK_BYTES = 1 << 16
"""Compressed bytes decoded at a time; small, because they may expand a thousandfold."""

NAMES = {"gz": "gzip", "zst": "zstd", "xz": "xz"}


class HashingReader:
    """Counts and hashes the bytes of a file, or of a piece of one, as they are read."""

    def __init__(self, stream: BinaryIO, source: Source) -> None:
        self._stream = stream
        self._source = source
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        """Up to `size` bytes; empty at the end."""
        if self._source.span is not None:
            size = min(size, self._source.to_read - self._source.bytes_read)
        data = self._stream.read(size)
        self._digest.update(data)
        self._source.bytes_read += len(data)
        return data

    def finish(self) -> None:
        """Say what the whole file hashes to.

        Raises:
            InputError: it is not as long as it was when it was found.
        """
        self._source.sha256 = self._digest.hexdigest()
        now = self._stream.seek(0, os.SEEK_END) if self._source.span else self._source.bytes_read
        if self._source.bytes_read != self._source.to_read or now != self._source.size:
            raise InputError(f"{self._source.path}: changed while it was read")


def pieces_of(source: Source, raw: HashingReader) -> Iterator[bytes]:
    """Decoded bytes of a file, a piece at a time.

    Raises:
        InputError: a compressed file is broken or ends too early.
    """
    if not source.compression:
        while data := raw.read(PLAIN_BYTES):
            yield data
        return
    start, fault = _decoder(source.compression)
    yield from _decoded(source, raw, start, fault)


def _decoder(compression: str) -> tuple[Callable[[], Any], type[Exception]]:
    """How a decoder of one member is made, and what it raises."""
    if compression == "gz":
        return lambda: zlib.decompressobj(wbits=31), zlib.error
    if compression == "xz":
        return lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), lzma.LZMAError
    import zstandard

    return (
        lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj(),
        zstandard.ZstdError,
    )


def _decoded(
    source: Source, raw: HashingReader, start: Callable[[], Any], fault: type[Exception]
) -> Iterator[bytes]:
    """Members (frames, streams) one after the other."""
    name = NAMES[source.compression]
    decoder = start()
    pending, between = b"", False
    while data := pending or raw.read(CHUNK_BYTES):
        pending = b""
        if between:
            if source.compression != "zst" and not data.strip(b"\0"):
                continue  # zero padding after the last member, as written to tapes
            decoder, between = start(), False
        try:
            yield decoder.decompress(data)
        except fault as error:
            raise InputError(f"{source.path}: broken {name} file: {error}") from None
        if decoder.eof:
            pending, between = decoder.unused_data, True
    if not decoder.eof:
        raise InputError(f"{source.path}: {name} file is cut off")
