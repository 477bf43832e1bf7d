"""The mLSTM's stabiliser: gates of any size; test_ops_recurrences.py tests moderate ones."""

import math

import pytest
import torch
from torch import Tensor

from megatron_lt2.ops.mlstm import chunk_mlstm, mlstm_step, stabilisers

HEADS, KEY, VALUE = 2, 5, 3


def make(batch: int, length: int, gate: float, seed: int = 0) -> dict[str, Tensor]:
    """Input gates around +-`gate`, forget gates between about 0 and -gate."""
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, length, HEADS, *shape, generator=random, dtype=torch.float64)

    x = {"q": normal(KEY), "k": normal(KEY), "v": normal(VALUE)}
    x["i"] = normal() + gate * normal().sign()
    x["f"] = torch.nn.functional.logsigmoid(normal() * gate / 5 + 2)
    return {name: y.requires_grad_() for name, y in x.items()}


def loop(q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor) -> Tensor:
    """The definition with every token's weight in log space and its own largest weight taken out.

    weight(s -> t) = exp(i_s + f_{s+1} + .. + f_t); the output is the same for any common factor
    e^{-c} of numerator, denominator and the 1 that bounds it.
    """
    outputs = []
    for t in range(q.shape[1]):
        log_weight = torch.stack([i[:, s] + f[:, s + 1 : t + 1].sum(1) for s in range(t + 1)], 1)
        largest = log_weight.amax(1, keepdim=True).clamp_min(0).detach()
        product = (q[:, t : t + 1] * k[:, : t + 1]).sum(-1) * KEY**-0.5
        weight = (log_weight - largest).exp() * product
        top = (weight.unsqueeze(-1) * v[:, : t + 1]).sum(1)
        bottom = torch.maximum(weight.sum(1).abs(), (-largest.squeeze(1)).exp())
        outputs.append(top / bottom.unsqueeze(-1))
    return torch.stack(outputs, 1)


