"""RMS norms against torch's own and against the formula."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.ops.norms import gated_rms_norm, rms_norm


def test_equals_torch() -> None:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 7, generator=random, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, generator=random, dtype=torch.float64, requires_grad=True)
    ours, theirs = rms_norm(x, weight, 1e-3), F.rms_norm(x, (7,), weight, 1e-3)
    torch.testing.assert_close(ours, theirs)
    for y, z in zip(
        torch.autograd.grad(ours.sin().sum(), (x, weight)),
        torch.autograd.grad(theirs.sin().sum(), (x, weight)),
        strict=True,
    ):
        torch.testing.assert_close(y, z)


def test_epsilon_counts() -> None:
    x = torch.full((1, 4), 1e-3)
    expected = 1e-3 / (1e-6 + 1e-2) ** 0.5
    torch.testing.assert_close(rms_norm(x, torch.ones(4), 1e-2), torch.full((1, 4), expected))


def test_gate_multiplies_the_normed_value() -> None:
    random = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 2, 3, 7, generator=random).unbind()
    weight = torch.randn(7, generator=random)
    expected = rms_norm(x, weight, 1e-5) * gate / (1 + (-gate).exp())
    torch.testing.assert_close(gated_rms_norm(x, gate, weight, 1e-5), expected)


def test_gate_may_be_a_sigmoid() -> None:
    random = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 2, 3, 7, generator=random).unbind()
    weight = torch.randn(7, generator=random)
    expected = rms_norm(x, weight, 1e-5) / (1 + (-gate).exp())
    torch.testing.assert_close(
        gated_rms_norm(x, gate, weight, 1e-5, activation="sigmoid"), expected
    )
    with pytest.raises(ValueError, match="'silu' or 'sigmoid', not 'tanh'"):
        gated_rms_norm(x, gate, weight, 1e-5, activation="tanh")


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gate_may_come_first(activation: str) -> None:
    random = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 2, 3, 7, generator=random).unbind()
    weight = torch.randn(7, generator=random)
    factor = (gate if activation == "silu" else 1) / (1 + (-gate).exp())
    expected = rms_norm(x * factor, weight, 1e-5)
    ours = gated_rms_norm(x, gate, weight, 1e-5, activation=activation, gate_first=True)
    torch.testing.assert_close(ours, expected)
    assert not torch.allclose(ours, gated_rms_norm(x, gate, weight, 1e-5, activation=activation))


def test_16_bit_is_rounded_once() -> None:
    random = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 5, 7, generator=random).bfloat16().unbind()
    weight = torch.randn(7, generator=random)
    plain, gated = rms_norm(x, weight, 1e-5), gated_rms_norm(x, gate, weight, 1e-5)
    assert plain.dtype == gated.dtype == torch.bfloat16
    assert torch.equal(plain, rms_norm(x.float(), weight, 1e-5).bfloat16())
    assert torch.equal(gated, gated_rms_norm(x.float(), gate.float(), weight, 1e-5).bfloat16())
