"""Mamba2's gates: from the step size to log decays and keys, with a choice of kernel.

    dt_t = softplus(raw_t + bias),   g_t = -exp(A_log) dt_t,   key_t = dt_t B_t

FLA has no kernel for it. As single operations this is some twenty launches in the two passes, which
is what a short row waits for; ours are two.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from .backend import check_device, use_fla


def decays_and_keys(
    raw_BTH: Tensor, B_BTD: Tensor, A_log_H: Tensor, bias_H: Tensor, groups: int, *, backend: str
) -> tuple[Tensor, Tensor]:
    """Log decays and keys of Mamba2.

    Args:
        raw_BTH: projected step sizes.
        B_BTD: [B, T, groups * N], in groups that H / groups neighbouring heads share.
        A_log_H: log of minus A, fp32.
        bias_H: of the step sizes, fp32.
        groups: of heads.
        backend: "fla" (a Triton kernel of our own) or "torch".

    Returns:
        Log decays [B, T, H] in fp32 (fp64 for fp64), keys [B, T, H, N] in B's dtype.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    heads = raw_BTH.shape[-1]
    if heads % groups:
        raise ValueError(f"{groups} groups of Mamba2 do not divide {heads} heads.")
    if not use_fla(backend):
        dt = F.softplus(raw_BTH + bias_H)  # in fp32, as the bias is
        keys = dt.unsqueeze(-1) * of_heads(B_BTD, groups, heads)
        return -A_log_H.exp() * dt, keys.to(B_BTD.dtype)
    check_device(raw_BTH.device.type)
    decays, keys = _DecaysAndKeys.apply(
        raw_BTH.flatten(0, 1), B_BTD.flatten(0, 1), A_log_H, bias_H, groups
    )
    batch = raw_BTH.shape[:2]
    return decays.unflatten(0, batch), keys.unflatten(0, batch)


def of_heads(shared_BTD: Tensor, groups: int, heads: int) -> Tensor:
    """[B, T, groups * N] -> [B, T, H, N]; with one group without a copy."""
    each = shared_BTD.unflatten(-1, (groups, -1))
    if groups == 1:
        return each.expand(-1, -1, heads, -1)
    return each.repeat_interleave(heads // groups, dim=2)


class _DecaysAndKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, raw: Tensor, B: Tensor, A_log: Tensor, bias: Tensor, groups: int
    ) -> tuple[Tensor, Tensor]:
        from .mamba2_triton import launch_forward

        raw, B = _rows(raw), _rows(B)
        ctx.save_for_backward(raw, B, A_log, bias)
        ctx.groups = groups
        return launch_forward(raw, B, A_log, bias, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_decays: Tensor, d_keys: Tensor) -> tuple[Tensor | None, ...]:
        from .mamba2_triton import launch_backward

        raw, B, A_log, bias = ctx.saved_tensors
        gradients = launch_backward(
            raw, B, A_log, bias, ctx.groups, d_decays.contiguous(), d_keys.contiguous()
        )
        return (*gradients, None)


def _rows(x: Tensor) -> Tensor:
    """x [n, channels] with neighbouring channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
