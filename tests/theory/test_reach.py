"""A looped window reaches T * N * (w - 1) tokens back, and little of it (LT2, arXiv 2605.20670)."""

import numpy as np
import pytest

from tests.ranks import run_ranks

PLACE = 3
BEYOND = 9
SIZES = [  # window, layers, loops
    (4, 2, 3),
    (2, 3, 4),
    (5, 1, 1),
    (5, 1, 4),
    (3, 2, 2),
    (70, 1, 2),
    (1, 2, 3),
]


def _measure(rank, world, cases):
    from tests.theory.reach import changes, farthest

    results = []
    for sizes, options in cases:
        length = PLACE + farthest(*sizes) + 1 + BEYOND
        results.append(changes(*sizes, **{"place": PLACE, "length": length, **options}))
    return results


@pytest.fixture(scope="module")
def measured():
    return dict(
        zip(SIZES, run_ranks(1, _measure, [(sizes, {}) for sizes in SIZES])[0], strict=True)
    )


def _assert_reach(result, reach):
    """Bit-equal before the changed token and beyond `reach`; changed everywhere between."""
    same = result["same"][0]
    assert same[:PLACE].all()
    assert not same[PLACE : PLACE + reach + 1].any()
    assert len(same) > PLACE + reach + 1 and same[PLACE + reach + 1 :].all()


@pytest.mark.parametrize("sizes", SIZES, ids=lambda s: "w{}-N{}-T{}".format(*s))
def test_reaches_exactly_as_far_as_its_layers_and_loops_carry(measured, sizes):
    window, layers, loops = sizes
    _assert_reach(measured[sizes], loops * layers * (window - 1))


def test_without_loops_it_reaches_one_pass_far():
    """The control: the model of three loops, run once."""
    window, layers, loops = 4, 2, 3
    result = run_ranks(1, _measure, [((window, layers, loops), {"passes": 1})])[0][0]
    _assert_reach(result, layers * (window - 1))
    with pytest.raises(AssertionError):
        _assert_reach(result, loops * layers * (window - 1))


WINDOW, LAYERS = 16, 4


@pytest.fixture(scope="module")
def spread():
    """Size of the change after each token, by (loops, residual), at training's initial weights."""
    cases = {
        (loops, residual): (
            (WINDOW, LAYERS, loops),
            {
                "place": WINDOW,
                "length": WINDOW + LAYERS * 4 * (WINDOW - 1) + 1,
                "rows": 4,
                "width": 64,
                "initial": True,
                "residual": residual,
            },
        )
        for loops in (1, 2, 4)
        for residual in (True, False)
    }
    results = run_ranks(1, _measure, list(cases.values()))[0]
    return {case: result["size"] for case, result in zip(cases, results, strict=True)}


def test_most_of_a_change_stays_within_two_windows(spread):
    from tests.theory.reach import distance_holding, farthest

    for loops in (1, 2, 4):
        held = distance_holding(spread[loops, True], 0.9, WINDOW)
        assert held <= 2 * WINDOW
        assert farthest(WINDOW, LAYERS, loops) >= 3.7 * WINDOW * loops
    # At the far end of what is possible there is next to nothing.
    size = spread[2, True]
    assert 0 < size[WINDOW + farthest(WINDOW, LAYERS, 2)] < 1e-6 * size[WINDOW]


def test_it_is_the_residual_that_keeps_it_there(spread):
    from tests.theory.reach import distance_holding

    for loops in (2, 4):
        with_it, without = (
            distance_holding(spread[loops, residual], 0.9, WINDOW) for residual in (True, False)
        )
        assert without > 2 * loops * WINDOW > with_it
        # With it the token itself changes most, without it least.
        assert spread[loops, True][WINDOW] > spread[loops, True][2 * WINDOW]
        assert spread[loops, False][WINDOW] < spread[loops, False][2 * WINDOW]


def test_more_loops_carry_a_little_farther(spread):
    """Past the reach of one pass, what arrives comes from the loops."""
    from tests.theory.reach import farthest

    beyond = slice(WINDOW + farthest(WINDOW, LAYERS, 1) + 1, None)
    assert not spread[1, True][beyond].any()
    sizes = [np.abs(spread[loops, True][beyond]).max() for loops in (2, 4)]
    assert 0 < sizes[0] < sizes[1]
