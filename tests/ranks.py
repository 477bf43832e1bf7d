"""Run a function on several gloo ranks, each a process of its own.

The ranks come from a fork server that has imported megatron-core once, so a world starts within
a second. They meet at a store that this process serves: its port is bound once and kept, so nobody
else can take it in between.
"""

import multiprocessing as mp
import os
import queue as queues
import time
import traceback
from collections.abc import Callable
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.ranks_preload"])

SILENT_S = 1.0
"""So long a failed rank waits to be blamed: another that died without a word may be the cause."""


def _entry(queue: Any, rank: int, world: int, port: int, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        # torch's name for: the store of MASTER_PORT is there already, do not serve one.
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    import torch

    torch.set_num_threads(1)
    try:
        queue.put((rank, None, function(rank, world, *args)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
        raise SystemExit(RAISED) from None


RAISED = 1
"""Exit code of a rank that has put its traceback into the queue."""


def _dead(processes: list[Any], reported: set[int], but: int | None = None) -> str | None:
    """Which ranks ended without a report, and how; those with the code `but` do not count."""
    found = []
    for rank, process in enumerate(processes):
        code = process.exitcode
        if code is not None and code != but and rank not in reported:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            found.append(f"rank {rank} of {len(processes)} died without a word: {how}")
    return "; ".join(found) or None


def _next_report(queue: Any, processes: list[Any], reported: set[int], timeout: float) -> Any:
    """What a rank has put in; fails soon after one has died instead."""
    end, suspect = time.monotonic() + timeout, None
    while True:
        try:
            return queue.get(timeout=0.2)
        except queues.Empty:
            dead = _dead(processes, reported)
            # Looked at twice: what a rank said last may still be on its way.
            assert dead is None or dead != suspect, dead
            suspect = dead
            assert time.monotonic() < end, f"no rank has reported for {timeout:.0f} s"


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = 240) -> list[Any]:
    """`function(rank, world, *args)` on `world` ranks; returns their results in rank order.

    Results travel by pickle: give back numpy arrays or plain values. Any rank's failure fails the
    test with that rank's traceback, or with the name of one that died without.
    """
    from torch.distributed import TCPStore

    queue = _context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        _context.Process(
            target=_entry, args=(queue, rank, world, store.port, function, args), daemon=False
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, error, value = _next_report(queue, processes, set(results), timeout)
            if error is not None:
                time.sleep(SILENT_S)
                dead = _dead(processes, {*results, rank}, but=RAISED)
                blamed = f"{dead}\n" if dead else ""
                raise AssertionError(f"{blamed}rank {rank} of {world} failed:\n{error}")
            results[rank] = value
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]
