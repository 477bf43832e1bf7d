"""Losses of a student's output head against labels and a teacher's head, over a spread vocabulary.

The pattern of `vocab_loss.py`: a chunk of tokens at a time has logits, of the student and of the
teacher; a few numbers a token stay, which small all-reduces join over the tensor-parallel ranks;
the backward pass makes the chunk's logits again. So neither model's logits are ever whole.

The teacher is another head on states of its own, or a few tokens of the vocabulary with their
logits: its most likely ones, from a head (`top_logits`) or from a file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lt2.kernels.linear_cross_entropy import chunk_tokens
from megatron_lt2.ops import distillation as ops
from megatron_lt2.parallel.vocab_loss import gathered
from megatron_lt2.parallel.weight_gradient import WeightGradient


@dataclass(frozen=True)
class Heads:
    """Where the rows of two output heads lie.

    group: tensor-parallel process group.
    sequence_parallel: whether hidden states are this rank's part of the sequence.
    real_vocab: rows of all ranks that are no padding: the others have no probability.
    temperature: tau of the divergence.
    chunk: tokens whose logits exist at a time; default: as many as are some 512 MB.
    """

    group: Any
    sequence_parallel: bool
    real_vocab: int
    temperature: float = 1.0
    chunk: int | None = None

    def rows(self, weight: Tensor) -> tuple[int, int]:
        """First row of this rank in the vocabulary, and how many are no padding."""
        first = self.group.rank() * len(weight)
        return first, max(0, min(len(weight), self.real_vocab - first))

    def whole(self, hidden: Tensor) -> Tensor:
        """[s, b, d] of the whole sequence."""
        return gathered(hidden, self.group) if self.sequence_parallel else hidden

    def chunks(self, tokens: int, weight: Tensor) -> Iterator[slice]:
        """Which tokens have logits together."""
        size = self.chunk or chunk_tokens(2 * len(weight), weight.element_size())
        for start in range(0, tokens, size):
            yield slice(start, min(tokens, start + size))


@dataclass(frozen=True)
class TopLogits:
    """The teacher's most likely tokens.

    ids: [n, k] of the vocabulary, tokens in the order of [s, b].
    logits: [n, k] in fp32 at least.
    """

    ids: Tensor
    logits: Tensor


def distillation_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Cross entropy and KL(teacher || student) at temperature tau of every token.

    Args:
        hidden, teacher_hidden: [s, b, d] and [s, b, d'], this rank's part of s under sequence
            parallelism; the teacher's get no gradient.
        weight, teacher_weight: [v, d] and [v, d'], this rank's rows of the padded vocabulary.
        labels: [b, s] of the whole sequence.
        heads: where they lie.

    Returns:
        Two [b, s], fp32 (fp64 for fp64). The gradient of the second is not multiplied by tau^2.
    """
    assert len(weight) == len(teacher_weight), "one vocabulary, padded alike"
    losses: tuple[Tensor, Tensor] = _Dense.apply(
        hidden, weight, labels, teacher_hidden.detach(), teacher_weight.detach(), heads
    )
    return losses


def top_distillation_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    teacher: TopLogits,
    heads: Heads,
    over: Literal["vocabulary", "support"] = "vocabulary",
) -> tuple[Tensor, Tensor]:
    """The same where the teacher's probabilities are those of a few tokens, which add up to one.

    over: whether the student's are those of the whole vocabulary (the divergence of a model to
        itself is then -log of what these tokens hold), or also add up to one over these tokens.
    """
    losses: tuple[Tensor, Tensor] = _Top.apply(
        hidden, weight, labels, teacher.ids, teacher.logits, heads, over
    )
    return losses


@torch.no_grad()
def top_logits(hidden: Tensor, weight: Tensor, k: int, heads: Heads) -> TopLogits:
    """The k largest logits of every token; arguments as `distillation_losses`."""
    flat = _flat(heads.whole(hidden))
    first, real = heads.rows(weight)
    wide = ops.wide_dtype(flat.dtype)
    values = torch.full((len(flat), k), -torch.inf, dtype=wide, device=flat.device)
    ids = torch.zeros(len(flat), k, dtype=torch.int64, device=flat.device)
    own = min(k, real)
    for part in heads.chunks(len(flat), weight):
        if own:
            found = (flat[part] @ weight[:real].t()).to(wide).topk(own)
            values[part, :own], ids[part, :own] = found.values, found.indices + first
    if heads.group.size() > 1:
        pieces = [torch.empty_like(values) for _ in range(heads.group.size())]
        places = [torch.empty_like(ids) for _ in range(heads.group.size())]
        dist.all_gather(pieces, values, group=heads.group)
        dist.all_gather(places, ids, group=heads.group)
        values, chosen = torch.cat(pieces, 1).topk(k)
        ids = torch.cat(places, 1).gather(1, chosen)
    return TopLogits(ids, values)


