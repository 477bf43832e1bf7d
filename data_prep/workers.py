"""Batches of raw records to tokens, in the order they came, whatever the number of processes.

A bounded window of batches is in flight; results are taken strictly in order, so output and errors
do not depend on timing: the fault reported is always the first one in the input. Processes are
started by spawn, because a fork of a process with threads (pyarrow, tokenizers) may deadlock.
"""

import os
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process

import numpy as np

from data_prep.readers import Batch, InputError
from data_prep.records import document_texts
from data_prep.writer import MAX_LENGTH, dtype_for
from megatron_lt2.data.tokenizer import Tokenizer, load_tokenizer

BATCHES_PER_WORKER = 3
"""Batches in flight for each process: enough to keep it busy, and little memory."""


@dataclass(frozen=True)
class Job:
    """What every worker needs to know."""

    tokenizer_path: str
    tokenizer_sha256: str
    text_key: str
    append_eod: bool


@dataclass
class Result:
    """Tokens of one batch."""

    source_index: int
    data: bytes = b""
    """Token ids of all documents, in the dtype of the tokenizer."""
    lengths: list[int] = field(default_factory=list)
    skipped_empty: int = 0
    with_eos_inside: int = 0
    """Documents whose own text contains the EOS token."""
    text_bytes: int = 0


class Encoder:
    """Turns batches into results in this process."""

    def __init__(self, job: Job, tokenizer: Tokenizer | None = None) -> None:
        self.job = job
        self.tokenizer = tokenizer or load_tokenizer(job.tokenizer_path)
        if self.tokenizer.sha256 != job.tokenizer_sha256:
            raise InputError(f"{job.tokenizer_path}: changed while this was running")
        self.dtype = np.dtype(dtype_for(self.tokenizer.vocab_size)).newbyteorder("<")

    def __call__(self, batch: Batch) -> Result:
        """Parse and tokenize one batch.

        Raises:
            InputError: see `document_texts`; also a token id outside the vocabulary, or a document
                of more tokens than an index can count.
        """
        result = Result(batch.source_index)
        lines, texts = [], []
        for line, text in document_texts(batch, self.job.text_key):
            if text.strip():
                lines.append(line)
                texts.append(text)
            else:
                result.skipped_empty += 1
        pieces = []
        eos_id = self.tokenizer.eos_id
        for line, ids in zip(lines, self.tokenizer.encode_batch(texts), strict=True):
            if not ids:  # a normalizer may leave nothing of a text
                result.skipped_empty += 1
                continue
            document = np.empty(len(ids) + self.job.append_eod, dtype=np.int64)
            document[: len(ids)] = ids
            if self.job.append_eod:
                document[-1] = eos_id
            if document.max() >= self.tokenizer.vocab_size or document.min() < 0:
                raise InputError(
                    f"{batch.path}:{line}: token id {document.max()} is outside the vocabulary "
                    f"of {self.tokenizer.vocab_size}"
                )
            if len(document) > MAX_LENGTH:
                raise InputError(f"{batch.path}:{line}: a document of {len(document)} tokens")
            result.with_eos_inside += bool((document[: len(ids)] == eos_id).any())
            pieces.append(document.astype(self.dtype).tobytes())
            result.lengths.append(len(document))
        result.data = b"".join(pieces)
        result.text_bytes = sum(map(len, texts))
        return result


_job: Job | None = None
_encoder: Encoder | None = None


def _leave_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _start_worker(job: Job) -> None:
    global _job
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _job = job


def _work(batch: Batch) -> Result:
    global _encoder
    if (
        _encoder is None
    ):  # here and not at the start, so that a fault of it is reported as any other
        assert _job is not None
        _encoder = Encoder(_job)
    return _encoder(batch)


@contextmanager
def _environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def encode_all(
    batches: Iterator[Batch], job: Job, workers: int, tokenizer: Tokenizer | None = None
) -> Generator[Result, None, None]:
    """Results of all batches, in order.

    Args:
        batches: read lazily, never far ahead of the results.
        job: what to do.
        workers: processes; 1 works in this one.
        tokenizer: used in this process instead of loading it again.

    Raises:
        InputError: the first fault of the input, in input order.
        RuntimeError: a worker process died.
    """
    # Parallel within a batch as well would only let processes compete for the same cores.
    # PYTHONSAFEPATH keeps the current folder, which may hold a tokenize.py, off a worker's path.
    with _environment(TOKENIZERS_PARALLELISM="false", PYTHONSAFEPATH="1"):
        if workers == 1:
            yield from map(Encoder(job, tokenizer), batches)
            return
        pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (job,))
        try:
            yield from _in_order(pool, batches, workers * BATCHES_PER_WORKER)
        except BrokenProcessPool:
            raise RuntimeError(
                "a worker process died, perhaps for lack of memory; try fewer --workers"
            ) from None
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, batches: Iterator[Batch], window: int) -> Iterator[Result]:
    pending: deque[Future[Result]] = deque()
    reading_fault: InputError | None = None
    while reading_fault is None:
        try:
            batch = next(batches, None)
        except InputError as fault:
            # Documents read before it come first; one of them may have an earlier fault.
            reading_fault = fault
            break
        if batch is None:
            break
        pending.append(pool.submit(_work, batch))
        if len(pending) >= window:
            yield pending.popleft().result()
    while pending:
        yield pending.popleft().result()
    if reading_fault is not None:
        raise reading_fault
