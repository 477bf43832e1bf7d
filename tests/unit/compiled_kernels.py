"""Runs in a process of its own, see test_tuning.py: compile for an H200 without one."""

import sys
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs

from megatron_lt2.tuning import compile_ahead
from megatron_lt2.tuning.table import TunedTable
from tests import pretend_gpu


@triton.jit
def add_kernel(x, y, n, BLOCK: tl.constexpr, TWICE: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n)
    if TWICE:
        value += value
    tl.store(y + at, value, mask=at < n)


@triton.jit
def broken_bwd_kernel(x, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK > 64)


def own() -> None:
    """Variants are noted once, compiled by workers, found in the cache; one that fails is named."""
    pretend_gpu.install()
    found: dict[Any, compile_ahead.Variant] = {}

    def launch() -> torch.Tensor:
        x = torch.ones(64)
        y = torch.empty_like(x)
        add_kernel[(1,)](x, y, 64, BLOCK=64, TWICE=True)
        return y

    with compile_ahead.collecting(found):
        assert not launch().any()  # nothing ran, and no garbage to trip over
        launch()
        add_kernel[(1,)](torch.ones(64), torch.empty(64), 64, BLOCK=64, TWICE=False)
        add_kernel[(1,)](torch.ones(64), torch.empty(64), 63, BLOCK=64, TWICE=False)
        broken_bwd_kernel[(1,)](torch.ones(64), BLOCK=64)
    assert [v.name for v in found.values()] == ["add_kernel"] * 3 + ["broken_bwd_kernel"]
    told: list[tuple[str, int, int]] = []
    result = compile_ahead.compile_all(
        list(found.values()),
        2,
        progress=lambda name, s, done, total: told.append((name, done, total)),
    )
    assert result.count == 4 and not result.left and len(result.failures) == 1
    assert result.failures[0].startswith("broken_bwd_kernel: CompileTimeAssertion"), result.failures
    assert [done for _, done, _ in told] == [1, 2, 3, 4]
    assert torch.empty_like.__module__ != "megatron_lt2.tuning.compile_ahead"

    hits: list[bool] = []
    knobs.compilation.listener = lambda **what: hits.append(what["cache_hit"])
    add_kernel.warmup(torch.ones(64), torch.ones(64), 64, BLOCK=64, TWICE=True, grid=(1,))
    add_kernel.warmup(torch.ones(64), torch.ones(64), 63, BLOCK=64, TWICE=False, grid=(1,))
    assert hits == [True, True], hits  # what a launch asks for is what was compiled
    add_kernel.warmup(torch.ones(64), torch.ones(64), 64, BLOCK=32, TWICE=True, grid=(1,))
    assert hits == [True, True, False]

    late = compile_ahead.compile_all(list(found.values()) * 200, 1, deadline=0.0)
    assert late.left > 0 and late.count + late.left == 800


def step() -> None:
    """A step of Gated DeltaNet and attention in bf16, by the code that training runs."""
    pretend_gpu.install()
    import fla.utils  # noqa: F401  (before the platform hides Triton from megatron-core)

    from megatron_lt2.parallel import platform

    platform._stub_triton_import = lambda: None
    platform.install()
    from megatron_lt2.kernels import backend
    from megatron_lt2.model import core_config
    from megatron_lt2.training import rehearsal, setup
    from megatron_lt2.tuning import fill
    from tests.tiny_run import tiny_config

    backend.interpreting = lambda: True  # lets kernels see tensors of the CPU
    setup.resolve_backend = lambda choice, device: "fla"
    setup.resolve_dtype = core_config.resolve_dtype = lambda config, gpu: torch.bfloat16
    config = tiny_config()
    config.model.gdn.head_k_dim, config.model.pattern = 16, ["gdn", "gdn", "full"]
    config.parallel.distributed_optimizer = True
    config.precision.kernels = "fla"
    config.data.sequence_length = 64
    small = rehearsal.one_of_each(config)
    assert small.model.pattern == ["gdn", "full"] and config.model.num_layers == 3

    fill.architecture = lambda: "sm_90"
    table = TunedTable("sm_90")  # knows nothing that is asked for: FLA's first candidates
    table.put("fla.x:y", [1], {"kwargs": {}, "num_warps": 4}, 1.0)
    fill.known_table = lambda architecture: table
    collect, variants = fill.collect, []

    def keep(*args: Any) -> Any:
        found, complaint = collect(*args)
        variants.extend(found)
        return found, complaint

    fill.collect = keep
    cache = Path(knobs.cache.dir)
    arguments = {"force": False, "deadline": float("inf")}
    assert fill.warm(config, cache, 2, **arguments) == 0
    names = {variant.name for variant in variants}
    assert {"chunk_bwd_kernel_dqkwg", "prepare_wy_repr_bwd_kernel"} <= names, names
    cubins = list(cache.rglob("*.cubin"))
    assert len(cubins) == len(variants), (len(cubins), len(variants))
    assert fill.warm(config, cache, 2, **arguments) == 0
    assert len(variants) == len(cubins)  # nothing was collected again


if __name__ == "__main__":
    globals()[sys.argv[1]]()
