"""Chunked, vocabulary-parallel losses of student and teacher equal plain ones, with gradients."""

from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lt2.parallel import platform
from tests.ranks import run_ranks

platform.install()

LENGTH, ROWS, WIDTH, TEACHER_WIDTH, VOCABULARY, PADDED = 14, 3, 12, 10, 37, 64
"""Of two ranks the second has 5 rows that are no padding."""
CASES = {
    "dense": {"tau": 1.0},
    "dense, tau 2": {"tau": 2.0},
    "dense, tau 4": {"tau": 4.0},
    "top 6, vocabulary": {"tau": 2.0, "top": 6, "over": "vocabulary"},
    "top 6, support": {"tau": 1.0, "top": 6, "over": "support"},
}


def _numbers():
    generator = torch.Generator().manual_seed(4)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight = draw(LENGTH, ROWS, WIDTH), draw(PADDED, WIDTH)
    teacher_hidden, teacher_weight = draw(LENGTH, ROWS, TEACHER_WIDTH), draw(PADDED, TEACHER_WIDTH)
    weight[VOCABULARY:] *= 9
    teacher_weight[VOCABULARY:] *= 9
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, :4] = torch.tensor([0, 31, 32, VOCABULARY - 1])  # ends of the ranks' rows
    return hidden, weight, labels, teacher_hidden, teacher_weight, draw(2, ROWS, LENGTH)


def _plain(case, hidden, weight, labels, teacher_hidden, teacher_weight):
    """CE and KL of every token [b, s], written out."""
    s, t = hidden @ weight[:VOCABULARY].T, teacher_hidden @ teacher_weight[:VOCABULARY].T
    ce = -s.log_softmax(-1).gather(-1, labels.T[..., None])[..., 0]
    q = (s / case["tau"]).log_softmax(-1)
    p = (t / case["tau"]).log_softmax(-1)
    if "top" in case:
        ids = t.topk(case["top"]).indices
        p = (t.gather(-1, ids) / case["tau"]).log_softmax(-1)
        q = q.gather(-1, ids)
        q = q.log_softmax(-1) if case["over"] == "support" else q
    return ce.T, (p.exp() * (p - q)).sum(-1).T


def _ours(case, hidden, weight, labels, teacher_hidden, teacher_weight, heads):
    from megatron_lt2.parallel import distillation_loss as ours

    if "top" not in case:
        return ours.distillation_losses(
            hidden, weight, labels, teacher_hidden, teacher_weight, heads
        )
    top = ours.top_logits(teacher_hidden, teacher_weight, case["top"], heads)
    return ours.top_distillation_losses(hidden, weight, labels, top, heads, case["over"])


def _both(rank, world, sequence, cases, fault=None):
    """By case: losses and gradients written out, and ours on this rank."""
    from megatron.core import parallel_state

    from megatron_lt2.config.schema import ParallelConfig
    from megatron_lt2.parallel.start import start_ranks

    start_ranks(ParallelConfig(tensor=world, sequence=sequence), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    return {
        name: _errors(rank, world, sequence, case, group, fault) for name, case in cases.items()
    }


def _errors(rank, world, sequence, case, group, fault):
    """Relative errors of both losses and of the gradients of hidden states and weight."""
    from megatron_lt2.parallel.distillation_loss import Heads

    hidden, weight, labels, teacher_hidden, teacher_weight, factors = _numbers()

    def results(losses_of, x, w):
        x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
        ce, kl = losses_of(x, w)
        (torch.stack([ce, kl]) * factors).sum().backward()
        return [y.numpy() for y in (ce.detach(), kl.detach(), x.grad, w.grad)]

    expected = results(
        lambda x, w: _plain(case, x, w, labels, teacher_hidden, teacher_weight), hidden, weight
    )
    rows = slice(rank * PADDED // world, (rank + 1) * PADDED // world)
    expected[3] = expected[3][rows]
    own = teacher_hidden
    if sequence:
        hidden, own = hidden.chunk(world)[rank], own.chunk(world)[rank]
        expected[2] = np.array_split(expected[2], world)[rank]
    heads = Heads(group, sequence, VOCABULARY, case["tau"], chunk=5)
    with _faults(fault):
        got = results(
            lambda x, w: _ours(case, x, w, labels, own, teacher_weight[rows], heads),
            hidden,
            weight[rows],
        )
    return [
        float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(got, expected, strict=True)
    ]


@contextmanager
def _faults(name):
    """Mistakes that the comparisons must see."""
    from megatron_lt2.ops import distillation as ops

    statistics, gradients = ops.pair_statistics, ops.pair_gradients
    patches = {
        None: lambda: mock.patch.object(ops, "SUMS", ops.SUMS),
        "padding has a probability": lambda: mock.patch.object(
            ops, "pair_statistics", lambda s, t, g, real, tau: statistics(s, t, g, s.shape[1], tau)
        ),
        "no temperature in the gradient": lambda: mock.patch.object(
            ops, "pair_gradients", lambda *given: gradients(*given[:-1], 1.0)
        ),
    }
    with patches[name]():
        yield


@pytest.mark.parametrize(
    "world, sequence", [(1, False), (2, False), (2, True)], ids=["one rank", "TP 2", "TP 2 + SP"]
)
def test_losses_and_gradients_equal_plain_ones(world, sequence):
    for found in run_ranks(world, _both, sequence, CASES):
        for name, errors in found.items():
            assert max(errors) < 1e-12, (name, errors)


@pytest.mark.parametrize("fault", ["padding has a probability", "no temperature in the gradient"])
def test_planted_faults_are_seen(fault):
    cases = {"dense, tau 2": CASES["dense, tau 2"]}
    errors = run_ranks(1, _both, False, cases, fault)[0]["dense, tau 2"]
    assert not max(errors) < 1e-3


def _itself(rank, world):
    from megatron.core import parallel_state

    from megatron_lt2.config.schema import ParallelConfig
    from megatron_lt2.parallel import distillation_loss as ours
    from megatron_lt2.parallel.start import start_ranks

    start_ranks(ParallelConfig(tensor=world), 1)
    group = parallel_state.get_tensor_model_parallel_group()
    hidden, weight, labels, *_ = _numbers()
    weight = weight[rank * PADDED // world : (rank + 1) * PADDED // world].float()
    hidden = hidden.float().requires_grad_()
    found = []
    for tau in (1.0, 3.0):
        heads = ours.Heads(group, False, VOCABULARY, tau, chunk=5)
        _, kl = ours.distillation_losses(hidden, weight, labels, hidden, weight, heads)
        (gradient,) = torch.autograd.grad(kl.sum(), hidden)
        top = ours.top_logits(hidden, weight, 6, heads)
        _, on_top = ours.top_distillation_losses(hidden, weight, labels, top, heads, "support")
        found.append([float(x.abs().max()) for x in (kl, gradient, on_top)])
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_a_teacher_has_no_divergence_from_itself(world):
    for rank in run_ranks(world, _itself):
        for kl, gradient, on_top in rank:
            assert kl == 0.0 and gradient == 0.0
            assert on_top < 1e-6