def grads(o: Tensor, x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    weight = torch.randn(o.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    return torch.autograd.grad((o.double() * weight).sum(), list(x.values()))


@pytest.mark.parametrize("gate", [0.0, 3.0, 30.0, 100.0])
def test_gates_of_any_size_are_exact(gate: float) -> None:
    x = make(2, 80, gate)
    o, expected = chunk_mlstm(*x.values())[0], loop(*x.values())
    torch.testing.assert_close(o, expected, rtol=1e-9, atol=1e-11)
    for name, ours, theirs in zip(x, grads(o, x), grads(expected, x), strict=True):
        assert ours.isfinite().all(), name
        # Outputs divided by almost nothing have large gradients, so compare as a whole.
        assert (ours - theirs).norm() <= 1e-9 * theirs.norm(), name


@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize("gate", [30.0, 100.0, 300.0])
def test_fp32_stays_finite_and_close(gate: float, sign: float) -> None:
    """Gates all on one side: e^100 and e^-100 are outside of fp32."""
    narrow = {name: y.detach().float() for name, y in make(2, 200, 1.0).items()}
    narrow["i"] = narrow["i"] + sign * gate
    wide = {name: y.double() for name, y in narrow.items()}
    narrow = {name: y.requires_grad_() for name, y in narrow.items()}
    o, state = chunk_mlstm(*narrow.values())
    expected, _ = chunk_mlstm(*wide.values())
    # Where the denominator almost cancels, h is large and less certain.
    error = (o.double() - expected).abs() / (1 + expected.square())
    assert error.max() < 1e-4
    assert state[0].isfinite().all() and state[1].isfinite().all()
    assert all(y.isfinite().all() for y in grads(o, narrow))


def test_both_bounds_of_the_denominator_are_met() -> None:
    """The cases above would prove little if |n q| never were above 1, or never below."""
    x = {name: y.detach() for name, y in make(2, 80, 3.0).items()}
    bounded = chunk_mlstm(*x.values())[0]
    free = chunk_mlstm(*{**x, "i": x["i"] + 200}.values())[0]  # next to which 1 is nothing
    same = torch.isclose(bounded, free, rtol=1e-6).all(-1)
    assert same.any() and not same.all()


def test_state_is_the_same_whatever_m_was() -> None:
    x = {name: y.detach() for name, y in make(2, 70, 3.0).items()}
    matrix = torch.randn(2, HEADS, KEY, VALUE + 1, dtype=torch.float64)
    results = []
    for m in (-40.0, 0.0, 2.5, 90.0):
        state = matrix * math.exp(-m), torch.full((2, HEADS), m, dtype=torch.float64)
        h, (final, m_final) = chunk_mlstm(*x.values(), initial_state=state)
        results.append((h, final * m_final.exp()[..., None, None]))
    for h, final in results[1:]:
        torch.testing.assert_close(h, results[0][0], rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(final, results[0][1], rtol=1e-9, atol=1e-11)


def test_steps_carry_large_gates() -> None:
    x = {name: y.detach().float() for name, y in make(2, 60, 100.0).items()}
    state = torch.zeros(2, HEADS, KEY, VALUE + 1), torch.zeros(2, HEADS)
    outputs = []
    for t in range(60):
        o, state = mlstm_step(*(y[:, t] for y in x.values()), state)
        outputs.append(o)
    whole, final = chunk_mlstm(*x.values())
    torch.testing.assert_close(torch.stack(outputs, 1), whole, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(state[1], final[1])
    torch.testing.assert_close(state[0], final[0], rtol=1e-4, atol=1e-5)


def running_maximum(i: Tensor, f: Tensor, m: Tensor) -> Tensor:
    values = []
    for t in range(i.shape[1]):
        m = torch.maximum(m + f[:, t], i[:, t])
        values.append(m)
    return torch.stack(values, 1)


@pytest.mark.parametrize("bounds", [None, [0, 1, 4, 4, 60, 61], [0, 0, 61, 61]])
@pytest.mark.parametrize("gate", [0.0, 100.0])
def test_stabilisers_are_the_running_maximum(bounds: list[int] | None, gate: float) -> None:
    x = {name: y.detach() for name, y in make(1, 61, gate).items()}
    documents = 1 if bounds is None else len(bounds) - 1
    m_0 = torch.randn(documents, HEADS, dtype=torch.float64) * (1 + gate)
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    before, m, final = stabilisers(x["i"], x["f"], m_0, borders)
    spans = [0, 61] if bounds is None else bounds
    for n, (start, end) in enumerate(zip(spans, spans[1:], strict=False)):
        if start == end:
            assert torch.equal(final[n], m_0[n])
            continue
        own = slice(start, end)
        expected = running_maximum(x["i"][:, own], x["f"][:, own], m_0[n : n + 1])
        torch.testing.assert_close(m[:, own], expected)
        torch.testing.assert_close(
            before[:, own], torch.cat([m_0[n : n + 1, None], m[:, own]], 1)[:, :-1]
        )
        assert torch.equal(final[n], m[0, end - 1])


@pytest.mark.parametrize("value", [-200.0, 200.0, float("-inf")])
def test_tokens_without_key_are_zero_and_finite(value: float) -> None:
    """Padding: no key, no decay, and an input gate that nobody looked after."""
    x = {name: y.detach() for name, y in make(1, 8, 1.0).items()}
    x["k"][:, :4], x["f"][:, :4], x["i"][:, :4] = 0, 0, value
    x = {name: y.float().requires_grad_() for name, y in x.items()}
    o, state = chunk_mlstm(*x.values())
    assert torch.equal(o[:, :4], torch.zeros_like(o[:, :4]))
    assert o.isfinite().all() and state[0].isfinite().all()
    if value < 0:
        expected, _ = chunk_mlstm(*(y[:, 4:] for y in x.values()))
        torch.testing.assert_close(o[:, 4:], expected)
        assert all(y.isfinite().all() for y in grads(o[:, 4:], x))


def test_wrong_stabiliser_is_refused() -> None:
    x = make(2, 4, 1.0)
    state = torch.zeros(2, HEADS, KEY, VALUE + 1), torch.zeros(2, HEADS + 1)
    with pytest.raises(ValueError, match="stabiliser.*shape"):
        chunk_mlstm(*x.values(), initial_state=state)
