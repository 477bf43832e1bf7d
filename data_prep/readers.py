"""Text files as a stream of batches of undecoded documents.

Records leave here as raw bytes with their line number, so that the expensive part (JSON, UTF-8,
tokenizing) happens in worker processes, and a fault found there can still be reported as FILE:LINE.
Where a batch ends depends on the files alone; so a run that goes on in the middle of a file meets
the same batches again.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from data_prep.decompress import HashingReader, pieces_of
from data_prep.inputs import InputError, Source

BATCH_BYTES = 1 << 20
BATCH_RECORDS = 1024
BROKEN = 1 << 62
"""First line of the empty batch that stands for the rest of a file that broke off."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass
class Batch:
    """Consecutive records of one file."""

    source_index: int
    path: str
    kind: str
    """How records are decoded: "json", "text" (a whole file) or "plain" (text as it is)."""
    first_line: int
    """Line (JSON), row (parquet), sample (tar) or 1 (text), counted from 1, of the first record."""
    records: list[bytes | None] = field(default_factory=list)
    """Undecoded records; None is a null of a parquet column."""
    ids: list[str] | None = None
    """Names of the records, where the file has them outside the text."""
    unfinished: bool = False
    """The last record is the file's last line and has no newline."""
    notes: dict[str, int] = field(default_factory=dict)
    """What was skipped or changed while reading; see `records`."""
    begin: int = 0
    """Byte of the file where lines were counted from."""

    def line(self, number: int) -> int:
        """The line of the file, for one counted from `begin`; looked up when it is asked for."""
        return number + (_lines_before(self.path, self.begin) if self.begin else 0)

    def place(self, number: int) -> str:
        """FILE:LINE of it."""
        return f"{self.path}:{self.line(number)}"


@dataclass(frozen=True)
class Fields:
    """Where text and name of a document are."""

    text_key: str = "text"
    id_key: str | None = None


class Batches:
    """Collects records of one file into batches."""

    def __init__(self, source: Source, index: int, kind: str, *, ids: bool = False) -> None:
        self._source, self._index, self.kind, self._ids = source, index, kind, ids
        self.number = 1
        """Of the next record."""
        self._start()

    def _start(self) -> None:
        self._size = 0
        self.batch = Batch(self._index, self._source.path, self.kind, self.number)
        if self._source.span is not None:
            self.batch.begin = self._source.span[0]
        if self._ids:
            self.batch.ids = []

    def add(self, record: bytes | None, name: str = "") -> Iterator[Batch]:
        """Take a record; yields the batch if that filled it."""
        self.batch.records.append(record)
        if self.batch.ids is not None:
            self.batch.ids.append(name)
        self.number += 1
        self._size += len(record or b"")
        if self._size >= BATCH_BYTES or len(self.batch.records) >= BATCH_RECORDS:
            yield from self.flush()

    def flush(self) -> Iterator[Batch]:
        """Yield what is there, if anything is."""
        if self.batch.records or self.batch.notes:
            yield self.batch
            self._start()


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
    out = Batches(source, index, "json")
    previous: bytes | None = None
    lines = _lines(pieces)
    for line in lines:
        if previous is not None:
            yield from out.add(previous)
        else:
            if line.startswith(BYTE_ORDER_MARK) and not out.batch.begin:
                line = line.removeprefix(BYTE_ORDER_MARK)
                out.batch.notes["bom"] = 1
            if _may_be_array(source) and line.lstrip()[:1] == b"[":
                yield from _array_batches(out, source, b"\n".join([line, *lines]))
                return
        previous = line
    if previous:
        # Not through `add`: a full batch would leave before it is known as unfinished.
        out.batch.records.append(previous)
        out.batch.unfinished = True
    yield from out.flush()


def _may_be_array(source: Source) -> bool:
    """A .json, compressed or not."""
    return source.path.removesuffix(f".{source.compression}").endswith(".json")


def _array_batches(out: Batches, source: Source, data: bytes) -> Iterator[Batch]:
    """One JSON array of objects, read whole; a place is the number of an element."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{source.path}: not valid JSON: {error}", "not_json") from None
    for value in values:
        yield from out.add(json.dumps(value).encode())
    yield from out.flush()


def _text_batches(source: Source, index: int, pieces: Iterator[bytes]) -> Iterator[Batch]:
    data = b"".join(pieces)
    out = Batches(source, index, "text")
    if data.startswith(BYTE_ORDER_MARK):
        out.batch.notes["bom"] = 1
    yield from out.add(data.removeprefix(BYTE_ORDER_MARK))
    yield from out.flush()


def _file_batches(source: Source, index: int, fields: Fields) -> Iterator[Batch]:
    """Batches of one file; its checksum is set after the last one."""
    if source.kind == "hub":
        from data_prep.hub import hub_batches

        yield from hub_batches(source, index)
        return
    # Unbuffered: a signal is seen between any two reads, and pieces are large anyway.
    with open(source.path, "rb", buffering=0) as stream:
        if source.kind == "parquet":
            from data_prep.parquet import parquet_batches

            yield from parquet_batches(source, index, stream, fields)
            stream.seek(0)
            source.sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        else:
            if source.span is not None:
                stream.seek(source.span[0])
            raw = HashingReader(stream, source)
            pieces = pieces_of(source, raw)
            if source.kind == "tar":
                from data_prep.tars import tar_batches

                yield from tar_batches(source, index, pieces, fields)
            else:
                batches = _json_batches if source.kind == "json" else _text_batches
                yield from batches(source, index, pieces)
            raw.finish()


def read_batches(
    sources: list[Source],
    fields: Fields,
    *,
    skip_faults: bool = False,
    start: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """All records of all files in order. After a file's last batch its `sha256` is set.

    Args:
        sources: the files.
        fields: which columns are wanted.
        skip_faults: a file that breaks off ends there, and an empty batch notes it.
        start: (source, record): leave out what comes before; it begins a batch.

    Raises:
        InputError: a file cannot be read, is cut off or broken, or lacks the column of the text.
    """
    for index, source in enumerate(sources):
        if index < start[0]:
            source.bytes_read = source.to_read
            continue
        try:
            for batch in _file_batches(source, index, fields):
                if index > start[0] or batch.first_line >= start[1]:
                    yield batch
        except (InputError, OSError) as error:
            if isinstance(error, InputError):
                fault = error
            else:
                reason = error.strerror or error
                fault = InputError(f"{source.path}: cannot be read: {reason}")
            if not skip_faults:
                raise fault from None
            source.sha256 = sha256_of(source)
            yield Batch(index, source.path, "json", BROKEN, notes={fault.kind: 1})
        source.bytes_read = source.to_read


def sha256_of(source: Source) -> str:
    """Of what is read of a file, its span if it has one; empty if it cannot be read."""
    digest, (begin, end) = hashlib.sha256(), source.span or (0, 1 << 62)
    try:
        with open(source.path, "rb") as stream:
            stream.seek(begin)
            while data := stream.read(min(BATCH_BYTES, end - stream.tell())):
                digest.update(data)
    except OSError:
        return ""
    return digest.hexdigest()


@lru_cache(maxsize=64)
def _lines_before(path: str, begin: int) -> int:
    """Newlines before a place in a file."""
    count = 0
    with open(path, "rb") as stream:
        while data := stream.read(min(BATCH_BYTES, begin - stream.tell())):
            count += data.count(b"\n")
    return count
