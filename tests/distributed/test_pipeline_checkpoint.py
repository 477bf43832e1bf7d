"""Checkpoints of a pipeline: resumed bit for bit, and read under any other layout, moments too."""

from dataclasses import replace

import numpy as np
import pytest

from checkpoints_tools.plain_checkpoint import PlainCheckpoint
from megatron_lt2.config.schema import ParallelConfig
from tests.distributed.test_checkpoint import _config, _train
from tests.ranks import run_ranks
from tests.tiny_run import build, global_tensors

SPLITS = {
    "fp32": ("fp32", 2, "gdn+full", ParallelConfig(pipeline=2)),
    "replicated optimizer": (
        "fp32",
        2,
        "gdn+full",
        ParallelConfig(pipeline=2, distributed_optimizer=False),
    ),
    # Rank 0 has no fp32 parameters of a mixer, the last stage has: their groups differ.
    "bf16, mixers apart": ("bf16", 2, ["full", "full", "kda"], ParallelConfig(pipeline=2)),
    "two replicas": ("bf16", 4, "gdn+full", ParallelConfig(pipeline=2)),
}


SLOW = ("fp32", "replicated optimizer", "two replicas")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in SPLITS]
)
def test_resume_is_bit_equal(tmp_path, name):
    dtype, world, pattern, parallel = SPLITS[name]
    config = _config(tmp_path, dtype, parallel)
    config.model.pattern = pattern
    whole = run_ranks(world, _train, config, 6, 3)
    resumed = run_ranks(world, _train, config, 6, None)
    for (first, curve, weights), (again, rest, weights_again) in zip(whole, resumed, strict=True):
        assert (first, again) == (0, 3)
        assert rest == curve[3:]
        assert len({loss for loss, _, _ in curve}) == 6
        assert curve == whole[0][1]  # the loss of the last stage is known on all
        for key, weight in weights.items():
            assert np.array_equal(weight, weights_again[key]), key


def _save_again(rank, world, config, folder):
    """Load the newest checkpoint and write it, unchanged, to `folder` under this layout."""
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog

    parts = build(config)
    log = RunLog(config.run_dir, 10, tensorboard=False, active=rank == 0)
    checkpoints = Checkpointer(config, parts, log)
    step = checkpoints.load_newest()
    checkpoints.folder, checkpoints.saved_step = folder / "checkpoints", None
    checkpoints.save(step, background=False)
    checkpoints.close()
    return global_tensors(parts, config, lambda p: p)


def _tensors(run):
    (folder,) = (run / "checkpoints").glob("iter_*")
    return PlainCheckpoint(folder)


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
def test_weights_and_moments_pass_through_every_layout(tmp_path, dtype):
    import torch

    config = _config(tmp_path / "stages", dtype, ParallelConfig(pipeline=2))
    _, _, trained = run_ranks(2, _train, config, 3, 3)[0]
    saved, source = _tensors(tmp_path / "stages"), tmp_path / "stages"
    assert sum("exp_avg_sq" in name for name in saved) > 20
    layouts = {
        "one": (1, ParallelConfig()),
        "tensor": (2, ParallelConfig(tensor=2, sequence=True)),
        "replicas": (4, ParallelConfig(pipeline=2, pipeline_layers=[1, 2])),
    }
    if dtype == "fp32":  # the slow one does them all
        del layouts["replicas"]
    for name, (world, parallel) in layouts.items():
        config = replace(config, run_dir=str(source), parallel=parallel)
        weights = run_ranks(world, _save_again, config, tmp_path / name)[0]
        source, again = tmp_path / name, _tensors(tmp_path / name)
        for key, weight in trained.items():
            assert np.array_equal(weights[key], weight), (name, key)
        assert set(again) == set(saved), name
        for key in saved:
            assert torch.equal(again[key], saved[key]), (name, key)


@pytest.mark.slow
def test_training_goes_on_as_before_under_another_layout(tmp_path):
    config = _config(tmp_path, "fp32", ParallelConfig(pipeline=2))
    config.optimizer.eps = 0.1
    run_ranks(2, _train, config, 3, 3)
    _, expected, _ = run_ranks(2, _train, config, 5, None)[0]
    for world, parallel in ((1, ParallelConfig()), (2, ParallelConfig(tensor=2, sequence=True))):
        first, curve, _ = run_ranks(world, _train, replace(config, parallel=parallel), 5, None)[0]
        assert first == 3
        # The second loss has been through an update, so it would show lost optimizer state.
        assert [c[0] for c in curve] == pytest.approx([e[0] for e in expected], rel=1e-5)
