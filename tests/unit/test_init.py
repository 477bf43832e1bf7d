"""Initial weights: the declared distributions, the same values on any number of ranks."""

import math

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform
from tests.ranks import run_ranks
from tests.tiny_run import global_tensors, tiny_config

platform.install()

from megatron_lt2.mixers.parameters import Shards  # noqa: E402
from megatron_lt2.mixers.registry import RECURRENT  # noqa: E402
from megatron_lt2.recurrent.initial import constant, truncated_normal  # noqa: E402


def _initial(rank, world, config):
    """Global initial values, without the padding of the vocabulary, and what the padding holds."""
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.setup import build_parts

    start_ranks(config.parallel, config.training.seed)
    parts = build_parts(config)
    values = global_tensors(parts, config, lambda p: p)
    embedding = parts.model.embedding.word_embeddings.weight
    padding = float(embedding[-1].abs().max()) if rank == world - 1 else None
    return values, padding


def _config(tensor=1, **changes):
    config = tiny_config(
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1, distributed_optimizer=False)
    )
    config.model.tie_embeddings = False
    for name, value in changes.items():
        setattr(config.model.init, name, value)
    return config


@pytest.fixture(scope="module")
def initial():
    return run_ranks(1, _initial, _config())[0][0]


def test_same_global_values_on_two_ranks(initial):
    for values, padding in run_ranks(2, _initial, _config(tensor=2)):
        assert padding in (None, 0.0)
        assert values.keys() == initial.keys()
        for name, value in values.items():
            assert np.array_equal(value, initial[name]), name


def test_no_two_matrices_are_alike(initial):
    first = [tuple(v.flatten()[:4]) for n, v in initial.items() if v.ndim == 2 and v.any()]
    assert len(first) > 15
    assert len(set(first)) == len(first)


def test_matrices_are_normal_with_width_to_the_minus_half_cut_at_three_deviations(initial):
    model = _config().model
    checked = 0
    for name, value in initial.items():
        if value.ndim != 2 or "conv1d" in name or "linear_qkv" in name or "residual" in name:
            continue
        std = value.shape[1] ** -0.5
        assert np.abs(value).max() <= 3 * std, name
        # Cutting at three deviations leaves 0.987 of the standard deviation.
        assert value.std() == pytest.approx(0.987 * std, rel=5 / math.sqrt(2 * value.size)), name
        assert abs(value.mean()) < 5 * std / math.sqrt(value.size), name
        checked += 1
    assert checked == 2 + 4 * model.num_layers - 1  # all but the one fused linear_qkv


def test_the_attention_gate_starts_at_zero_and_nothing_else_of_it(initial):
    model = _config().model
    (name,) = [n for n in initial if n.endswith("linear_qkv.weight")]
    head = model.attention_head_dim
    queries = model.num_heads // model.kv_heads * head
    for group in np.split(initial[name], model.kv_heads):
        query, gate, key, value = np.split(group, np.cumsum([queries, queries, head]))
        assert not gate.any()
        for part in (query, key, value):
            assert part.std() == pytest.approx(model.hidden_size**-0.5, rel=0.2)


def test_norms_are_one_and_rho_is_zero(initial):
    norms = [n for n in initial if "norm" in n]
    assert len(norms) == 2 * 3 + 1 + 2
    assert all((initial[n] == 1).all() for n in norms)
    assert initial["decoder.loop_residual"].shape == (2, 32)
    assert not initial["decoder.loop_residual"].any()


def test_decay_and_step_ranges(initial):
    gdn = _config().model.gdn
    for name, value in initial.items():
        if name.endswith("A_log"):
            rates = np.exp(value)
            assert (rates > 0).all() and (rates <= gdn.a_init_max * (1 + 1e-6)).all()
            assert len(set(rates)) == rates.size
        if name.endswith("dt_bias"):
            steps = np.log1p(np.exp(value.astype(np.float64)))
            assert (steps >= gdn.dt_min * 0.999).all() and (steps <= gdn.dt_max * 1.001).all()
        if name.endswith("conv1d.weight"):
            assert np.abs(value).max() <= gdn.conv_size**-0.5
            assert np.abs(value).max() > 0.9 * gdn.conv_size**-0.5