class _Dense(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        heads: Heads,
    ) -> tuple[Tensor, Tensor]:
        first, real = heads.rows(weight)
        whole = heads.whole(hidden)
        student, teacher = _flat(whole), _flat(heads.whole(teacher_hidden))
        targets = labels.t().reshape(-1) - first
        found = student.new_empty(2 + ops.SUMS, len(student), dtype=ops.wide_dtype(student.dtype))
        for part in heads.chunks(len(student), weight):
            found[:, part] = ops.pair_statistics(
                student[part] @ weight.t(),
                teacher[part] @ teacher_weight.t(),
                targets[part],
                real,
                heads.temperature,
            )
        tau = heads.temperature
        highest, sums = _joined(found, 2, (0, 0, 1, 1, None), (1, tau, tau, tau, 1), heads)
        logs = sums[:3].log()
        logs[0] += highest[0]
        logs[1] += highest[0] / tau
        logs[2] += highest[1] / tau
        ctx.save_for_backward(hidden, weight, targets, teacher_hidden, teacher_weight, logs)
        ctx.heads = heads
        entropies = logs[0] - sums[4]
        divergences = sums[3] / sums[2] + (logs[1] - logs[2])
        return _rows(entropies, whole), _rows(divergences, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_ce: Tensor, d_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, teacher_hidden, teacher_weight, logs = ctx.saved_tensors
        heads: Heads = ctx.heads
        _, real = heads.rows(weight)
        teacher = _flat(heads.whole(teacher_hidden))
        weights = torch.stack([d.t().reshape(-1).to(logs.dtype) for d in (d_ce, d_kl)])

        def to_gradients(part: slice, logits: Tensor) -> None:
            ops.pair_gradients(
                logits,
                teacher[part] @ teacher_weight.t(),
                targets[part],
                logs[:, part],
                weights[:, part],
                real,
                heads.temperature,
            )

        return (*_head_gradients(ctx, hidden, weight, heads, to_gradients), *[None] * 4)


class _Top(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        ids: Tensor,
        logits: Tensor,
        heads: Heads,
        over: str,
    ) -> tuple[Tensor, Tensor]:
        first, real = heads.rows(weight)
        whole, tau = heads.whole(hidden), heads.temperature
        student = _flat(whole)
        targets = labels.t().reshape(-1) - first
        found = student.new_empty(4, len(student), dtype=ops.wide_dtype(student.dtype))
        chosen = found.new_empty(ids.shape)
        for part in heads.chunks(len(student), weight):
            found[:, part], chosen[part] = ops.chosen_statistics(
                student[part] @ weight.t(), targets[part], ids[part] - first, real, tau
            )
        highest, sums = _joined(found, 1, (0, 0, None), (1, tau, 1), heads)
        if heads.group.size() > 1:
            dist.all_reduce(chosen, group=heads.group)
        logs = sums[:2].log()
        logs[0] += highest[0]
        logs[1] += highest[0] / tau
        log_p = (logits.to(chosen.dtype) / tau).log_softmax(-1)
        scaled = chosen / tau
        log_q = scaled.log_softmax(-1) if over == "support" else scaled - logs[1, :, None]
        p = log_p.exp()
        divergences = (p * (log_p - log_q)).nan_to_num(0.0).sum(-1)
        pulls = (log_q.exp() - p if over == "support" else -p) / tau
        ctx.save_for_backward(hidden, weight, targets, ids, pulls, logs)
        ctx.heads, ctx.over = heads, over
        return _rows(logs[0] - sums[2], whole), _rows(divergences, whole)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_ce: Tensor, d_kl: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, ids, pulls, logs = ctx.saved_tensors
        heads: Heads = ctx.heads
        first, real = heads.rows(weight)
        a, b = (d.t().reshape(-1).to(logs.dtype) for d in (d_ce, d_kl))
        weights = torch.stack([a, b if ctx.over == "vocabulary" else torch.zeros_like(b)])

        def to_gradients(part: slice, logits: Tensor) -> None:
            ops.chosen_gradients(
                logits,
                targets[part],
                ids[part] - first,
                pulls[part] * b[part, None],
                logs[:, part],
                weights[:, part],
                real,
                heads.temperature,
            )

        return (*_head_gradients(ctx, hidden, weight, heads, to_gradients), *[None] * 5)


def _head_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, heads: Heads, to_gradients: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of hidden states and weight; `to_gradients` turns a chunk's logits into theirs."""
    whole = heads.whole(hidden)
    student = _flat(whole)
    for_hidden, for_weight = ctx.needs_input_grad[:2]
    gradient = WeightGradient(weight, adds=True) if for_weight else None
    d_student = torch.empty_like(student) if for_hidden else None
    for part in heads.chunks(len(student), weight):
        logits = student[part] @ weight.t()
        to_gradients(part, logits)
        if d_student is not None:
            torch.mm(logits, weight, out=d_student[part])
        if gradient is not None:
            gradient.add(logits, student[part])
    d_hidden = None
    if d_student is not None:
        d_hidden = d_student.view(whole.shape)
        if heads.sequence_parallel:
            total, d_hidden = d_hidden, torch.empty_like(hidden)
            dist.reduce_scatter_tensor(d_hidden, total, group=heads.group)
        elif heads.group.size() > 1:
            dist.all_reduce(d_hidden, group=heads.group)
    return d_hidden, None if gradient is None else gradient.for_autograd()


def _joined(
    found: Tensor,
    maxima: int,
    under: tuple[int | None, ...],
    scales: tuple[float, ...],
    heads: Heads,
) -> tuple[Tensor, Tensor]:
    """Maxima and sums over all ranks.

    Args:
        found: this rank's: first the maxima, then sums.
        under: which maximum each sum's exponents are counted from; None: it is a plain sum.
        scales: what these exponents were divided by.
    """
    highest, sums = found[:maxima], found[maxima:]
    if heads.group.size() == 1:
        return highest, sums
    own, highest = highest, highest.clone()
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=heads.group)
    for row, (at, scale) in enumerate(zip(under, scales, strict=True)):
        if at is not None:
            sums[row] *= ((own[at] - highest[at]) / scale).exp()
    dist.all_reduce(sums, group=heads.group)
    return highest, sums


def _flat(hidden: Tensor) -> Tensor:
    return hidden.reshape(-1, hidden.shape[-1])


def _rows(values: Tensor, whole: Tensor) -> Tensor:
    """[s * b] of states [s, b, d] as [b, s]."""
    return values.view(whole.shape[:2]).t().contiguous()
