"""Weight gradients that go straight to `main_grad`: sums, sections, tied and frozen weights.

On several ranks, with megatron-core's own hooks: tests/distributed/test_weight_gradients.py.
"""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.parallel.sectioned_linear import project, sectioned_linear
from megatron_lt2.parallel.weight_gradient import WeightGradient, add_weight_gradient, mark_tied

ALONE = SimpleNamespace(size=lambda: 1)
ROWS, WIDTH, TOKENS = 6, 5, 7


def _weight(dtype=torch.float64, main=torch.float64, rows=ROWS):
    """A weight as megatron-core's DDP leaves it before a step, `main_grad` zero; None: without."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.nn.Parameter(torch.randn(rows, WIDTH, generator=generator).to(dtype))
    if main is not None:
        weight.main_grad = torch.zeros(rows, WIDTH, dtype=main)
        weight.grad_added_to_main_grad = False
    return weight


def _hook(weight):
    """As megatron-core hooks into autograd; says of each call whether there was a gradient."""
    calls = []

    def finish(parameter):
        calls.append(parameter.grad is not None)
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None

    weight.register_post_accumulate_grad_hook(finish)
    return calls


def _inputs(count, dtype=torch.float64, coherent=False):
    """x [tokens, 1, width] and output gradients [tokens, 1, rows] of so many uses."""
    generator = torch.Generator().manual_seed(4)
    xs = torch.randn(count, TOKENS, 1, WIDTH, generator=generator)
    dys = torch.randn(count, TOKENS, 1, ROWS, generator=generator)
    if coherent:  # what autograd's sum in bf16 is worst at: it grows with every use
        xs, dys = xs.abs() + 0.5, dys.abs() + 0.5
    return xs.to(dtype), dys.to(dtype)


def _exact(xs, dys):
    return torch.einsum("utbr,utbd->rd", dys.double(), xs.double())


def _run(weight, xs, dys, uses=project):
    outputs = [uses(x, weight, None, False) for x in xs]
    torch.autograd.backward(outputs, list(dys))


def _plain(x, weight, group, gather):
    return F.linear(x, weight)


def test_uses_of_a_bf16_weight_are_added_in_fp32():
    xs, dys = _inputs(16, torch.bfloat16, coherent=True)
    exact = _exact(xs, dys)
    ours, theirs = (_weight(torch.bfloat16, torch.float32) for _ in range(2))
    for weight, uses in ((ours, project), (theirs, _plain)):
        _hook(weight)
        _run(weight, xs, dys, uses)
    errors = [float((w.main_grad.double() - exact).norm() / exact.norm()) for w in (ours, theirs)]
    # A product is rounded once to bf16 on a CPU; a sum of 16 of them hides most of that.
    assert errors[0] < 1e-3
    assert errors[0] < errors[1] / 3


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_main_grad_is_the_sum_over_uses_and_micro_batches(micro_batches):
    weight, (xs, dys) = _weight(), _inputs(4)
    calls = _hook(weight)
    for _ in range(micro_batches):
        _run(weight, xs, dys)
    torch.testing.assert_close(weight.main_grad, micro_batches * _exact(xs, dys))
    # Once a backward pass, with a gradient, for megatron-core's hook counts on one.
    assert calls == [True] * micro_batches and weight.grad is None


def test_sections_lie_at_their_rows():
    weight, (xs, dys) = _weight(), _inputs(2)
    _hook(weight)
    pieces = [sectioned_linear(x, weight, (1, 3, 2), ALONE, False) for x in xs]
    given = [dy.transpose(0, 1).split((1, 3, 2), dim=-1) for dy in dys]
    torch.autograd.backward(sum(map(list, pieces), []), sum(map(list, given), []))
    torch.testing.assert_close(weight.main_grad, _exact(xs, dys))


def test_a_tied_weight_gets_both_parts():
    def both(tied):
        weight, (xs, dys) = _weight(), _inputs(2)
        if tied:
            mark_tied(weight)
        _hook(weight)
        ids = torch.tensor([1, 4, 1])
        looked_up = F.embedding(ids, weight)
        outputs = [project(x, weight, None, False) for x in xs]
        torch.autograd.backward([looked_up, *outputs], [torch.ones(3, WIDTH).double(), *dys])
        return weight.main_grad - _exact(xs, dys)

    expected = torch.zeros(ROWS, WIDTH, dtype=torch.float64)
    expected[1], expected[4] = 2, 1
    torch.testing.assert_close(both(True), expected)
    assert not torch.allclose(both(False), expected)  # the embedding's part is lost unmarked


@pytest.mark.parametrize("main", [None, torch.bfloat16], ids=["no DDP", "another dtype"])
def test_without_a_place_for_it_autograd_gets_the_gradient(main):
    weight, (xs, dys) = _weight(torch.float64, main), _inputs(3)
    _run(weight, xs, dys)
    torch.testing.assert_close(weight.grad, _exact(xs, dys))
    assert main is None or not weight.main_grad.any()


@pytest.mark.parametrize("mark", ["shared_embedding", "zero_out_wgrad"])
def test_what_megatron_core_sums_itself_goes_through_autograd(mark):
    weight, (xs, dys) = _weight(), _inputs(2)
    setattr(weight, mark, True)
    _run(weight, xs, dys)
    torch.testing.assert_close(weight.grad, _exact(xs, dys))
    assert not weight.main_grad.any()


@pytest.mark.parametrize("main", [None, torch.float64])
def test_a_frozen_weight_gets_nothing(main):
    weight, (xs, dys) = _weight(main=main), _inputs(2)
    weight.requires_grad_(False)
    xs.requires_grad_()
    _run(weight, xs, dys)
    torch.testing.assert_close(xs.grad, dys @ weight)
    assert weight.grad is None and (main is None or not weight.main_grad.any())


@pytest.mark.parametrize("main", [None, torch.float64])
def test_several_products_for_the_same_rows(main):
    weight, (xs, dys) = _weight(main=main), _inputs(3)
    gradient = WeightGradient(weight, adds=True)
    for x, dy in zip(xs, dys, strict=True):
        gradient.add(dy[:, 0, :2], x[:, 0])
        gradient.add(dy[:, 0, 2:], x[:, 0], first_row=2)
    given = gradient.for_autograd()
    found = given if main is None else weight.main_grad
    torch.testing.assert_close(found, _exact(xs, dys))


def test_one_product_of_strided_tensors():
    weight, (xs, dys) = _weight(), _inputs(1)
    wide = torch.cat([dys[0, :, 0], dys[0, :, 0]], dim=1)
    add_weight_gradient(weight, wide[:, ROWS:], xs[0, :, 0].t().contiguous().t())
    torch.testing.assert_close(weight.main_grad, _exact(xs, dys))
