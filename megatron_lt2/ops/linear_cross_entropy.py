"""What a cross entropy takes from some of the vocabulary's logits, in plain torch.

    loss_i   = log sum_v exp(z_iv) - z_i,target(i),      z = x W^T
    dloss/dz = softmax(z_i) - [v = target(i)]

The vocabulary may be spread over ranks, and only a few tokens' logits exist at a time. So there are
two functions of such a piece: one reads three numbers a token, which add up over ranks, and one
turns logits into gradients where they stand.

Columns from `real` on are padding of the vocabulary: they have no probability and no gradient.
"""

import torch
from torch import Tensor


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which statistics of logits are computed: fp32 at least."""
    return torch.promote_types(dtype, torch.float32)


def row_statistics(logits_NV: Tensor, targets_N: Tensor, real: int) -> Tensor:
    """Maximum, sum of exponentials below that maximum, and the target's logit of each token.

    Args:
        logits_NV: [n, v], n tokens and this rank's columns of the vocabulary.
        targets_N: [n] columns; negative: the target is another rank's.
        real: columns that are no padding.

    Returns:
        [3, n] fp32 (fp64 for fp64). The target's logit is 0 where it is another rank's, and the
        dtype's lowest number where it is padding. Without real columns -inf and 0.
    """
    wide = logits_NV[:, :real].to(wide_dtype(logits_NV.dtype))
    out = wide.new_zeros(3, len(wide))
    out[2].masked_fill_(targets_N >= real, torch.finfo(logits_NV.dtype).min)
    if not real:
        out[0] = -torch.inf
        return out
    out[0] = wide.amax(-1)
    out[1] = (wide - out[0, :, None]).exp_().sum(-1)
    mine = (targets_N >= 0) & (targets_N < real)
    chosen = wide.gather(-1, targets_N.clamp(0, real - 1)[:, None])[:, 0]
    out[2] = torch.where(mine, chosen, out[2])
    return out


def logits_to_gradients(
    logits_NV: Tensor, targets_N: Tensor, lse_N: Tensor, weights_N: Tensor, real: int
) -> None:
    """Replace logits by the gradients (exp(z - lse) - [v = target]) * weight.

    Args:
        logits_NV: [n, v], overwritten.
        targets_N: [n] columns, see `row_statistics`.
        lse_N: [n] log of the sum of exponentials over the whole vocabulary.
        weights_N: [n] gradient of each token's loss.
        real: columns that are no padding.
    """
    gradients = logits_NV[:, :real].to(lse_N.dtype, copy=True)
    gradients.sub_(lse_N[:, None]).exp_()
    if real:
        mine = ((targets_N >= 0) & (targets_N < real)).to(gradients.dtype)
        each = torch.arange(len(gradients), device=gradients.device)
        gradients[each, targets_N.clamp(0, real - 1)] -= mine
    gradients.mul_(weights_N[:, None])
    logits_NV[:, :real] = gradients.to(logits_NV.dtype)
    logits_NV[:, real:] = 0
