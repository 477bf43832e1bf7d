"""A student's losses on a GPU in bf16 against plain ones in fp32, and their peak memory."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatron_lt2.parallel.distillation_loss import (
    Heads,
    TopLogits,
    distillation_losses,
    top_distillation_losses,
    top_logits,
)

pytestmark = pytest.mark.gpu

WIDTH, VOCABULARY, REAL, TAU = 576, 49152, 49149, 2.0
ALONE = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
"""A group of one, which sends nothing."""


def _numbers(tokens: int) -> list[Tensor]:
    """Hidden states and weights of student and teacher in bf16, and labels."""
    generator = torch.Generator("cuda").manual_seed(3)
    options = {"generator": generator, "device": "cuda"}
    hidden, other = (torch.randn(tokens, 1, WIDTH, **options).bfloat16() for _ in range(2))
    weight, theirs = (0.1 * torch.randn(VOCABULARY, WIDTH, **options) for _ in range(2))
    weight[REAL:] *= 50
    labels = torch.randint(REAL, (1, tokens), **options)
    return [hidden, weight.bfloat16(), other, theirs.bfloat16(), labels]


@pytest.mark.parametrize("top", [None, 32])
def test_bf16_losses_are_near_plain_ones(top: int | None) -> None:
    hidden, weight, other, theirs, labels = _numbers(300)
    heads = Heads(ALONE, False, REAL, TAU, chunk=128)
    x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    # Rounding decides which of two equal tokens is among the likeliest: the same for both.
    known: TopLogits = top_logits(other, theirs, top or 1, heads)
    if top is None:
        ce, kl = distillation_losses(x, w, labels, other, theirs, heads)
    else:
        ce, kl = top_distillation_losses(x, w, labels, known, heads)
    (0.3 * ce + kl).sum().backward()

    y, v = hidden.float().requires_grad_(), weight.float().requires_grad_()
    s = y[:, 0] @ v[:REAL].t()
    t = other.float()[:, 0] @ theirs.float()[:REAL].t()
    q = (s / TAU).log_softmax(-1)
    if top is not None:
        t, q = t.gather(-1, known.ids), q.gather(-1, known.ids)
    p = (t / TAU).log_softmax(-1)
    plain_kl = (p.exp() * (p - q)).sum(-1)
    plain_ce = torch.nn.functional.cross_entropy(s, labels[0], reduction="none")
    (0.3 * plain_ce + plain_kl).sum().backward()
    pairs = {"ce": (ce[0], plain_ce), "kl": (kl[0], plain_kl), "x": (x.grad, y.grad)}
    pairs["weight"] = (w.grad, v.grad)
    for name, (got, expected) in pairs.items():
        error = (got.float() - expected).norm() / expected.norm()
        assert error < 2e-2, f"{name}: relative error {error:.1e}"


def test_neither_models_logits_are_ever_whole() -> None:
    """Whole, both would be 6.4 GB in fp32."""
    hidden, weight, other, theirs, labels = _numbers(16384)
    hidden.requires_grad_()
    weight.requires_grad_()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    heads = Heads(ALONE, False, REAL, TAU)
    ce, kl = distillation_losses(hidden, weight, labels, other, theirs, heads)
    (ce + kl).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 2.5e9
