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
from multiprocessing import get_context, parent_process

from data_prep.encoding import Encoder, Job, Result
from data_prep.inputs import InputError
from data_prep.readers import Batch
from megatron_lt2.data.tokenizer import Tokenizer

BATCHES_PER_WORKER = 3
"""Batches in flight for each process: enough to keep it busy, and little memory."""
BYTES_IN_FLIGHT = 1 << 26
"""Beyond this much text in flight no more is read, but for one batch."""


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
    with _environment(TOKENIZERS_PARALLELISM="false", RAYON_NUM_THREADS="1", PYTHONSAFEPATH="1"):
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
    pending: deque[tuple[Future[Result], int]] = deque()
    in_flight = 0
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
        size = sum(len(record or b"") for record in batch.records)
        pending.append((pool.submit(_work, batch), size))
        in_flight += size
        del batch
        while len(pending) >= window or (in_flight > BYTES_IN_FLIGHT and len(pending) > 1):
            future, size = pending.popleft()
            in_flight -= size
            yield future.result()
            del future
    while pending:
        yield pending.popleft()[0].result()
    if reading_fault is not None:
        raise reading_fault
