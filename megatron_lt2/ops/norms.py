"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv 1910.07467).

Computed in fp32 for 16-bit inputs and rounded once at the end.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

GateActivation = Literal["silu", "sigmoid"]


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def activate_gate(x: Tensor, activation: GateActivation) -> Tensor:
    """A gate's activation, in x's dtype.

    Raises:
        ValueError: unknown activation.
    """
    if activation == "silu":
        return F.silu(x)
    if activation == "sigmoid":
        return x.sigmoid()
    raise ValueError(f"A gate is activated by 'silu' or 'sigmoid', not {activation!r}.")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension [..., D], in x's dtype."""
    return _normalized(x, weight, eps).to(x.dtype)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    activation: GateActivation = "silu",
    gate_first: bool = False,
) -> Tensor:
    """rms_norm(x) * weight * act(gate), rounded once, in x's dtype.

    Args:
        x: [..., D], for Gated DeltaNet one head's output.
        gate: the gate before its activation, shape of x.
        weight: [D].
        eps: added to the mean square.
        activation: of the gate.
        gate_first: rms_norm(x * act(gate)) * weight instead, as in Mamba-2.

    Raises:
        ValueError: unknown activation.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    factor = activate_gate(gate.to(wide.dtype), activation)
    if gate_first:
        return _normalized(wide * factor, weight, eps).to(x.dtype)
    return (_normalized(wide, weight, eps) * factor).to(x.dtype)
