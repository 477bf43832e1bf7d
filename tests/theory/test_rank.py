"""Looping raises the rank of what one token does to the state (LT2, arXiv 2605.20670).

T loops apply prod_t A_t at a token. Beyond the decay that is a change of rank T when the loops'
keys are orthogonal, and of rank 1 when they are equal, if the decay is a scalar. KDA's decay is a
diagonal, which turns equal keys into different ones on the way: its rank is T in both cases.
"""

import numpy as np
import pytest

from tests.ranks import run_ranks

MIXERS = ("gdn", "deltanet", "kda")
SCALAR = ("gdn", "deltanet")
LOOPS = (1, 2, 3, 4)
ZERO = 1e-13
"""Rounding of fp64, relative to the largest singular value."""


def _measure(rank, world, cases):
    from tests.theory.transitions import singular_values

    return [singular_values(*case, **options) for case, options in cases]


@pytest.fixture(scope="module", params=MIXERS)
def measured(request):
    mixer = request.param
    cases = [
        ((mixer, loops, keys), {}) for loops in LOOPS for keys in ("random", "orthogonal", "equal")
    ]
    results = run_ranks(1, _measure, cases)[0]
    return mixer, {case[1:]: result for (case, _), result in zip(cases, results, strict=True)}


def _assert_rank(result, rank, smallest):
    """The first `rank` singular values are above `smallest`, the others rounding."""
    singular = result["singular"]
    assert singular.shape == (4, 8)
    assert (singular[:, :rank] > smallest).all(), singular
    assert (singular[:, rank:] < ZERO).all(), singular


@pytest.mark.parametrize("loops", LOOPS)
def test_orthogonal_keys_give_rank_t(measured, loops):
    _, results = measured
    result = results[loops, "orthogonal"]
    keys = result["keys"]
    products = np.einsum("thk,shk->hts", keys, keys)
    np.testing.assert_allclose(products, np.broadcast_to(np.eye(loops), products.shape), atol=1e-12)
    _assert_rank(result, loops, 1e-2)


@pytest.mark.parametrize("loops", LOOPS)
def test_keys_of_random_parameters_give_rank_t_too(measured, loops):
    _, results = measured
    _assert_rank(results[loops, "random"], loops, 1e-3)


@pytest.mark.parametrize("loops", LOOPS)
def test_equal_keys_give_rank_one_under_a_scalar_decay_only(measured, loops):
    mixer, results = measured
    result = results[loops, "equal"]
    keys = result["keys"]
    np.testing.assert_allclose(keys, np.broadcast_to(keys[:1], keys.shape), atol=1e-12)
    if mixer in SCALAR:
        _assert_rank(result, 1, 0.5)
    else:
        # Small, but a million times rounding: the decays of a head's channels differ little.
        _assert_rank(result, loops, 1e-7)


def test_decays_are_of_the_kind_that_the_claim_is_about(measured):
    mixer, results = measured
    decay = results[4, "equal"]["decay"]
    diagonal = np.einsum("thkk->thk", decay)
    np.testing.assert_array_equal(decay, diagonal[..., None] * np.eye(8))
    assert (diagonal > 0).all() and (diagonal <= 1).all()
    spread = diagonal.max(-1) - diagonal.min(-1)
    if mixer in SCALAR:
        assert spread.max() < 1e-15
    else:
        assert spread.min() > 1e-2


def test_it_is_the_diagonal_that_keeps_equal_keys_apart():
    """KDA with one decay for all channels is the scalar case."""
    result = run_ranks(1, _measure, [(("kda", 4, "equal"), {"even": True})])[0][0]
    _assert_rank(result, 1, 0.5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_without_loops_the_rank_is_one(mixer):
    """The control: the same model, its keys set for four loops, but run once."""
    result = run_ranks(1, _measure, [((mixer, 4, "orthogonal"), {"passes": 1})])[0][0]
    assert len(result["keys"]) == 1
    _assert_rank(result, 1, 0.5)
    with pytest.raises(AssertionError):
        _assert_rank(result, 4, 1e-2)
