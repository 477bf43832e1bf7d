"""Run a function on several gloo ranks, each a process of its own.

The ranks come from a fork server that has imported megatron-core once, so a world starts within
a second.
"""

import multiprocessing as mp
import os
import socket
import traceback
from collections.abc import Callable
from typing import Any

_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.ranks_preload"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _entry(queue: Any, rank: int, world: int, port: int, function: Callable, args: tuple) -> None:
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    import torch

    torch.set_num_threads(1)
    try:
        queue.put((rank, None, function(rank, world, *args)))
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
        raise SystemExit(1) from None


def run_ranks(world: int, function: Callable, *args: Any, timeout: float = 240) -> list[Any]:
    """`function(rank, world, *args)` on `world` ranks; returns their results in rank order.

    Results travel by pickle: give back numpy arrays or plain values. Any rank's failure fails the
    test with that rank's traceback.
    """
    queue = _context.Queue()
    port = _free_port()
    processes = [
        _context.Process(
            target=_entry, args=(queue, rank, world, port, function, args), daemon=False
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    try:
        for _ in processes:
            rank, error, value = queue.get(timeout=timeout)
            assert error is None, f"rank {rank} of {world} failed:\n{error}"
            results[rank] = value
        for process in processes:
            process.join(timeout=30)
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]
