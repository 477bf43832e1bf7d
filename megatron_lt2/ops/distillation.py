"""Cross entropy and Kullback-Leibler divergence from some of the vocabulary's logits, plain torch.

    CE_i = log sum_v exp(s_iv) - s_i,target(i)
    KL_i = sum_v p_iv (log p_iv - log q_iv),   p = softmax(t / tau),  q = softmax(s / tau)

s are the student's logits and t the teacher's. As in `linear_cross_entropy.py` the vocabulary may
be spread over ranks and only a few tokens' logits exist at a time: numbers that add up over ranks
are read from a piece, and a piece is turned into gradients where it stands.

The divergence is summed as sum_v p_v (t_v - s_v) / tau and two normalisers, so that equal logits
give exactly 0.
"""

import torch
from torch import Tensor

from .linear_cross_entropy import wide_dtype

SUMS = 5
"""Rows of `pair_statistics` behind the two maxima."""


def pair_statistics(
    student_NV: Tensor, teacher_NV: Tensor, targets_N: Tensor, real: int, temperature: float
) -> Tensor:
    """What the losses of a piece of the vocabulary need.

    Args:
        student_NV, teacher_NV: [n, v] logits of this rank's columns.
        targets_N: [n] columns; negative or `real` and above: another rank's.
        real: columns that are no padding.
        temperature: tau.

    Returns:
        [7, n] in fp32 at least: maximum of s and of t; then, below these maxima, sum exp(s),
        sum exp(s / tau), sum exp(t / tau), sum exp(t / tau) (t - s) / tau; and the target's s.
    """
    s, t = (x[:, :real].to(wide_dtype(x.dtype)) for x in (student_NV, teacher_NV))
    out = s.new_zeros(2 + SUMS, len(s))
    if not real:
        out[:2] = -torch.inf
        return out
    out[0], out[1] = s.amax(-1), t.amax(-1)
    below = s - out[0, :, None]
    out[2] = below.exp().sum(-1)
    out[3] = out[2] if temperature == 1 else below.div_(temperature).exp_().sum(-1)
    weights = ((t - out[1, :, None]) / temperature).exp_()
    out[4] = weights.sum(-1)
    out[5] = weights.mul_(t - s).sum(-1) / temperature
    out[6] = _at_targets(s, targets_N)
    return out


def pair_gradients(
    student_NV: Tensor,
    teacher_NV: Tensor,
    targets_N: Tensor,
    normalisers_3N: Tensor,
    weights_2N: Tensor,
    real: int,
    temperature: float,
) -> None:
    """Replace the student's logits by the gradients of `a CE + b KL` of every token.

    Args:
        student_NV: [n, v], overwritten.
        teacher_NV: [n, v].
        targets_N: as `pair_statistics`.
        normalisers_3N: logs of the sums of exp(s), exp(s / tau) and exp(t / tau) over all ranks.
        weights_2N: a and b.
        real, temperature: as `pair_statistics`.
    """
    s, t = (x[:, :real].to(normalisers_3N.dtype) for x in (student_NV, teacher_NV))
    lse, lse_student, lse_teacher = normalisers_3N[:, :, None]
    a, b = weights_2N[:, :, None]
    gradients = (s / temperature - lse_student).exp_()
    gradients -= (t / temperature - lse_teacher).exp_()
    gradients *= b / temperature
    gradients.addcmul_((s - lse).exp_(), a.expand_as(s))
    _subtract_at_targets(gradients, targets_N, weights_2N[0])
    student_NV[:, :real] = gradients.to(student_NV.dtype)
    student_NV[:, real:] = 0


def chosen_statistics(
    student_NV: Tensor, targets_N: Tensor, columns_NK: Tensor, real: int, temperature: float
) -> tuple[Tensor, Tensor]:
    """As `pair_statistics`, where the teacher is known at a few tokens of the vocabulary only.

    Args:
        columns_NK: [n, k] columns of these; negative or `real` and above: another rank's.

    Returns:
        [4, n] maximum of s, sum exp(s), sum exp(s / tau) below it, the target's s; and s at
        `columns_NK` [n, k], 0 where it is another rank's.
    """
    s = student_NV[:, :real].to(wide_dtype(student_NV.dtype))
    out = s.new_zeros(4, len(s))
    if not real:
        out[0] = -torch.inf
        return out, s.new_zeros(columns_NK.shape)
    out[0] = s.amax(-1)
    below = s - out[0, :, None]
    out[1] = below.exp().sum(-1)
    out[2] = out[1] if temperature == 1 else below.div_(temperature).exp_().sum(-1)
    out[3] = _at_targets(s, targets_N)
    mine = (columns_NK >= 0) & (columns_NK < real)
    found = s.gather(-1, columns_NK.clamp(0, real - 1))
    return out, torch.where(mine, found, 0.0)


def chosen_gradients(
    student_NV: Tensor,
    targets_N: Tensor,
    columns_NK: Tensor,
    pulls_NK: Tensor,
    normalisers_2N: Tensor,
    weights_2N: Tensor,
    real: int,
    temperature: float,
) -> None:
    """Replace logits by the gradients of `a CE + b (KL's part over the whole vocabulary)`, and add
    `pulls_NK` at `columns_NK`.

    Args:
        normalisers_2N: logs of the sums of exp(s) and exp(s / tau) over all ranks.
        weights_2N: a, and b for the probabilities of the whole vocabulary; 0: none.
        Others as `chosen_statistics`.
    """
    s = student_NV[:, :real].to(normalisers_2N.dtype)
    lse, lse_student = normalisers_2N[:, :, None]
    a, b = weights_2N[:, :, None]
    gradients = (s / temperature - lse_student).exp_().mul_(b / temperature)
    gradients.addcmul_((s - lse).exp_(), a.expand_as(s))
    _subtract_at_targets(gradients, targets_N, weights_2N[0])
    if real:
        mine = ((columns_NK >= 0) & (columns_NK < real)).to(gradients.dtype)
        gradients.scatter_add_(-1, columns_NK.clamp(0, real - 1), pulls_NK * mine)
    student_NV[:, :real] = gradients.to(student_NV.dtype)
    student_NV[:, real:] = 0


def _at_targets(s: Tensor, targets: Tensor) -> Tensor:
    real = s.shape[1]
    mine = (targets >= 0) & (targets < real)
    chosen = s.gather(-1, targets.clamp(0, real - 1)[:, None])[:, 0]
    return torch.where(mine, chosen, 0.0)


def _subtract_at_targets(gradients: Tensor, targets: Tensor, weights: Tensor) -> None:
    real = gradients.shape[1]
    if real:
        mine = ((targets >= 0) & (targets < real)).to(gradients.dtype)
        each = torch.arange(len(gradients), device=gradients.device)
        gradients[each, targets.clamp(0, real - 1)] -= mine * weights
