"""Writing a checkpoint when the disk may be full: a failure is told to every rank, none hangs.

megatron-core gathers what the writing processes say and raises on all ranks. What only rank 0
writes (folder, index, manifest) is caught here, so that rank 0 comes to the collective calls that
the others wait in.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync
from torch.distributed.checkpoint.api import CheckpointException


def first_problem(problem: str | None) -> str | None:
    """What went wrong on the first rank that had a problem, on every rank; a collective call."""
    problems: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    return next((text for text in problems if text), None)


def attempt(work: Callable[[], Any]) -> str | None:
    """Do `work`; what the file system said against it, or None."""
    try:
        work()
    except OSError as error:
        return f"{error.strerror or error} ({error.filename or 'no file named'})"
    return None


def room_problem(folder: Path, size: int) -> str | None:
    """Why `size` bytes do not fit there, or None. (A quota shows only when it is hit.)"""
    free = shutil.disk_usage(folder).free
    if free < size:
        return f"{folder} has {free / 1e9:.3f} GB free and the last one took {size / 1e9:.3f} GB"
    return None


def finalize(steps: Sequence[Callable[[], None]]) -> str | None:
    """megatron-core's last steps of a checkpoint; what went wrong, or None, on every rank."""
    with _index_failures() as failures:
        problem = None
        for step in steps:
            try:
                step()
            except (CheckpointException, CheckpointingException) as error:
                problem = _short(error)
                break  # raised on every rank
            except OSError as error:  # on rank 0, before a barrier that the others wait in
                problem = str(error)
                dist.barrier()
        return first_problem(problem or next(iter(failures), None))


@contextmanager
def _index_failures() -> Iterator[list[str]]:
    """Rank 0 writes the index before a broadcast: its failure must not keep it from that."""
    failures: list[str] = []
    finish = FileSystemWriterAsync.finish

    def guarded(self: Any, *args: Any) -> None:
        try:
            finish(self, *args)
        except (OSError, RuntimeError) as error:
            failures.append(str(error))

    FileSystemWriterAsync.finish = guarded
    try:
        yield failures
    finally:
        FileSystemWriterAsync.finish = finish


def _short(error: BaseException) -> str:
    failures = getattr(error, "failures", None) or {}
    for rank, (cause, _) in failures.items():
        return f"rank {rank}: {' '.join(str(cause).split())[:300]}"
    return "a writing process failed on another rank" if not str(error) else str(error)[:300]
