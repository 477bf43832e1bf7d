"""Text files as a stream of batches of undecoded documents.

The kind of a file is decided by its suffix alone. Records leave here as raw bytes with their line
number, so that the expensive part (JSON, UTF-8, tokenizing) happens in worker processes, and a
fault found there can still be reported as FILE:LINE. Compressed files are checked to their very
end: a cut gzip or zstd file is an error, never a shorter corpus.

The bytes of each file are hashed while they stream past, for the manifest.
"""

import glob
import hashlib
import os
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst")
SUFFIXES = ".jsonl, .ndjson, .json (one object a line), .txt (each also .gz or .zst), .parquet"

BATCH_BYTES = 1 << 20
BATCH_RECORDS = 1024
PARQUET_ROWS = 256
"""Rows decoded at a time; small, because a row may be a long document."""

CHUNK_BYTES = 1 << 16
"""Compressed bytes decoded at a time; small, because they may expand a thousandfold."""

BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class InputError(ValueError):
    """A fault in an input; the message starts with FILE: or FILE:LINE:."""


@dataclass
class Source:
    """One input file and what is learned about it while it is read."""

    path: str
    kind: str
    """"json", "text" or "parquet"."""
    compression: str
    """"gz", "zst" or ""."""
    size: int
    mtime_ns: int
    bytes_read: int = 0
    sha256: str = ""
    """Known after the last batch."""


@dataclass
class Batch:
    """Consecutive records of one file."""

    source_index: int
    path: str
    kind: str
    first_line: int
    """Line (JSON), row (parquet) or 1 (text), counted from 1, of the first record."""
    records: list[bytes | None] = field(default_factory=list)
    """Undecoded records; None is a null of a parquet column."""
    unfinished: bool = False
    """The last record is the file's last line and has no newline."""


def find_inputs(patterns: Iterable[str]) -> list[Source]:
    """Files behind names and glob patterns, in the order given, each pattern sorted.

    Raises:
        InputError: nothing matches, a file is missing, unreadable, a folder, of an unknown kind,
            or named twice.
    """
    paths: list[str] = []
    for pattern in patterns:
        expanded = os.path.expanduser(pattern)
        if not os.path.lexists(expanded) and glob.has_magic(expanded):
            matches = sorted(glob.glob(expanded, recursive=True))
            if not matches:
                raise InputError(f"{pattern}: no file matches")
            paths.extend(matches)
        else:
            paths.append(expanded)
    if not paths:
        raise InputError("--input: no file given")
    sources = [_describe(os.path.abspath(path)) for path in paths]
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise InputError(f"{source.path}: given twice")
        seen.add(source.path)
    return sources


def _describe(path: str) -> Source:
    if os.path.isdir(path):
        raise InputError(f"{path}: is a folder; name files or a pattern such as '{path}/*.jsonl'")
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    kind, compression = _kind_of(path)
    _require(path, kind, compression)
    return Source(path, kind, compression, status.st_size, status.st_mtime_ns)


def _kind_of(path: str) -> tuple[str, str]:
    base, compression = path, ""
    for suffix in COMPRESSED:
        if path.endswith(suffix):
            base, compression = path.removesuffix(suffix), suffix[1:]
    if base.endswith(JSON_LINES):
        return "json", compression
    if base.endswith(".txt"):
        return "text", compression
    if base.endswith(".parquet") and not compression:
        return "parquet", ""
    raise InputError(f"{path}: unknown kind of file; known suffixes: {SUFFIXES}")


def _require(path: str, kind: str, compression: str) -> None:
    """Find out before any work that a reader's library is missing."""
    package = "pyarrow" if kind == "parquet" else "zstandard" if compression == "zst" else None
    if package is not None:
        try:
            __import__(package)
        except ImportError:
            raise InputError(
                f"{path}: reading it needs the package {package}: pip install {package}"
            ) from None


class _HashingReader:
    """Counts and hashes a file's bytes as they are read."""

    def __init__(self, stream: BinaryIO, source: Source) -> None:
        self._stream = stream
        self._source = source
        self._digest = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._stream.read(size)
        self._digest.update(data)
        self._source.bytes_read += len(data)
        return data

    def finish(self) -> None:
        self._source.sha256 = self._digest.hexdigest()


def _gunzip(raw: _HashingReader, path: str) -> Iterator[bytes]:
    """Decoded pieces of a gzip file of one or more members."""
    decoder = zlib.decompressobj(wbits=31)
    members = 0
    pending = b""
    while data := pending or raw.read(CHUNK_BYTES):
        pending = b""
        if members and decoder.eof:
            if not data.strip(b"\0"):
                continue  # zero padding after the last member, as written to tapes
            decoder = zlib.decompressobj(wbits=31)
        try:
            yield decoder.decompress(data)
        except zlib.error as error:
            raise InputError(f"{path}: broken gzip file: {error}") from None
        if decoder.eof:
            members += 1
            pending = decoder.unused_data
    if not decoder.eof:
        raise InputError(f"{path}: gzip file is cut off")


