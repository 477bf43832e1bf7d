"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv 1910.07467).

Computed in fp32 for 16-bit inputs and rounded once at the end.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def _normalized(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    x = x.to(dtype)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension [..., D], in x's dtype."""
    return _normalized(x, weight, eps).to(x.dtype)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm(x) * weight * silu(gate), rounded once, in x's dtype.

    Args:
        x: [..., D], for Gated DeltaNet one head's output.
        gate: the gate before its activation, shape of x.
        weight: [D].
        eps: added to the mean square.
    """
    y = _normalized(x, weight, eps)
    return (y * F.silu(gate.to(y.dtype))).to(x.dtype)
