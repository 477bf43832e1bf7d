"""Linear mixers by heads over context-parallel ranks: equal to one rank, and what travels.

One layer in fp64, as in test_context_linear.py, and planted faults that the comparison must see.
"""

from dataclasses import replace

import pytest

from megatron_lt2.mixers.registry import recurrent_mixer
from tests.distributed.test_context_linear import (
    BOUND,
    CASES,
    PLAIN,
    WITH_TENSOR,
    _compare,
    _config,
    _errors,
    _layer,
    _traffic,
)
from tests.ranks import run_ranks

BY_HEADS = replace(PLAIN, context_exchange="heads")
ROWS = ("one document", "borders inside", "single tokens at cuts", "two rows")


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, _compare, PLAIN, ROWS)[0]


def _assert_equal(single, ranks, cases, rows):
    for rank in ranks:
        assert len(rank) == len(cases) * len(rows)
        for key, got in rank.items():
            for name, error in _errors(single[key], got).items():
                assert error < BOUND, f"{key}, {name}: relative error {error:.1e}"


def test_a_covering_part_equals_one_rank(single):
    cases, rows = ("kda", "mamba2 normed a head", "retnet", "mlstm"), ("borders inside", "two rows")
    got = run_ranks(4, _compare, replace(BY_HEADS, context=4), rows, cases)
    _assert_equal(single, got, cases, rows)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_equals_one_rank(single, ranks):
    got = run_ranks(ranks, _compare, replace(BY_HEADS, context=ranks), ROWS)
    _assert_equal(single, got, CASES, ROWS)


def test_a_layer_equals_one_rank_with_tensor_parallelism(single):
    rows = ("borders inside",)
    parallel = replace(BY_HEADS, context=2, tensor=2)
    _assert_equal(single, run_ranks(4, _compare, parallel, rows, WITH_TENSOR), WITH_TENSOR, rows)


def _faulty(rank, world, fault):
    from megatron_lt2.mixers import linear_heads

    exchange, of_rank = linear_heads.all_to_all, linear_heads._of_rank
    with pytest.MonkeyPatch.context() as monkeypatch:
        if fault == "output to the wrong heads":

            def rolled(x, group, split_dim, join_dim):
                out = exchange(x, group, split_dim, join_dim)
                return out.roll(1, 2) if join_dim == 2 else out

            monkeypatch.setattr(linear_heads, "all_to_all", rolled)
        elif fault == "parameters of other heads":
            monkeypatch.setattr(linear_heads, "_of_rank", lambda x, g: of_rank(x, g).roll(1, 0))
        elif fault == "gradient of what heads share":

            def detached(sections, shared, group):
                kept = {n: x.detach() if n in shared else x for n, x in sections.items()}
                return whole(kept, shared, group)

            whole = linear_heads._exchanged
            monkeypatch.setattr(linear_heads, "_exchanged", detached)
        parallel = replace(BY_HEADS, context=world)
        return _compare(rank, world, parallel, ("one document",), ("mamba2", "gdn"))


@pytest.mark.parametrize(
    "fault, mixers",
    [
        ("output to the wrong heads", ("mamba2", "gdn")),
        ("parameters of other heads", ("mamba2", "gdn")),
        ("gradient of what heads share", ("mamba2",)),
    ],
)
def test_a_planted_fault_is_seen(single, fault, mixers):
    got = run_ranks(2, _faulty, fault)[0]
    for key, tensors in got.items():
        worst = max(_errors(single[key], tensors).values())
        assert (worst > 1e-3) == (key[0] in mixers), (key, worst)


def _expected(case, length, world):
    """Bytes that a rank puts in, to the heads and back, in fp64."""
    config = _config(case, PLAIN)
    name = CASES[case][0]
    layout = recurrent_mixer(name)(config.model.mixer_settings(name)).layout
    there = sum(
        layout.rows(n) * (world if s.shared else 1) if s.rank is None else layout.width(n)
        for n, s in layout.sections.items()
        if n != layout.gate
    )
    tokens = length // world
    return 8 * tokens * there, 8 * tokens * layout.heads * layout.head_v_dim


def test_two_collectives_a_pass():
    """There and back; the backward pass returns as much."""
    world = 2
    for found in run_ranks(world, _traffic, (64, 256), BY_HEADS):
        assert len(found) == 4 * len(CASES)
        for (case, length, _), (forward, backward) in found.items():
            there, back = _expected(case, length, world)
            name = "all_to_all_single"
            assert forward == [(name, there), (name, back)], case
            assert backward == [(name, back), (name, there)], case


def _undivided(rank, world):
    with pytest.raises(ValueError, match="context_exchange 'heads' cannot spread the 4 heads"):
        _layer("gdn", replace(BY_HEADS, context=3))


def test_heads_that_the_ranks_do_not_divide_are_refused():
    run_ranks(3, _undivided)
