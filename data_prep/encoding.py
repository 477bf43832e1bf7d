"""Batches of raw records to tokens, in one process."""

import json
from dataclasses import dataclass, field

import numpy as np

from data_prep.encoders import make_encoder
from data_prep.indexed_shard import MAX_LENGTH, dtype_for
from data_prep.inputs import InputError
from data_prep.pieces import Cutter, NoBoundary
from data_prep.readers import BROKEN, Batch, Fields
from data_prep.records import Document, documents
from megatron_lt2.data.tokenizer import Tokenizer, load_tokenizer

GROUP = 1 << 18
"""Characters that are encoded at a time."""


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    tokenizer_path: str
    tokenizer_sha256: str
    text_key: str = "text"
    append_eod: bool = True
    prepend_bos: bool = False
    id_key: str | None = None
    metadata: bool = False
    min_chars: int = 0
    max_chars: int | None = None
    skip_faults: bool = False
    encoder: str = "tokenizers"

    @property
    def fields(self) -> Fields:
        """Where text and name are."""
        return Fields(self.text_key, self.id_key)


@dataclass
class Result:
    """Tokens of one batch."""

    source_index: int
    next: tuple[int, int] = (0, 1)
    """(source, record) with which the batch after it begins."""
    data: bytes = b""
    """Token ids of all documents, in the dtype of the tokenizer."""
    lengths: list[int] = field(default_factory=list)
    metadata: list[bytes] | None = None
    notes: dict[str, int] = field(default_factory=dict)
    """See `records`."""
    text_bytes: int = 0
    """Undecoded bytes of the batch."""
    fault: str = ""
    """The first fault that was skipped."""

    def note(self, kind: str) -> None:
        """Count one more of a kind."""
        self.notes[kind] = self.notes.get(kind, 0) + 1


