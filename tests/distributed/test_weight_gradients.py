"""Weight gradients under megatron-core's DDP: data-parallel ranks, overlap, several micro-batches.

A looped hybrid with a tied embedding, in fp64 unless said otherwise.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lt2.config.schema import ParallelConfig
from tests.fp64 import loss_and_gradients, weights_after, worst_error
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

BOUND = 1e-10


def _config(**parallel):
    config = tiny_config(parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}))
    config.model = replace(config.model, loops=3)
    config.megatron.ddp = {"grad_reduce_in_fp32": False, "bucket_size": 3001}
    return config  # four sequences a step: two micro-batches on each of two ranks


def _gradients(rank, world, config):
    return loss_and_gradients(config)


def _stepped(rank, world, config):
    """After three steps: megatron-core overlaps from the second on, when it knows the order."""
    return weights_after(config, 3)


@pytest.fixture(scope="module")
def alone():
    return run_ranks(1, _gradients, _config())[0]


def test_overlapping_ranks_get_the_gradients_of_one(alone):
    for got in run_ranks(2, _gradients, _config(overlap_grad_reduce=True)):
        loss, gradient, name = worst_error(got, alone)
        assert loss < 1e-6
        assert gradient < BOUND, f"{name}: relative error {gradient:.1e}"


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_steps_with_overlap_equal_one_rank(share):
    expected = run_ranks(1, _stepped, _config())[0]
    config = _config(overlap_grad_reduce=True)
    config.memory.recompute_layers = share
    for got in run_ranks(2, _stepped, config):
        for name, value in expected.items():
            error = np.abs(got[name] - value).max() / np.abs(value).max()
            assert error < 1e-9, f"{name}: relative error {error:.1e}"


def _faulty(rank, world, config, fault):
    from megatron_lt2.parallel import weight_gradient

    placeholder = weight_gradient._placeholder

    def unmarked(weight):
        given = placeholder(weight)
        weight.grad_added_to_main_grad = False
        return None if given is None else given.fill_(1e-3)

    faults = {"no gradient": lambda weight: None, "unmarked": unmarked}
    weight_gradient._placeholder = faults[fault]
    return loss_and_gradients(config)


def test_a_placeholder_that_counts_is_seen(alone):
    for got in run_ranks(2, _faulty, _config(overlap_grad_reduce=True), "unmarked"):
        assert worst_error(got, alone)[1] > 1e-6


def test_megatron_core_insists_on_a_placeholder():
    with pytest.raises(AssertionError, match="is not safe when overlap_grad_reduce"):
        run_ranks(2, _faulty, _config(overlap_grad_reduce=True), "no gradient")
