"""The projection in pieces equals one fused matrix product, on one rank and on two."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.parallel.sectioned_linear import sectioned_linear
from tests.ranks import run_ranks

ALONE = SimpleNamespace(size=lambda: 1)
LENGTH, WIDTH = 6, 5
SECTIONS = {"one section": (8,), "many sections": (4, 2, 6, 2)}

each_batch = pytest.mark.parametrize("batch", [1, 3])
each_sections = pytest.mark.parametrize("rows", SECTIONS.values(), ids=SECTIONS)


def _numbers(batch, rows):
    """x [s, b, d], weight [rows, d] and a direction for the outputs [b, s, rows], in fp64."""
    generator = torch.Generator().manual_seed(7)
    shapes = ((LENGTH, batch, WIDTH), (sum(rows), WIDTH), (batch, LENGTH, sum(rows)))
    return tuple(torch.randn(s, dtype=torch.float64, generator=generator) for s in shapes)


def _fused(x, weight):
    return F.linear(x, weight).transpose(0, 1)


def _close(got, expected):
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


@each_batch
@each_sections
def test_outputs_and_gradients_of_the_fused_weight(batch, rows):
    x, weight, direction = _numbers(batch, rows)
    x.requires_grad_()
    weight.requires_grad_()
    expected = _fused(x, weight)
    dx, dw = torch.autograd.grad(expected, (x, weight), direction)

    pieces = sectioned_linear(x, weight, rows, ALONE, False)
    assert [tuple(piece.shape) for piece in pieces] == [(batch, LENGTH, n) for n in rows]
    assert all(piece.is_contiguous() for piece in pieces)
    for piece, part in zip(pieces, expected.split(rows, dim=-1), strict=True):
        _close(piece, part)
    # The gradients arrive as slices of wide rows.
    got = torch.autograd.grad(pieces, (x, weight), direction.split(rows, dim=-1))
    assert got[0].shape == x.shape
    _close(got[0], dx)
    _close(got[1], dw)


@pytest.mark.parametrize("rows", [[3, 5], torch.Size((3, 5))], ids=["list", "size"])
def test_rows_may_be_any_sequence(rows):
    x, weight, _ = _numbers(2, rows)
    assert [p.shape[-1] for p in sectioned_linear(x, weight, rows, ALONE, False)] == [3, 5]


@each_batch
@pytest.mark.parametrize("unused", [0, 1, 3])
def test_an_unused_output_has_no_gradient(batch, unused):
    rows = SECTIONS["many sections"]
    x, weight, direction = _numbers(batch, rows)
    x.requires_grad_()
    weight.requires_grad_()

    def loss(pieces):
        terms = zip(pieces, direction.split(rows, dim=-1), strict=True)
        return sum((a * b).sum() for i, (a, b) in enumerate(terms) if i != unused)

    expected = torch.autograd.grad(loss(_fused(x, weight).split(rows, dim=-1)), (x, weight))
    pieces = sectioned_linear(x, weight, rows, ALONE, False)
    got = torch.autograd.grad(loss(pieces), (x, weight))
    _close(got[0], expected[0])
    _close(got[1], expected[1])
    start = sum(rows[:unused])
    assert not got[1][start : start + rows[unused]].any()


@pytest.mark.parametrize("of_x, of_weight", [(True, False), (False, True), (False, False)])
def test_only_the_gradients_that_are_needed(of_x, of_weight):
    rows = SECTIONS["many sections"]
    x, weight, direction = _numbers(2, rows)
    x.requires_grad_(of_x)
    weight.requires_grad_(of_weight)
    pieces = sectioned_linear(x, weight, rows, ALONE, False)
    if not (of_x or of_weight):
        assert not any(piece.requires_grad for piece in pieces)
        return
    torch.autograd.backward(pieces, direction.split(rows, dim=-1))
    flat = direction.transpose(0, 1)
    if of_x:
        assert weight.grad is None
        _close(x.grad, flat @ weight)
    else:
        assert x.grad is None
        _close(weight.grad, torch.einsum("sbr,sbd->rd", flat, x))


def test_a_second_derivative_is_refused():
    x, weight, _ = _numbers(1, (8, 4))
    x.requires_grad_()
    piece, _ = sectioned_linear(x, weight, (8, 4), ALONE, False)
    (dx,) = torch.autograd.grad(piece.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


# What a rank has: its rows of each section, and its part of the sequence.
CASES = [
    (batch, rows, needs)
    for batch in (1, 3)
    for rows in SECTIONS.values()
    for needs in ((True, True), (True, False), (False, True))
]


def _of_a_rank(rank, world, sequence_parallel):
    """By case: this rank's outputs and gradients."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    results = []
    for batch, rows, needs in CASES:
        x, weight, direction = _numbers(batch, rows)
        weight = torch.cat([part.chunk(world)[rank] for part in weight.split(rows)])
        weight = weight.requires_grad_(needs[1])
        x = (x.chunk(world)[rank] if sequence_parallel else x).clone().requires_grad_(needs[0])
        local = [n // world for n in rows]
        pieces = sectioned_linear(x, weight, local, dist.group.WORLD, sequence_parallel)
        given = [part.chunk(world, dim=-1)[rank] for part in direction.split(rows, dim=-1)]
        torch.autograd.backward(pieces, given)
        gradients = [None if t.grad is None else t.grad.numpy() for t in (x, weight)]
        results.append(([piece.detach().numpy() for piece in pieces], *gradients))
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_two_ranks_equal_one(sequence_parallel):
    world = 2
    ranks = run_ranks(world, _of_a_rank, sequence_parallel)
    for (batch, rows, needs), *of_ranks in zip(CASES, *ranks, strict=True):
        x, weight, direction = _numbers(batch, rows)
        outputs, dxs, dws = zip(*of_ranks, strict=True)
        for expected, *parts in zip(_fused(x, weight).split(rows, dim=-1), *outputs, strict=True):
            np.testing.assert_allclose(
                np.concatenate(parts, axis=-1), expected.numpy(), rtol=1e-12, atol=1e-12
            )
        flat = direction.transpose(0, 1)
        dx = (flat @ weight).numpy()
        dw = torch.einsum("sbr,sbd->rd", flat, x)
        for rank in range(world):
            if needs[0]:
                mine = np.split(dx, world)[rank] if sequence_parallel else dx
                np.testing.assert_allclose(dxs[rank], mine, rtol=1e-12, atol=1e-12)
            if needs[1]:
                mine = torch.cat([part.chunk(world)[rank] for part in dw.split(rows)]).numpy()
                np.testing.assert_allclose(dws[rank], mine, rtol=1e-12, atol=1e-12)
            assert (dxs[rank] is None, dws[rank] is None) == (not needs[0], not needs[1])
