"""Rotary embedding against a product of complex numbers."""

import pytest
import torch
from torch import Tensor

from megatron_lt2.ops.rope import apply_rope, rope_cos_sin

THETA, DIM = 100.0, 6


def rotate_complex(x: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """Each pair of channels as a complex number times exp(i * position * frequency)."""
    frequency = THETA ** (-torch.arange(0, DIM, 2, dtype=torch.float64) / DIM)
    angle = positions[..., None, None].double() * frequency
    if interleaved:
        pairs = torch.complex(x[..., 0::2], x[..., 1::2])
    else:
        pairs = torch.complex(x[..., : DIM // 2], x[..., DIM // 2 :])
    rotated = pairs * torch.polar(torch.ones_like(angle), angle)
    parts = (rotated.real, rotated.imag)
    return torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)


def make() -> tuple[Tensor, Tensor]:
    x = torch.randn(2, 5, 3, DIM, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return x, torch.tensor([[0, 1, 2, 3, 4], [0, 1, 0, 1, 40]])


@pytest.mark.parametrize("interleaved", [False, True])
def test_equals_complex_rotation(interleaved: bool) -> None:
    x, positions = make()
    cos, sin = rope_cos_sin(positions, DIM, THETA)
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == sin.shape == (2, 5, DIM)
    y = apply_rope(x, cos, sin, interleaved=interleaved)
    torch.testing.assert_close(y, rotate_complex(x, positions, interleaved), rtol=1e-5, atol=1e-5)


def test_layouts_differ_by_a_permutation_only() -> None:
    x, positions = make()
    cos, sin = rope_cos_sin(positions, DIM, THETA)
    half = apply_rope(x, cos, sin)
    assert not torch.allclose(half, apply_rope(x, cos, sin, interleaved=True))
    neighbours = x.unflatten(-1, (2, DIM // 2)).transpose(-1, -2).flatten(-2)
    expected = half.unflatten(-1, (2, DIM // 2)).transpose(-1, -2).flatten(-2)
    torch.testing.assert_close(apply_rope(neighbours, cos, sin, interleaved=True), expected)


def test_scores_depend_on_distance_only() -> None:
    x, _ = make()
    q, k = x[:1, :1], x[1:, :1]
    scores = [
        (apply_rope(q, *rope_cos_sin(torch.tensor([[a]]), DIM, THETA))
         * apply_rope(k, *rope_cos_sin(torch.tensor([[b]]), DIM, THETA))).sum(-1)
        for a, b in ((7, 3), (104, 100))
    ]  # fmt: skip
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-4, atol=1e-4)


def test_16_bit_is_rotated_in_fp32() -> None:
    x, positions = make()
    cos, sin = rope_cos_sin(positions, DIM, THETA)
    y = apply_rope(x.bfloat16(), cos, sin)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, apply_rope(x.bfloat16().float(), cos, sin).bfloat16())


def test_wrong_sizes_are_refused() -> None:
    x, positions = make()
    with pytest.raises(ValueError, match="even"):
        rope_cos_sin(positions, 5, THETA)
    with pytest.raises(ValueError, match="channels"):
        apply_rope(x, *rope_cos_sin(positions, 4, THETA))
