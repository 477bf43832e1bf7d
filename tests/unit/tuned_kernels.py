"""Runs in a process of its own, see test_tuning.py: FLA's autotuners with a table, without a GPU.

Each case prints nothing if it holds. `python tests/unit/tuned_kernels.py CASE`.
"""

import sys
import time
from types import SimpleNamespace
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

from megatron_lt2.tuning import autotuners
from megatron_lt2.tuning.table import TunedTable

NAME = "fla.ops.test:kernel"
PLAIN_RUN = Autotuner.run
SIZES = SimpleNamespace(dtype="torch.bfloat16")


class Kernel:
    """Stands for a compiled kernel: notes with which number of warps it was launched."""

    arg_names = ["x", "n", "flag"]

    def __init__(self, module: str, too_big: tuple[int, ...] = ()) -> None:
        def kernel(x: Any, n: int, flag: bool) -> None: ...

        kernel.__module__, kernel.__qualname__ = module, "kernel"
        self.fn, self.too_big = kernel, too_big
        self.launched: list[int] = []

    def run(self, *args: Any, num_warps: int, **kwargs: Any) -> str:
        if num_warps in self.too_big:
            raise OutOfResources(9, 8, "shared memory")
        self.launched.append(num_warps)
        return "ran"


def tuner(module: str = "fla.ops.test", too_big: tuple[int, ...] = ()) -> tuple[Autotuner, Kernel]:
    """An autotuner of 1, 2, 4 and 8 warps whose benchmark prefers 4."""
    kernel = Kernel(module, too_big)

    def benchmark(call: Any, quantiles: Any) -> list[float]:
        call()
        return [abs(kernel.launched[-1] - 4) + 1.0] * 3

    configs = [triton.Config({"BK": 64}, num_warps=warps) for warps in (1, 2, 4, 8)]
    made = Autotuner(kernel, kernel.arg_names, configs, ["n", "flag"], None, None)
    made._do_bench = benchmark
    autotuners._short_benchmark = benchmark
    return made, kernel


def table(*entries: tuple[tuple[Any, ...], int]) -> TunedTable:
    made = TunedTable("sm_90")
    for key, warps in entries:
        config = {"kwargs": {"BK": 64}, "num_warps": warps, "num_stages": 3, "num_ctas": 1}
        made.put(NAME, (*key, "torch.bfloat16"), config, 1.0)
    return made


def known_key() -> None:
    said: list[str] = []
    autotuners.install(autotuners.Tuning(table(((128, True), 8)), say=said.append))
    made, kernel = tuner()
    assert made.run(SIZES, 128, True) == "ran"
    assert made.run(SIZES, n=128, flag=True) == "ran"
    assert kernel.launched == [8, 8], kernel.launched  # no candidate was tried
    assert not said, said
    assert made.best_config.num_warps == 8


def unknown_key() -> None:
    said: list[str] = []
    autotuners.install(autotuners.Tuning(table(((128, True), 8), ((16, True), 2)), say=said.append))
    made, kernel = tuner()
    made.run(SIZES, 100, True)
    made.run(SIZES, 20, True)
    assert kernel.launched == [8, 2]
    assert len(said) == 1 and NAME in said[0] and "--tune" in said[0], said


def nothing_similar_fits() -> None:
    said: list[str] = []
    autotuners.install(autotuners.Tuning(table(((128, True), 8)), say=said.append))
    made, kernel = tuner(too_big=(8, 1))
    made.run(SIZES, 64, True)
    made.run(SIZES, 64, True)
    assert kernel.launched == [2, 2], kernel.launched
    made, kernel = tuner(too_big=(1, 2, 4, 8))
    try:
        made.run(SIZES, 64, True)
    except RuntimeError as error:
        assert "fits this GPU" in str(error)
    else:
        raise AssertionError("ran")


def other_package() -> None:
    autotuners.install(autotuners.Tuning(table(((128, True), 8))))
    made, kernel = tuner(module="flashy.ops")
    made.run(SIZES, 128, True)
    assert kernel.launched == [1, 2, 4, 8, 4], kernel.launched  # Triton's own search


def search() -> None:
    found, kept = TunedTable("sm_90"), []
    tuning = autotuners.Tuning(
        table(((128, True), 8)), search=True, found=found, kept=lambda: kept.append(len(found))
    )
    autotuners.install(tuning)
    made, kernel = tuner()
    made.run(SIZES, 128, True)
    assert kernel.launched == [8] and not found  # known already
    made.run(SIZES, 64, True)
    assert kernel.launched[-5:] == [1, 2, 4, 8, 4]
    entry = found.entries[NAME]['[64, true, "torch.bfloat16"]']
    assert entry["config"]["num_warps"] == 4 and entry["ms"] == 1.0 and kept == [1]
    other, kernel = tuner()
    other.run(SIZES, 64, True)
    assert kernel.launched == [4]  # what was found is used by the next


def no_time() -> None:
    found = TunedTable("sm_90")
    tuning = autotuners.Tuning(
        table(((128, True), 8)), search=True, found=found, deadline=time.monotonic() - 1
    )
    autotuners.install(tuning)
    made, kernel = tuner()
    made.run(SIZES, 64, True)
    assert kernel.launched == [8] and not found


def all_candidates() -> None:
    autotuners.install(autotuners.Tuning(table(((128, True), 8)), all_candidates=True))
    made, kernel = tuner()
    made.run(SIZES, 128, True)
    made.run(SIZES, 64, True)
    assert kernel.launched == [8, 1, 2, 4, 8] and len(made.cache) == 1


def other_fla() -> None:
    """A table whose choice is none of the kernel's candidates is not believed."""
    said: list[str] = []
    autotuners.install(autotuners.Tuning(table(((128, True), 16)), say=said.append))
    made, kernel = tuner()
    made.run(SIZES, 128, True)
    assert kernel.launched == [1] and said


def wrong_version() -> None:
    autotuners.TRITON = "3.7"
    assert not autotuners.supported()
    try:
        autotuners.install(autotuners.Tuning(table()))
    except RuntimeError as error:
        assert "3.7" in str(error)
    else:
        raise AssertionError("installed")
    assert Autotuner.run is PLAIN_RUN


def given_back() -> None:
    autotuners.install(autotuners.Tuning(table(((128, True), 8))))
    assert Autotuner.run is not PLAIN_RUN
    autotuners.install(None)
    assert Autotuner.run is PLAIN_RUN


if __name__ == "__main__":
    for case in sys.argv[1:]:
        globals()[case]()
