"""Loss and gradients of small models in layouts of ranks that share one GPU, through NCCL in bf16.

    python -m tests.gpu.layout_run WORLD FOLDER      # writes FOLDER/WORLD.pickle
    python -m tests.gpu.layout_run --table           # the table of docs/layouts.md

NCCL takes ranks with different NCCL_HOSTID for ranks of different machines, and then does not mind
that they share a GPU; they talk over loopback sockets. That shows whether the results are right,
not how fast anything is. Gradients are compared with those of one rank in fp32 on plain torch
operations, from the same weights.
"""

import multiprocessing as mp
import os
import pickle
import re
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

PATTERNS = ("gdn", "kda", "mamba2", "full", "gdn+full")
LAYOUTS = {
    "TP 2": (2, {"tensor": 2}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "PP 2": (2, {"pipeline": 2}),
    "CP 2": (2, {"context": 2}),
    "DP 2": (2, {}),
    "CP 2 by heads": (2, {"context": 2, "context_exchange": "heads"}),
    "CP 4": (4, {"context": 4}),
    "TP 2 + SP x CP 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "PP 2 x CP 2": (4, {"pipeline": 2, "context": 2}),
    "PP 2 x DP 2": (4, {"pipeline": 2}),
}
"""Ranks, and settings of `parallel`; the ranks that are left are data-parallel."""
FAULT = "CP 2, no state"
"""Context parallelism whose shards never learn the state before them."""
REFERENCE = "fp32"
STEPS = 5


def make_config(pattern: str, settings: dict[str, Any], dtype: str = "bf16") -> Any:
    """Head sizes of the 1.3B model, two loops, three packed rows of which documents lie across."""
    from megatron_lt2.config.schema import ModelConfig, ParallelConfig
    from tests.tiny_run import tiny_config

    config = tiny_config(parallel=ParallelConfig(overlap_grad_reduce=False, **settings))
    config.model = ModelConfig(
        num_layers=2,
        pattern=pattern,
        hidden_size=512,
        num_heads=4,
        vocab_size=1000,
        loops=2,
        ffn_hidden_size=768,
        tie_embeddings=False,
    )
    config.data.sequence_length = 512
    config.training.global_batch_size = 4
    config.precision.dtype = dtype
    config.precision.kernels = "auto" if dtype == "bf16" else "torch"
    return config


def _few_labels(config: Any, step: int) -> dict[str, Any]:
    """Labels that depend on the token: gradients with a direction, not a sum that cancels."""
    import torch

    from tests.tiny_run import EOD

    generator = torch.Generator().manual_seed(1000 + step)
    shape = (config.training.global_batch_size, config.data.sequence_length)
    tokens = torch.randint(1, config.model.vocab_size, shape, generator=generator)
    tokens[torch.rand(shape, generator=generator) < 0.004] = EOD
    mask = torch.ones(shape)
    return {"tokens": tokens, "labels": tokens % 8 + 1, "loss_mask": mask}


def _start(settings: dict[str, Any], port: int) -> None:
    """Groups of one layout; those of the last one are given back, as each holds GPU memory.

    Ranks meet at another port each time: one used before may answer with what was agreed there.
    """
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_lt2.parallel.start import start_ranks

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.barrier()
        dist.destroy_process_group()
    os.environ["MASTER_PORT"] = str(port)
    config = make_config("full", settings)
    start_ranks(config.parallel, config.training.seed)


def _build(config: Any) -> Any:
    from megatron_lt2.training.setup import build_parts
    from tests import tiny_run

    tiny_run.random_batch = _few_labels
    parts = build_parts(config)
    tiny_run.make_random(parts, config, rounded=True)
    return parts


def measure(pattern: str, settings: dict[str, Any], dtype: str = "bf16") -> dict[str, Any]:
    """The loss and all gradients of one global batch; `_start` has made the groups."""
    from megatron_lt2.training.steps import _run_schedule, mean_over_ranks
    from tests.tiny_run import feed_of, global_tensors, micro_batch_count

    config = make_config(pattern, settings, dtype)
    parts = _build(config)
    # With the distributed optimizer a rank gets the sum of its share of the gradients only.
    finish = type(parts.ddp).finish_grad_sync
    parts.ddp.finish_grad_sync = lambda **_: finish(parts.ddp, force_all_reduce=True)
    parts.ddp.zero_grad_buffer()
    sums = _run_schedule(
        config, parts, feed_of(config, range(1)), micro_batch_count(config), forward_only=False
    )
    gradients = global_tensors(parts, config, lambda p: p.main_grad)
    return {"loss": mean_over_ranks(*sums), **gradients}


def losses(pattern: str, world: int) -> list[float]:
    """Losses of a few optimizer steps with the distributed optimizer, all of it overlapped."""
    from megatron_lt2.training.steps import mean_over_ranks, train_step
    from tests.tiny_run import feed_of, micro_batch_count

    config = make_config(pattern, {})
    config.optimizer.lr = 1e-3
    config.parallel = replace(config.parallel, overlap_grad_reduce=world > 1)
    parts = _build(config)
    feed = feed_of(config, range(STEPS))
    results = [train_step(config, parts, feed, micro_batch_count(config)) for _ in range(STEPS)]
    return [mean_over_ranks(result.loss_sum, result.tokens) for result in results]


def _without_state() -> Any:
    import pytest
    import torch

    from megatron_lt2.mixers import linear_shards

    def empty(own: Any, group: Any, anchor: Any, **_: Any) -> tuple[Any, ...]:
        return tuple(torch.zeros_like(x) for x in own.written)

    patch = pytest.MonkeyPatch()
    patch.setattr(linear_shards, "state_before", empty)
    return patch


def _rank(rank: int, world: int, ports: list[int], output: str) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_RANK": "0",
        "NCCL_HOSTID": f"rank{rank}",
        "MASTER_ADDR": "127.0.0.1",
    }
    from megatron_lt2.parallel import platform

    platform.install()
    if platform.has_gpu():
        from tests.gpu import untuned

        untuned.install()
    found: dict[Any, Any] = {}
    for layout, (ranks, settings) in {"one rank": (1, {}), **LAYOUTS}.items():
        if ranks != world:
            continue
        _start(settings, ports.pop())
        for pattern in PATTERNS:
            found[layout, pattern] = measure(pattern, settings)
            if world == 1:
                found[REFERENCE, pattern] = measure(pattern, {}, "fp32")
            if layout in ("one rank", "DP 2"):
                found["steps", pattern] = losses(pattern, world)
        if layout == "CP 2":
            patch = _without_state()
            found[FAULT, "gdn"] = measure("gdn", settings)
            patch.undo()
        if rank == 0:
            print(f"{layout} done", flush=True)
    if rank == 0:
        Path(output).write_bytes(pickle.dumps(found))
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()


