"""Entropy of a token stream."""

import math

import numpy as np
import pytest

from megatron_lt2.data.statistics import unigram_entropy


def test_uniform_constant_and_skewed_streams():
    assert unigram_entropy(np.arange(7, dtype=np.uint16)) == pytest.approx(math.log(7), abs=1e-12)
    assert unigram_entropy(np.full(5, 65535, dtype=np.uint16)) == 0.0
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert unigram_entropy(np.array([[3, 3], [70000, 3]])) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tokens", [np.array([], dtype=np.int32), np.array([0.5])])
def test_refused(tokens):
    with pytest.raises(ValueError, match="unigram_entropy needs"):
        unigram_entropy(tokens)