class Encoder:
    """Turns batches into results in this process."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None = None) -> None:
        self.job = job
        self.tokenizer = tokenizer or load_tokenizer(job.tokenizer_path)
        if self.tokenizer.sha256 != job.tokenizer_sha256:
            raise InputError(f"{job.tokenizer_path}: changed while this was running")
        self.dtype = np.dtype(dtype_for(self.tokenizer.vocab_size)).newbyteorder("<")
        self.cutter = Cutter(self.tokenizer.backend)
        self.encode = make_encoder(job.encoder, self.tokenizer)

    def __call__(self, batch: Batch) -> Result:
        """Parse and tokenize one batch.

        Raises:
            InputError: see `records.FAULTS`, where faults are not skipped; also a token id outside
                the vocabulary, or a document of more tokens than an index can count.
        """
        result = Result(batch.source_index, next_of(batch), notes=dict(batch.notes))
        result.text_bytes = sum(len(record or b"") for record in batch.records)
        if self.job.metadata:
            result.metadata = []
        kept: list[tuple[Document, list[str]]] = []
        for item in documents(batch, self.job.fields):
            fault = item if isinstance(item, InputError) else None
            if isinstance(item, Document) and self._is_wanted(item.text, result):
                try:
                    kept.append((item, self.cutter.pieces(item.text)))
                except NoBoundary as error:
                    fault = InputError(f"{batch.place(item.line)}: {error}", "no_boundaries")
            if fault is not None:
                if not self.job.skip_faults:
                    raise fault
                result.note(fault.kind)
                result.fault = result.fault or str(fault)
        self._encode(batch, kept, result)
        return result

    def _is_wanted(self, text: str, result: Result) -> bool:
        """Whether a document goes in; counts why not."""
        if not text or text.isspace():
            result.note("empty")
        elif len(text) < self.job.min_chars:
            result.note("short")
        elif self.job.max_chars is not None and len(text) > self.job.max_chars:
            result.note("long")
        else:
            if "\0" in text:
                result.note("nul")
            return True
        return False

    def _encode(self, batch: Batch, kept: list[tuple[Document, list[str]]], result: Result) -> None:
        """Ids of all documents in groups of a bounded number of characters."""
        data: list[bytes] = []
        group: list[Document] = []
        size = 0
        for document, pieces in kept:
            if len(pieces) > 1:
                self._emit(batch, group, data, result)
                group, size = [], 0
                ids = self._long(pieces)
                self._finish(batch, [document], ids, np.array([len(ids)]), data, result)
                continue
            group.append(document)
            size += len(document.text)
            if size >= GROUP:
                self._emit(batch, group, data, result)
                group, size = [], 0
        self._emit(batch, group, data, result)
        result.data = data[0] if len(data) == 1 else b"".join(data)

    def _long(self, pieces: list[str]) -> np.ndarray:
        """Ids of one document in pieces, a few at a time."""
        parts: list[np.ndarray] = []
        some: list[str] = []
        size = 0
        for number, text in enumerate(pieces):
            some.append(text)
            size += len(text)
            if size >= GROUP or number == len(pieces) - 1:
                parts.append(self.encode(some)[0])
                some, size = [], 0
        return np.concatenate(parts)

    def _emit(self, batch: Batch, group: list[Document], data: list[bytes], result: Result) -> None:
        if group:
            ids, counts = self.encode([document.text for document in group])
            self._finish(batch, group, ids, counts, data, result)

    def _finish(
        self,
        batch: Batch,
        group: list[Document],
        ids: np.ndarray,
        counts: np.ndarray,
        data: list[bytes],
        result: Result,
    ) -> None:
        """Put BOS and EOS around documents; checks and counts them.

        Args:
            batch: they come from.
            group: the documents.
            ids: of all of them, one behind the other.
            counts: ids of each.
            data: gets their tokens.
            result: gets everything else.
        """
        tokenizer, job = self.tokenizer, self.job
        ends = np.cumsum(counts)
        self._check_range(batch, group, ids, ends)
        with_eos = np.flatnonzero(ids == tokenizer.eos_id)
        if len(with_eos):
            inside = len(np.unique(np.searchsorted(ends, with_eos, side="right")))
            result.notes["eos_inside"] = result.notes.get("eos_inside", 0) + inside
        if not counts.all():  # a normalizer may leave nothing of a text
            result.notes["empty"] = result.notes.get("empty", 0) + int((counts == 0).sum())
            group = [document for document, n in zip(group, counts.tolist(), strict=True) if n]
            counts = counts[counts > 0]
        lengths = counts + (job.prepend_bos + job.append_eod)
        if len(lengths) and int(lengths.max()) > MAX_LENGTH:
            where = group[int(lengths.argmax())].line
            raise InputError(f"{batch.place(where)}: a document of {lengths.max()} tokens")
        ends = np.cumsum(lengths)
        out = np.empty(int(lengths.sum()), self.dtype)
        body = np.ones(len(out), bool)
        if job.prepend_bos:
            body[ends - lengths] = False
            out[ends - lengths] = tokenizer.bos_id
        if job.append_eod:
            body[ends - 1] = False
            out[ends - 1] = tokenizer.eos_id
        out[body] = ids
        data.append(out.tobytes())
        result.lengths += lengths.tolist()
        if result.metadata is not None:
            for document, length in zip(group, lengths.tolist(), strict=True):
                line = batch.line(document.line)
                said = {"id": document.name or None, "source": batch.path, "line": line}
                said["tokens"] = length
                result.metadata.append(json.dumps(said, ensure_ascii=False).encode())

    def _check_range(
        self, batch: Batch, group: list[Document], ids: np.ndarray, ends: np.ndarray
    ) -> None:
        most = self.tokenizer.vocab_size
        if len(ids) and int(ids.max()) >= most:
            place = int((ids >= most).argmax())
            document = group[int(np.searchsorted(ends, place, side="right"))]
            raise InputError(
                f"{batch.place(document.line)}: token id {ids[place]} is outside the vocabulary "
                f"of {most}"
            )


def next_of(batch: Batch) -> tuple[int, int]:
    """(source, record) with which the batch after this one begins."""
    if batch.first_line == BROKEN:
        return batch.source_index + 1, 1
    return batch.source_index, batch.first_line + len(batch.records)
