"""Gated delta rule with a choice of kernel; `megatron_lt2.ops.gdn` explains the mathematics."""

from torch import Tensor

from megatron_lt2.kernels.backend import guard_gdn, use_fla
from megatron_lt2.ops.gdn import chunk_gated_delta_rule


def gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
    beta_BTH: Tensor,
    *,
    backend: str,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule with L2-normalised queries and keys.

    Arguments as `megatron_lt2.ops.gdn.chunk_gated_delta_rule`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: document borders; with FLA on the GPU, and the *same tensor object* for all
            layers: FLA keeps its chunk plan by identity, and a new tensor costs a wait for the GPU.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        o, state = chunk_gated_delta_rule(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            g_BTH,
            beta_BTH,
            scale=scale,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
        )
        return o, state if output_final_state else None

    guard_gdn(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH, cu_seqlens)
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule as fla_gated_delta_rule

    return fla_gated_delta_rule(
        q_BTHK,
        k_BTHK,
        v_BTHV,
        g_BTH.float(),
        beta_BTH,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
