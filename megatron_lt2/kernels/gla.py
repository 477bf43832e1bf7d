"""Gated linear attention with a choice of kernel; `megatron_lt2.ops.gla` explains the maths."""

from torch import Tensor

from ..ops.gla import chunk_gla, gla_step
from .backend import fla_function, one_token, run_torch, use_fla
from .guards import guard_recurrence


def gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    *,
    backend: str,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Arguments as `megatron_lt2.ops.gla.chunk_gla`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTHK)
    if not use_fla(backend):
        return run_torch(
            chunk_gla,
            gla_step,
            tensors,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
        )
    guard_recurrence(
        "gated linear attention",
        q_BTHK,
        k_BTHK,
        v_BTHV,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        per_channel=g_BTHK,
    )
    decode = one_token(tensors, initial_state, cu_seqlens)
    kernel = fla_function("fla.ops.gla", "fused_recurrent_gla" if decode else "chunk_gla")
    return kernel(
        *tensors,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
