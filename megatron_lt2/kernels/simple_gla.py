"""Linear attention with scalar decay and a choice of kernel: RetNet, Mamba-2, plain linear
attention. `megatron_lt2.ops.simple_gla` explains the mathematics."""

from torch import Tensor

from ..ops.simple_gla import chunk_simple_gla, log_decay_per_token, simple_gla_step
from .backend import fla_function, one_token, run_torch, use_fla
from .guards import guard_recurrence


def simple_gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor | None,
    *,
    backend: str,
    decay_H: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """S_t = exp(g_t) S_{t-1} + k_t v_t^T, o_t = scale * S_t^T q_t.

    Arguments as `megatron_lt2.ops.simple_gla.chunk_simple_gla`, and:

    Args:
        backend: "fla" or "torch".
        decay_H: instead of g, a constant log decay a head: cheaper than a gate a token.
        cu_seqlens: document borders; with FLA on the GPU, and the *same tensor object* for all
            layers: FLA keeps its chunk plan by identity, and a new tensor costs a wait for the GPU.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    tensors = (q_BTHK, k_BTHK, v_BTHV, g_BTH)
    if not use_fla(backend):
        return run_torch(
            chunk_simple_gla,
            simple_gla_step,
            tensors,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
            decay_H=decay_H,
        )
    guard_recurrence(
        "linear attention with scalar decay",
        q_BTHK,
        k_BTHK,
        v_BTHV,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        per_head={"g": g_BTH},
    )
    log_decay_per_token(k_BTHK, g_BTH, decay_H)  # refuses both, and a decay of other heads
    decode = one_token(tensors, initial_state, cu_seqlens)
    kernel = "fused_recurrent_simple_gla" if decode else "chunk_simple_gla"
    return fla_function("fla.ops.simple_gla", kernel)(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        g=None if g_BTH is None else g_BTH.float(),
        g_gamma=None if decay_H is None else decay_H.detach().float(),
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        cu_seqlens=cu_seqlens,
    )
