"""Root-mean-square norms, plain and gated, with a choice of kernel."""

from torch import Tensor

from ..ops import norms
from ..ops.norms import GateActivation, activate_gate
from .backend import fla_function, use_fla
from .guards import guard_norm

__all__ = ["activate_gate", "gated_rms_norm", "rms_norm"]


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, backend: str) -> Tensor:
    """x / sqrt(mean x^2 + eps) * weight over the last dimension, in x's dtype.

    Args:
        x: [..., D].
        weight: [D].
        eps: added to the mean square.
        backend: "fla" (one fused kernel each way) or "torch".

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        return norms.rms_norm(x, weight, eps)
    guard_norm(x, weight)
    return fla_function("fla.modules.layernorm", "rms_norm")(x, weight, None, eps=eps)


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    *,
    backend: str,
    activation: GateActivation = "silu",
    gate_first: bool = False,
) -> Tensor:
    """rms_norm(x) * weight * act(gate); arguments as `megatron_lt2.ops.norms.gated_rms_norm`.

    Args:
        backend: "fla" (one fused kernel each way, except for a sigmoid gate that comes first) or
            "torch".

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        return norms.gated_rms_norm(
            x, gate, weight, eps, activation=activation, gate_first=gate_first
        )
    guard_norm(x, weight, gate)
    if activation not in ("silu", "sigmoid"):
        return activate_gate(gate, activation)  # raises
    if not gate_first:
        kernel = fla_function("fla.modules.fused_norm_gate", "rms_norm_gated")
        return kernel(x, gate, weight, None, activation=activation, eps=eps)
    if activation == "silu":
        kernel = fla_function("fla.modules.layernorm_gated", "rmsnorm_fn")
        return kernel(x, weight, None, z=gate, eps=eps, norm_before_gate=False)
    return rms_norm(x * activate_gate(gate, activation), weight, eps, backend=backend)
