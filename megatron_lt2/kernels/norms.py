"""Gated norm with a choice of kernel."""

from torch import Tensor

from megatron_lt2.kernels.backend import guard_gated_norm, use_fla
from megatron_lt2.ops import norms


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, *, backend: str) -> Tensor:
    """rms_norm(x) * weight * silu(gate); arguments as `megatron_lt2.ops.norms.gated_rms_norm`.

    Args:
        backend: "fla" (one fused kernel each way) or "torch".

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        return norms.gated_rms_norm(x, gate, weight, eps)
    guard_gated_norm(x, gate, weight)
    from fla.modules.fused_norm_gate import rms_norm_gated

    return rms_norm_gated(x, gate, weight, None, activation="swish", eps=eps)
