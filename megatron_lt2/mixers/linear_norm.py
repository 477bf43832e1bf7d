"""The RMS norm on a recurrence's output and the gate on it, over tensor-parallel heads."""

from typing import Any

from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor

from megatron_lt2.kernels.norms import gated_rms_norm, rms_norm
from megatron_lt2.ops.norms import activate_gate
from megatron_lt2.recurrent.base import Layout, wide


def output_norm(
    x: Tensor, gate: Tensor | None, weight: Tensor, layout: Layout, tp: Any, kernels: str
) -> Tensor:
    """Norm and gate of [B, T, H, V].

    Args:
        x: output of the recurrence, this tensor-parallel rank's heads.
        gate: of the same shape, or None.
        weight: of the norm; this rank's part if the norm is over all heads.
        layout: says over what the norm is, and how it is gated.
        tp: tensor-parallel process group.
        kernels: "fla" or "torch".
    """
    if layout.norm == "layer":
        if tp.size() > 1:
            return _over_ranks(x, gate, weight, layout, tp)
        flat = _one_rank(x.flatten(2), _flat(gate), weight, layout, kernels)
        return flat.unflatten(-1, x.shape[-2:])
    # Each tensor-parallel rank holds other heads, so the gradients of the shared norm weight are
    # summed.
    return _one_rank(x, gate, copy_to_tensor_model_parallel_region(weight, tp), layout, kernels)


def _over_ranks(x: Tensor, gate: Tensor | None, weight: Tensor, layout: Layout, tp: Any) -> Tensor:
    """RMS norm over the heads of all ranks: sums of squares travel, one number a token."""
    dtype, heads = x.dtype, x.shape[-2:]
    y = wide(x.flatten(2))
    act = None
    if gate is not None:
        act = activate_gate(wide(gate.flatten(2)), layout.gate_activation)
        if layout.gate_first:
            y = y * act
    squares = y.square().sum(-1, keepdim=True)
    # Every rank uses the sum of all: all-reduce forward, and all-reduce backward.
    squares = copy_to_tensor_model_parallel_region(
        reduce_from_tensor_model_parallel_region(squares, tp), tp
    )
    y = y * (squares / layout.norm_channels + layout.norm_eps).rsqrt()
    y = y * wide(weight)
    if act is not None and not layout.gate_first:
        y = y * act
    return y.to(dtype).unflatten(-1, heads)


def _flat(gate: Tensor | None) -> Tensor | None:
    return None if gate is None else gate.flatten(2)


def _one_rank(
    x: Tensor, gate: Tensor | None, weight: Tensor, layout: Layout, kernels: str
) -> Tensor:
    if gate is None:
        return rms_norm(x, weight, layout.norm_eps, backend=kernels)
    return gated_rms_norm(
        x,
        gate,
        weight,
        layout.norm_eps,
        activation=layout.gate_activation,
        gate_first=layout.gate_first,
        backend=kernels,
    )
