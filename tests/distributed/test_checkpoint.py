"""Checkpoints: a resumed run equals an undisturbed one bit for bit, also after resharding."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lt2.config.schema import ParallelConfig
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

PRECISIONS = ("fp32", "bf16")


def _train(rank, world, config, steps, save_at):
    """Train from the newest checkpoint, or from scratch, up to `steps`; save after `save_at`."""
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog
    from megatron_lt2.training.steps import mean_over_ranks, train_step

    parts = build(config, rounded=True)
    log = RunLog(config.run_dir, steps, tensorboard=False, active=rank == 0)
    checkpoints = Checkpointer(config, parts, log)
    first = checkpoints.load_newest()
    feed = feed_of(config, range(first, steps))
    curve = []
    for step in range(first + 1, steps + 1):
        result = train_step(config, parts, feed, micro_batch_count(config))
        curve.append((mean_over_ranks(result.loss_sum, result.tokens), result.grad_norm, parts.lr))
        if step == save_at:
            checkpoints.save(step, background=True)
    checkpoints.close()
    parts.gather_parameters()
    return first, curve, global_tensors(parts, config, lambda p: p)


def _config(tmp_path, dtype, parallel):
    config = replace(tiny_config(), run_dir=str(tmp_path), parallel=parallel)
    config.precision.dtype = dtype
    config.optimizer.weight_decay = 0.1
    config.optimizer.schedule = "cosine"
    config.optimizer.warmup_steps = 2
    return config


@pytest.mark.parametrize(
    "dtype, world, parallel",
    [
        ("fp32", 2, ParallelConfig()),
        ("fp32", 2, ParallelConfig(distributed_optimizer=False)),
        ("fp32", 2, ParallelConfig(tensor=2, sequence=True)),
        ("bf16", 2, ParallelConfig()),
        ("bf16", 2, ParallelConfig(tensor=2, sequence=True)),
        ("bf16", 2, ParallelConfig(overlap_grad_reduce=True)),
    ],
    ids=["dp2", "dp2 replicated", "tp2", "dp2 bf16", "tp2 bf16", "dp2 bf16 overlapped"],
)
def test_resume_is_bit_equal(tmp_path, dtype, world, parallel):
    config = _config(tmp_path, dtype, parallel)
    if parallel.overlap_grad_reduce:
        config.megatron.ddp = {"bucket_size": 3001}  # several buckets, with padding between
    whole = run_ranks(world, _train, config, 6, 3)
    resumed = run_ranks(world, _train, config, 6, None)
    for (first, curve, weights), (again, rest, weights_again) in zip(whole, resumed, strict=True):
        assert (first, again) == (0, 3)
        assert rest == curve[3:]
        assert len({loss for loss, _, _ in curve}) == 6
        for name, weight in weights.items():
            assert np.array_equal(weight, weights_again[name]), name


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_another_layout_reads_it(tmp_path, dtype):
    config = _config(tmp_path, dtype, ParallelConfig(tensor=2, sequence=True))
    config.optimizer.eps = 0.1
    _, _, saved = run_ranks(2, _train, config, 3, 3)[0]
    _, expected, _ = run_ranks(2, _train, config, 5, None)[0]
    for world, parallel in ((1, ParallelConfig()), (2, ParallelConfig())):
        other = replace(config, parallel=parallel)
        first, _, weights = run_ranks(world, _train, other, 3, None)[0]
        assert first == 3
        for name, weight in weights.items():
            assert np.array_equal(weight, saved[name]), name
        _, curve, _ = run_ranks(world, _train, other, 5, None)[0]
        # The second loss has been through an update, so it would show lost optimizer state.
        tolerance = 1e-5 if dtype == "fp32" else 1e-2
        assert [c[0] for c in curve] == pytest.approx([e[0] for e in expected], rel=tolerance)
