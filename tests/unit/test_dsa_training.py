"""DSA's indexer in training: it learns, from its own loss alone, and says how it does."""

from dataclasses import replace

import numpy as np
import pytest

from tests.fp64 import build_in_fp64
from tests.ranks import run_ranks
from tests.tiny_run import feed_of, global_tensors, micro_batch_count, tiny_config
from tests.unit.needle import STEPS, needle_config, train_needle


def _config(recompute=False, **dsa):
    config = tiny_config()
    config.model = replace(config.model, pattern="gdn+dsa", num_layers=2)
    config.model.dsa = replace(config.model.dsa, **dsa)
    config.megatron.ddp = {"grad_reduce_in_fp32": False}
    if recompute:
        config.memory.recompute_layers = 1.0
    config.training.global_batch_size = 2  # two micro-batches: gradients accumulate
    return config


def _gradients(rank, world, configs, step=0):
    """By config: gradients, and the metrics of the step."""
    from megatron_lt2.training.indexers import indexed_layers, indexer_means, prepare_step
    from megatron_lt2.training.steps import _run_schedule

    found = []
    for config in configs:
        parts = build_in_fp64(config)
        prepare_step(config, parts.model, step)
        parts.ddp.zero_grad_buffer()
        count = micro_batch_count(config)
        _run_schedule(config, parts, feed_of(config, range(1)), count, forward_only=False)
        trained = {n for n, p in parts.model.named_parameters() if hasattr(p, "main_grad")}
        gradients = global_tensors(
            parts,
            config,
            lambda p: p.main_grad if hasattr(p, "main_grad") else p.detach() * 0,
            keep_dtype=True,
        )
        dense = [layer.dense for layer in indexed_layers(parts.model)]
        found.append((gradients, indexer_means(config, parts.model), trained, dense))
    return found


def _assert_equal(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())


def test_the_indexer_learns_by_its_loss_alone():
    configs = [_config(loss_weight=weight) for weight in (1.0, 3.0, 0.0)]
    once, thrice, never = run_ranks(1, _gradients, configs)[0]
    names = [name for name in once[0] if ".indexer." in name]
    assert len(names) == 3
    for name, gradient in once[0].items():
        if name in names:
            assert np.abs(gradient).max() > 1e-4
            _assert_equal(thrice[0][name], 3 * gradient)
        else:  # to the bit: nothing of the indexer's loss is in the others
            np.testing.assert_array_equal(thrice[0][name], gradient, err_msg=name)
            np.testing.assert_array_equal(never[0][name], gradient, err_msg=name)
    assert set(names) <= once[2] and not set(names) & never[2]
    assert "indexer_loss" not in never[1]


def test_recomputation_and_accumulation_count_the_loss_once():
    (plain, means, _, _), (again, repeated, _, _) = run_ranks(
        1, _gradients, [_config(), _config(recompute=True)], 9
    )[0]
    for name, gradient in plain.items():
        _assert_equal(again[name], gradient)
    assert means.keys() == repeated.keys()
    for name, value in means.items():
        assert repeated[name] == pytest.approx(value, rel=1e-9), name


def test_stages_and_reports():
    config = _config(dense_steps=9)
    assert config.logging.interval == 10
    sparse = run_ranks(1, _gradients, [config], 9)[0][0]
    dense = run_ranks(1, _gradients, [config], 8)[0][0]
    assert sparse[3] == [False] and dense[3] == [True]
    assert dense[1].keys() == {"indexer_loss"}  # not the step before a report
    assert sparse[1].keys() == {
        "indexer_loss",
        "selected_mass_loop_1",
        "selected_mass_loop_2",
        "selected_overlap_loop_2",
    }
    assert 0 < sparse[1]["indexer_loss"] < dense[1]["indexer_loss"]  # of fewer keys
    for name in sparse[1].keys() - {"indexer_loss"}:
        assert 0.2 < sparse[1][name] < 1, name
    name = "decoder.layers.1.self_attention.in_proj.weight"
    assert np.abs(sparse[0][name] - dense[0][name]).max() > 1e-4


def test_enough_keys_make_the_two_stages_one():
    configs = [_config(top_k=100, dense_steps=0), _config(top_k=100, dense_steps=5)]
    (sparse, *_), (dense, *_) = run_ranks(1, _gradients, configs)[0]
    for name, gradient in dense.items():
        _assert_equal(sparse[name], gradient)


def test_a_model_without_indexers_reports_nothing():
    config = _config()
    config.model.pattern = "gdn+nsa"
    assert run_ranks(1, _gradients, [config])[0][0][1] == {}


@pytest.mark.parametrize("weight", [1.0, 0.0])
def test_recall_of_the_key_that_is_needed(weight):
    """A random selection holds it in about one case of ten; one that learned, always."""
    config = needle_config(loss_weight=weight)
    found = run_ranks(1, train_needle, config, STEPS)[0]
    assert found["before"] < 0.2
    if weight:
        assert found["after"] > 0.95
        assert found["loss"] < 1  # ln 32 = 3.5 without any key
        assert 0 < found["means"]["indexer_loss"] < 1
    else:
        assert found["after"] < 0.2
