"""Compile side by side, before the first step, the kernels that a step would compile one by one.

While `collecting`, a launch only notes which variant of which kernel it needs (argument types,
constants, configuration) and returns: nothing is compiled, and no kernel runs. Its outputs are
zeros, since numbers left in memory could be indices out of bounds to what comes next. So whole
layers, and even steps, are walked through by the code that training runs, and the variants are the
ones that training will ask for, not a guess at them. `compile_all` then forks worker processes that
have the list in their memory and write Triton's cache. They never touch CUDA, so one GPU and its
memory do not limit how many there are.

Why not Triton's own AsyncCompileMode: its threads share one interpreter lock, a launch waits for
its own kernel, and the half of a second that one kernel's Python needs would stay serial. Why not
one process a mixer: each would need seconds and gigabytes for its own torch, FLA and CUDA, and the
slowest mixer would set the time.
"""

import concurrent.futures
import importlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from megatron_lt2.orphans import die_with_parent

MOST_WORKERS = 16
WORKER_BYTES = 10**9
"""Memory that one worker may come to need."""


@dataclass(frozen=True)
class Variant:
    """One kernel with everything that its compilation depends on, as Triton's JIT has it."""

    kernel: Any
    arguments: tuple[Any, ...]

    @property
    def name(self) -> str:
        """The kernel's function."""
        return str(self.kernel.fn.__name__)


@contextmanager
def collecting(found: dict[Any, Variant]) -> Iterator[None]:
    """Within the block kernels are noted in `found`, not compiled and not run.

    Only for a process that is thrown away afterwards: what it computes is garbage.
    """
    jit = importlib.import_module("triton.runtime.jit").JITFunction

    def note(self: Any, key: Any, *arguments: Any) -> None:
        found.setdefault((id(self), key), Variant(self, (key, *arguments)))

    def zeroed(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def allocate_zeros(*args: Any, **options: Any) -> torch.Tensor:
            with torch.no_grad():  # also what asks for a gradient at once
                return allocate(*args, **options).zero_()

        return allocate_zeros

    replaced: list[tuple[Any, str, Any]] = [(jit, "_do_compile", note)]
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        replaced.append((owner, name, zeroed(getattr(owner, name))))
    originals = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    try:
        for owner, name, function in replaced:
            setattr(owner, name, function)
        yield
    finally:
        for owner, name, function in originals:
            setattr(owner, name, function)


@dataclass(frozen=True)
class Compiled:
    """What `compile_all` did. failures: 'kernel: error'. left: variants that time did not allow."""

    count: int
    failures: list[str]
    left: int
    seconds: float


def default_workers() -> int:
    """The cores this process may use, but no more than memory allows."""
    fits = psutil.virtual_memory().available // WORKER_BYTES
    return int(max(1, min(len(os.sched_getaffinity(0)), fits, MOST_WORKERS)))


_work: list[Variant] = []
"""What the forked workers find in their memory: variants cannot be sent through a pipe."""


def compile_all(
    variants: list[Variant],
    workers: int,
    *,
    deadline: float = float("inf"),
    progress: Callable[[str, float, int, int], None] | None = None,
) -> Compiled:
    """Compile `variants` into Triton's cache, `workers` at a time.

    Args:
        variants: of `collecting`; those in the cache already take milliseconds.
        workers: processes.
        deadline: on `time.monotonic()`; what has not begun by then is left.
        progress: is told kernel, seconds, done and total.
    """
    global _work
    started = time.monotonic()
    # Backward kernels take longest; begun last, one of them would run alone at the end.
    _work = sorted(variants, key=lambda variant: "bwd" not in variant.name)
    failures: list[str] = []
    done, left = 0, 0
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("fork"),
        initializer=die_with_parent,
        initargs=(os.getpid(),),
    )
    try:
        futures = [pool.submit(_compile_one, at) for at in range(len(_work))]
        wait = None if deadline == float("inf") else max(0.1, deadline - time.monotonic())
        for future in concurrent.futures.as_completed(futures, timeout=wait):
            name, seconds, error = future.result()
            done += 1
            if error:
                failures.append(f"{name}: {error}")
            if progress is not None:
                progress(name, seconds, done, len(futures))
    except concurrent.futures.TimeoutError:
        left = len(_work) - done
    except concurrent.futures.BrokenExecutor:
        left = len(_work) - done
        failures.append("a compiling process died, perhaps for want of memory")
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        _work = []
    return Compiled(done, failures, left, time.monotonic() - started)


def _compile_one(at: int) -> tuple[str, float, str]:
    variant = _work[at]
    started = time.monotonic()
    try:
        # Without the driver: the target is in the kernel's own cache from when it was collected.
        type(variant.kernel)._do_compile(variant.kernel, *variant.arguments)
    except Exception as error:  # compilers fail in many ways; the others still count
        text = " ".join(str(error).split())
        return variant.name, time.monotonic() - started, f"{type(error).__name__}: {text}"[:300]
    return variant.name, time.monotonic() - started, ""