@pytest.fixture(scope="module")
def every_mixer():
    """Global initial values of a model with one layer of each linear mixer, on one rank and two."""

    def values(world):
        config = _config(tensor=world)
        config.model.pattern, config.model.num_layers = list(RECURRENT), len(RECURRENT)
        return [values for values, _ in run_ranks(world, _initial, config)]

    return values(1)[0], values(2)


def test_every_mixer_starts_from_the_same_values_on_two_ranks(every_mixer):
    one, two = every_mixer
    for values in two:
        assert values.keys() == one.keys()
        for name, value in values.items():
            assert np.array_equal(value, one[name]), name


def test_declared_values_of_every_mixer(every_mixer):
    model, (values, _) = _config().model, every_mixer
    heads = model.num_heads
    own = {}
    for number, mixer in enumerate(RECURRENT):
        prefix = f"decoder.layers.{number}.self_attention."
        own |= {(mixer, n.removeprefix(prefix)): v for n, v in values.items() if prefix in n}
    for mixer, low, high in (("gdn", 0, 16), ("kda", 1, 16), ("mamba2", 1, 16)):
        rates = np.exp(own[mixer, "A_log"].astype(np.float64))
        assert rates.shape == (heads,) and len(set(rates)) == heads
        assert (rates > low - 1e-6).all() and (rates <= high * (1 + 1e-6)).all()
        steps = np.log1p(np.exp(own[mixer, "dt_bias"].astype(np.float64)))
        assert (steps >= 1e-3 * 0.999).all() and (steps <= 1e-1 * 1.001).all()
    assert own["kda", "dt_bias"].size == heads * model.hidden_size // heads  # one a key channel
    assert (own["mamba2", "D"] == 1).all()
    assert (own["gla", "decay_bias"] == 0).all()
    assert (own["mlstm", "input_bias"] == -10).all()
    assert own["mlstm", "forget_bias"].tolist() == [3, 4, 5, 6]
    assert (own["kda", "up.gate.bias"] == 0).all()
    bias = np.abs(own["mamba2", "conv1d.bias"])
    assert 0.8 * 0.5 < bias.max() <= 0.5  # 1/sqrt(4 taps)
    norms = {key: v for key, v in own.items() if key[1] == "out_norm.weight"}
    assert len(norms) == len(RECURRENT) and all((v == 1).all() for v in norms.values())
    up = own["gla", "up.decay.weight"]
    assert up.std() == pytest.approx(0.987 * model.gla.rank**-0.5, rel=0.2)


def test_seed_and_settings_matter():
    config = _config(std=0.5, cutoff=1.0)
    config.training.seed += 1
    values = run_ranks(1, _initial, config)[0][0]
    matrix = values["decoder.layers.0.mlp.linear_fc1.weight"]
    assert 0.45 < np.abs(matrix).max() <= 0.5
    config.training.seed += 1
    other = run_ranks(1, _initial, config)[0][0]
    assert not np.array_equal(matrix, other["decoder.layers.0.mlp.linear_fc1.weight"])


def test_shards_of_stacked_sections_take_a_slice_of_each():
    full = torch.arange(12.0)[:, None]
    shards = Shards((4, 8))
    assert shards.local(full, 0, 2).flatten().tolist() == [0, 1, 4, 5, 6, 7]
    assert shards.local(full, 1, 2).flatten().tolist() == [2, 3, 8, 9, 10, 11]


def test_initialisers():
    generator = torch.Generator().manual_seed(1)
    assert constant(2.5)((2, 3), generator).eq(2.5).all()
    values = truncated_normal(0.1, 2.0)((50, 50), generator)
    assert 0.19 < values.abs().max() <= 0.2
    again = truncated_normal(0.1, 2.0)((50, 50), torch.Generator().manual_seed(1))
    assert torch.equal(values, again)


def _undeclared(rank, world, config):
    from megatron_lt2.model.init import initialise
    from tests.tiny_run import build

    model = build(config).model
    model.extra = torch.nn.Parameter(torch.empty(3))
    try:
        initialise(model, config.model, 1)
    except ValueError as error:
        return str(error)
    return None


def test_a_parameter_without_declared_values_is_refused():
    message = run_ranks(1, _undeclared, tiny_config())[0]
    assert message == "parameter extra of shape (3,) declares no initialiser"