def run_world(world: int, folder: Path) -> dict[Any, Any]:
    """Measure every layout of `world` ranks; a rank's failure ends all of them.

    Raises:
        RuntimeError: a rank failed; its traceback is on stderr.
    """
    import socket

    probes = [socket.socket() for _ in range(1 + len(LAYOUTS))]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    output = folder / f"{world}.pickle"
    context = mp.get_context("spawn")
    ranks = [
        context.Process(target=_rank, args=(rank, world, ports, str(output)))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    waiting = list(ranks)
    while waiting:
        for rank in list(waiting):
            rank.join(timeout=0.2)
            if rank.exitcode is not None:
                waiting.remove(rank)
            if rank.exitcode:
                for other in waiting:
                    other.kill()
                raise RuntimeError(f"a rank of {world} ended with code {rank.exitcode}")
    return pickle.loads(output.read_bytes())


def worst_error(got: dict[str, Any], reference: dict[str, Any]) -> tuple[float, float, str]:
    """Relative error of the loss; the largest relative error of a gradient; whose it is.

    An error is a norm over the largest norm that this parameter's gradient has in any layer: the
    gradients of a few numbers a head are sums that can cancel in one layer.
    """
    assert got.keys() == reference.keys()
    names = [name for name in reference if name != "loss"]
    scale: dict[str, float] = {}
    for name in names:
        kind = _kind(name)
        scale[kind] = max(scale.get(kind, 0.0), float(np.linalg.norm(reference[name])))
    errors = {
        name: float(np.linalg.norm(got[name] - reference[name])) / scale[_kind(name)]
        for name in names
    }
    worst = max(errors, key=errors.__getitem__)
    return abs(got["loss"] / reference["loss"] - 1), errors[worst], worst


def _kind(name: str) -> str:
    return re.sub(r"layers\.\d+\.", "", name)


def main() -> None:
    """One world, or the table of all."""
    if sys.argv[1] != "--table":
        run_world(int(sys.argv[1]), Path(sys.argv[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for world in (1, 2, 4):
            found.update(
                {k: v for k, v in run_world(world, Path(folder)).items() if k[0] != "steps"}
            )
    columns = ["one rank", *LAYOUTS]
    print("| | " + " | ".join(columns) + " |\n|" + "---|" * (1 + len(columns)))
    for pattern in PATTERNS:
        cells = [worst_error(found[name, pattern], found[REFERENCE, pattern]) for name in columns]
        print(
            f"| `{pattern}` | " + " | ".join(f"{gradient:.4f}" for _, gradient, _ in cells) + " |"
        )
        print(f"    {pattern}: loss {max(c[0] for c in cells):.1e}", cells, file=sys.stderr)
    print(FAULT, worst_error(found[FAULT, "gdn"], found[REFERENCE, "gdn"]))


if __name__ == "__main__":
    main()
