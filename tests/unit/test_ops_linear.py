"""Feature maps against their formulas; test_ops_recurrences.py tests the recurrence."""

import pytest
import torch

from megatron_lt2.ops.linear import (
    FEATURE_MAPS,
    chunk_normalized_linear_attention,
    feature_map,
)

FORMULAS = {
    "elu1": lambda x: torch.where(x > 0, x + 1, x.exp()),
    "relu": lambda x: x * (x > 0),
    "silu": lambda x: x / (1 + (-x).exp()),
    "identity": lambda x: x,
    "softmax": lambda x: x.exp() / x.exp().sum(-1, keepdim=True),
}


@pytest.mark.parametrize("name", FEATURE_MAPS)
def test_formula(name: str) -> None:
    x = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(feature_map(x, name), FORMULAS[name](x))
    half = feature_map(x.bfloat16(), name)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, feature_map(x.bfloat16().float(), name).bfloat16())


def test_unknown_map_is_refused() -> None:
    with pytest.raises(ValueError, match="elu1, relu.*not 'tanh'"):
        feature_map(torch.zeros(1), "tanh")


def test_weights_sum_to_one() -> None:
    """With equal values everywhere the output is that value."""
    random = torch.Generator().manual_seed(0)
    q, k = (feature_map(torch.randn(2, 90, 3, 8, generator=random), "elu1") for _ in range(2))
    value = torch.tensor([2.0, -1.0, 0.5])
    o, _ = chunk_normalized_linear_attention(q, k, value.expand(2, 90, 3, 3))
    torch.testing.assert_close(o, value.expand_as(o))


def test_epsilon_bounds_the_division_and_scale_counts_against_it() -> None:
    q, k, v = torch.full((1, 1, 1, 4), 1e-3), torch.full((1, 1, 1, 4), 1e-3), torch.ones(1, 1, 1, 2)
    for scale in (1.0, 10.0):
        o, _ = chunk_normalized_linear_attention(q, k, v, eps=1e-6, scale=scale)
        weight = 4e-6 * scale
        torch.testing.assert_close(o, torch.full_like(v, weight / (weight + 1e-6)))
