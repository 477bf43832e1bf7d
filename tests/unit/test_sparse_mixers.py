"""What sparse mixers and loop patterns refuse and cost, and that each loop has its own mask."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from megatron_lt2.config.checks import check_config
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ModelConfig, ParallelConfig
from megatron_lt2.kernels.nsa import kernel_problem
from megatron_lt2.model.counting import count_parameters, forward_flops_per_token
from megatron_lt2.parallel import platform
from tests.distributed.test_layouts import _loss_and_gradients
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

platform.install()


def _config(pattern, **settings):
    """settings: of sections of the model, as section__name."""
    config = tiny_config()
    config.model = replace(config.model, pattern=pattern, num_layers=2)
    for name, value in settings.items():
        section, _, field = name.partition("__")
        setattr(getattr(config.model, section), field, value)
    return config


@pytest.mark.parametrize(
    "pattern, settings, message",
    [
        ("nsa", {"nsa__num_kv_heads": 3}, "model.nsa.num_kv_heads 3 does not divide the 4 heads"),
        ("nsa", {"nsa__head_dim": 5}, "model.nsa.head_dim is 5; rotary positions need an even"),
        ("nsa", {"nsa__selected_blocks": 2}, "model.nsa.selected_blocks 2 is too few"),
        ("nsa", {"nsa__window": 0}, "model.nsa.window is 0; it must be greater than 0"),
        ("dsa", {"dsa__rope_dim": 3}, "model.dsa.rope_dim is 3; rotary positions need an even"),
        ("dsa", {"dsa__index_rope_dim": 1}, "model.dsa.index_rope_dim is 1; rotary"),
        ("dsa", {"dsa__index_rope_dim": 6}, "model.dsa.index_rope_dim 6 is more than"),
        ("dsa", {"dsa__top_k": 0}, "model.dsa.top_k is 0; it must be greater than 0"),
        ("dsa", {"dsa__loss_weight": -1.0}, "model.dsa.loss_weight is -1.0; it must be 0 or more"),
        ("dsa", {"dsa__dense_steps": -1}, "model.dsa.dense_steps is -1; it must be 0 or more"),
        ("full->window->full", {}, "has 3 parts for model.loops 2"),
    ],
)
def test_refused_by_the_config(pattern, settings, message):
    with pytest.raises(ConfigError) as error:
        check_config(_config(pattern, **settings), 1)
    assert message in str(error.value)


@pytest.mark.parametrize("pattern", ["nsa", "dsa", "full+[dsa]", "full->window=3"])
def test_accepted_by_the_config(pattern):
    check_config(_config(pattern, dsa__index_rope_dim=0), 1)


@pytest.mark.parametrize(
    "pattern, settings, message",
    [
        ("nsa", {"nsa__num_kv_heads": 1}, "model.nsa.num_kv_heads 1 is not divisible by"),
        ("dsa", {"dsa__latent_dim": 9}, "model.dsa.latent_dim + model.dsa.rope_dim 15 is not"),
        ("dsa", {"dsa__kv": "grouped", "dsa__num_kv_heads": 1}, "model.dsa.num_kv_heads 1 is not"),
    ],
)
def test_tensor_parallelism_needs_what_it_can_cut(pattern, settings, message):
    config = _config(pattern, **settings)
    config.parallel = ParallelConfig(tensor=2, distributed_optimizer=False)
    with pytest.raises(ConfigError) as error:
        check_config(config, 2)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "geometry, message",
    [
        ((16, 1, 64, 16), None),
        ((64, 2, 64, 16), None),
        (
            (16, 2, 64, 16),
            "16 query heads over 2 key heads are 8 a key head; FLA's kernel",
        ),
        ((48, 1, 64, 16), "are 48 a key head"),
        ((16, 1, 16, 16), "blocks of 16 tokens with 16 selected"),
        ((16, 1, 48, 16), "a power of two of at least 32 tokens"),
    ],
)
def test_what_flas_kernel_takes(geometry, message):
    problem = kernel_problem(*geometry)
    assert problem is None if message is None else message in problem


def test_a_geometry_that_the_kernel_does_not_take_is_refused_when_the_model_is_built():
    from megatron_lt2.mixers.nsa_layer import NSAMixer

    settings = ModelConfig(num_heads=16).mixer_settings("nsa")
    settings.num_kv_heads = 2
    with pytest.raises(ValueError, match="model.nsa has 16 query heads over 2 key heads are 8"):
        NSAMixer(None, 1, mixer="nsa", settings=settings, rope=(1e4, False), kernels="fla")


@pytest.mark.parametrize(
    "ranks, settings, message",
    [
        (1, {"num_heads": 32}, None),
        (1, {"num_heads": 48}, "model.dsa has 48 query heads a rank, where the kernels of sparse"),
        (2, {"num_heads": 48}, None),
        (1, {"num_heads": 48, "kv": "grouped"}, None),
        (1, {"latent_dim": 1024}, "model.dsa has 1088 channels of a key"),
        (1, {"index_dim": 300, "kv": "grouped"}, "model.dsa has 300 channels of an indexer's head"),
    ],
)
def test_what_the_kernels_of_dsa_take(ranks, settings, message):
    from megatron_lt2.mixers.dsa_layer import DSAMixer

    found = replace(ModelConfig(num_heads=16).mixer_settings("dsa"), **settings)
    layer = SimpleNamespace(
        settings=found, shared=found.kv == "shared", kernels="fla", tp_size=ranks
    )
    if message is None:
        DSAMixer._check_kernels(layer)
    else:
        with pytest.raises(ValueError, match=message):
            DSAMixer._check_kernels(layer)
        layer.kernels = "torch"
        DSAMixer._check_kernels(layer)


def _loss(pattern, **settings):
    return run_ranks(1, _loss_and_gradients, _config(pattern, **settings))[0][0]


def test_each_loop_has_its_mask():
    full, window = _loss("full"), _loss("window", window__size=3)
    both, other = _loss("full->window=3"), _loss("window=3->full")
    assert _loss("full->window=1000") == pytest.approx(full, rel=1e-6)
    assert _loss("window=3->window=3") == pytest.approx(window, rel=1e-6)
    losses = (full, window, both, other)
    for i, one in enumerate(losses):
        assert all(abs(one - x) > 1e-4 for x in losses[i + 1 :])


def test_costs_of_masks_that_differ_between_loops():
    full, window, both = (
        _config(pattern, window__size=3).model for pattern in ("full", "window", "full->window=3")
    )
    assert count_parameters(full) == count_parameters(both)
    mean = (forward_flops_per_token(full, 24) + forward_flops_per_token(window, 24)) / 2
    assert forward_flops_per_token(both, 24) == pytest.approx(mean)