def _unzstd(raw: _HashingReader, path: str) -> Iterator[bytes]:
    """Decoded pieces of a zstd file of one or more frames."""
    import zstandard

    decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    finished = False
    pending = b""
    while data := pending or raw.read(CHUNK_BYTES):
        pending = b""
        if finished:
            decoder = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
        try:
            yield decoder.decompress(data)
        except zstandard.ZstdError as error:
            raise InputError(f"{path}: broken zstd file: {error}") from None
        finished = decoder.eof
        if finished:
            pending = decoder.unused_data
    if not finished:
        raise InputError(f"{path}: zstd file is cut off")


def _pieces(source: Source, raw: _HashingReader) -> Iterator[bytes]:
    """Decoded bytes of a file, a piece at a time."""
    if source.compression == "gz":
        yield from _gunzip(raw, source.path)
    elif source.compression == "zst":
        yield from _unzstd(raw, source.path)
    else:
        while data := raw.read(BATCH_BYTES):
            yield data


def _lines(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their newline; the last one is yielded as it is, with no newline to lose.

    An empty last line (the file ends with a newline) is yielded too, so that a caller can tell.
    """
    tail: list[bytes] = []
    for piece in pieces:
        head, *rest = piece.split(b"\n")
        tail.append(head)
        if rest:
            yield b"".join(tail)
            yield from rest[:-1]
            tail = [rest[-1]]
    yield b"".join(tail)


def _json_batches(source: Source, index: int, pieces: Iterator[bytes]) -> Iterator[Batch]:
    batch = Batch(index, source.path, "json", 1)
    size = 0
    number = 0
    previous: bytes | None = None
    for line in _lines(pieces):
        if previous is not None:
            number += 1
            batch.records.append(previous)
            size += len(previous)
            if size >= BATCH_BYTES or len(batch.records) >= BATCH_RECORDS:
                yield batch
                batch, size = Batch(index, source.path, "json", number + 1), 0
        elif line.startswith(BYTE_ORDER_MARK):
            line = line.removeprefix(BYTE_ORDER_MARK)
        previous = line
    if previous:
        batch.records.append(previous)
        batch.unfinished = True
    if batch.records:
        yield batch


def _text_batches(source: Source, index: int, pieces: Iterator[bytes]) -> Iterator[Batch]:
    text = b"".join(pieces).removeprefix(BYTE_ORDER_MARK)
    yield Batch(index, source.path, "text", 1, [text])


def _parquet_batches(
    source: Source, index: int, stream: BinaryIO, text_key: str
) -> Iterator[Batch]:
    """Rows of one column as bytes; pyarrow checks the footer, and each page as it is read."""
    import pyarrow
    import pyarrow.parquet

    row = 1
    try:
        table = pyarrow.parquet.ParquetFile(stream)
        names = table.schema_arrow.names
        if text_key not in names:
            raise InputError(
                f"{source.path}: no column {text_key!r} (it has {', '.join(names)}); see --text-key"
            )
        kind = table.schema_arrow.field(text_key).type
        if pyarrow.types.is_dictionary(kind):
            kind = kind.value_type
        if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
            raise InputError(f"{source.path}: column {text_key!r} holds {kind}, not strings")
        for part in table.iter_batches(batch_size=PARQUET_ROWS, columns=[text_key]):
            # As bytes: undecoded like the other kinds, so that bad UTF-8 is found with its row.
            records = part.column(0).cast(pyarrow.large_binary()).to_pylist()
            batch, size = Batch(index, source.path, "parquet", row), 0
            for record in records:
                batch.records.append(record)
                size += len(record or b"")
                row += 1
                if size >= BATCH_BYTES:
                    yield batch
                    batch, size = Batch(index, source.path, "parquet", row), 0
            source.bytes_read = row * source.size // max(1, table.metadata.num_rows + 1)
            if batch.records:
                yield batch
    except (pyarrow.ArrowException, OSError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{source.path}: broken parquet file near row {row}: {reason}") from None


def read_batches(sources: list[Source], text_key: str) -> Iterator[Batch]:
    """All records of all files in order. After a file's last batch its `sha256` is set.

    Raises:
        InputError: a file cannot be read, is cut off or broken, or lacks the column `text_key`.
    """
    for index, source in enumerate(sources):
        try:
            # Unbuffered: a signal is seen between any two reads, and pieces are large anyway.
            with open(source.path, "rb", buffering=0) as stream:
                if source.kind == "parquet":
                    yield from _parquet_batches(source, index, stream, text_key)
                    stream.seek(0)
                    source.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
                else:
                    raw = _HashingReader(stream, source)
                    batches = _json_batches if source.kind == "json" else _text_batches
                    yield from batches(source, index, _pieces(source, raw))
                    raw.finish()
                    if source.bytes_read != source.size:
                        raise InputError(f"{source.path}: changed while it was read")
            source.bytes_read = source.size
        except OSError as error:
            raise InputError(f"{source.path}: cannot be read: {error.strerror or error}") from None
