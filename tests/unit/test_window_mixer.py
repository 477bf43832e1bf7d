"""The window layer in a model: costs, refusals, tensor parallelism, and what size it really has."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import ParallelConfig, WindowConfig
from megatron_lt2.parallel import platform
from tests.distributed.test_layouts import _loss_and_gradients
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

platform.install()

from megatron_lt2.mixers.registry import get_mixer  # noqa: E402
from megatron_lt2.mixers.window import mean_keys  # noqa: E402

LAYOUTS = {
    "tp2": ParallelConfig(tensor=2, distributed_optimizer=False),
    "tp2 with sequence parallelism": ParallelConfig(
        tensor=2, sequence=True, distributed_optimizer=False
    ),
}


def _config(pattern="window", size=5, **changes):
    config = tiny_config(**changes)
    config.model = replace(config.model, pattern=pattern, window=WindowConfig(size=size))
    return config


@pytest.fixture(scope="module", params=["window", "2*gdn+window"])
def single_rank(request):
    return request.param, run_ranks(1, _loss_and_gradients, _config(request.param))[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensor_parallel_equals_single_rank(single_rank, layout):
    pattern, (expected_loss, expected) = single_rank
    config = _config(pattern, parallel=LAYOUTS[layout])
    for loss, gradients in run_ranks(2, _loss_and_gradients, config):
        assert loss == pytest.approx(expected_loss, rel=1e-6)
        assert gradients.keys() == expected.keys()
        for key, gradient in gradients.items():
            largest = np.abs(expected[key]).max()
            assert largest > 1e-6, f"{key} gets no gradient"
            error = np.abs(gradient - expected[key]).max() / largest
            assert error < 4e-5, f"{key}: relative gradient error {error:.1e}"


def test_a_wide_window_is_full_attention_and_a_narrow_one_is_not():
    losses = {
        (pattern, size): run_ranks(1, _loss_and_gradients, _config(pattern, size))[0][0]
        for pattern, size in (("full", 5), ("window", 24), ("window", 1000), ("window", 5))
    }
    full = losses["full", 5]
    assert losses["window", 24] == pytest.approx(full, rel=1e-6)
    assert losses["window", 1000] == pytest.approx(full, rel=1e-6)
    assert abs(losses["window", 5] - full) > 1e-3


def _refusal(rank, world, config):
    from tests.tiny_run import build

    try:
        build(config)
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.parametrize("size", [0, -3, 2.5])
def test_refuses_a_window_that_is_none(size):
    refusal = run_ranks(1, _refusal, _config(size=size))[0]
    assert refusal.startswith(f"model.window.size is {size}; a token sees at least itself")


@pytest.mark.parametrize("length, size", [(1, 1), (1, 9), (9, 1), (30, 7), (7, 30), (7, 7)])
def test_mean_keys_counts_the_pairs(length, size):
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    pairs = ((distance >= 0) & (distance < size)).sum().item()
    assert mean_keys(length, size) == pytest.approx(pairs / length)


def test_costs_are_those_of_full_attention_up_to_the_window():
    model = _config(size=16).model
    window, full = get_mixer("window"), get_mixer("full")
    assert window.parameters(model) == full.parameters(model) > 0
    assert window.heads(model) == full.heads(model)
    assert window.token_flops(model, 16) == full.token_flops(model, 16)
    assert window.token_flops(model, 64) < full.token_flops(model, 64) / 2
    # Far beyond the window every token sees 16 keys.
    assert window.token_flops(model, 10**6) == pytest.approx(
        2 * 2 * model.num_heads * model.attention_head_dim * 16, rel=1e-4
    )
