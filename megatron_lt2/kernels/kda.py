"""Kimi Delta Attention with a choice of kernel; `megatron_lt2.ops.kda` explains the mathematics."""

from typing import Any

from torch import Tensor

from ..ops.kda import check_shapes, chunk_kda, kda_log_decay, kda_step
from .backend import fla_function, one_token, run_torch, use_fla
from .guards import guard_head_parameters, guard_recurrence


def kimi_delta_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    a_BTHK: Tensor,
    b_BTH: Tensor,
    A_log_H: Tensor,
    dt_bias_HK: Tensor,
    *,
    backend: str,
    allow_neg_eigval: bool = False,
    real_BT: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    scale_qk: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Kimi Delta Attention from raw gates: the delta rule with a decay a channel and with

        g = -exp(A_log) softplus(a + dt_bias)        beta = sigmoid(b), doubled for neg. eigenvalues

    On FLA both are made inside the kernel, unless there is padding.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values; see `scale_qk` for q and k.
        a_BTHK, b_BTH: decay and write strength before their activations.
        A_log_H: one number a head.
        dt_bias_HK: one number a head and key channel [H*K].
        backend: "fla" or "torch".
        allow_neg_eigval: write strengths in (0, 2).
        real_BT: bool, False for padding, which leaves the state alone; default: all tokens are
            real.
        scale: factor on the output; default K**-0.5.
        initial_state: state before the first token of each document [N, H, K, V]; default zero.
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the state after each document.
        scale_qk: normalise q and k here; they have length 1 already if not.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    fla = use_fla(backend)
    check_shapes(q_BTHK, k_BTHK, v_BTHV, a_BTHK, b_BTH)
    heads, key_dim = k_BTHK.shape[2:]
    guard_head_parameters(heads, A_log=(A_log_H, 1), dt_bias=(dt_bias_HK, key_dim))
    if fla and real_BT is None:
        g, beta = a_BTHK, b_BTH
    else:
        g = kda_log_decay(a_BTHK, A_log_H, dt_bias_HK)
        beta = b_BTH.to(g.dtype).sigmoid()
        if allow_neg_eigval:
            beta = beta * 2
        if real_BT is not None:
            g = g.masked_fill(~real_BT[:, :, None, None], 0)
            beta = beta.masked_fill(~real_BT.unsqueeze(-1), 0)
    tensors = (q_BTHK, k_BTHK, v_BTHV, g, beta)
    if not fla:
        return run_torch(
            chunk_kda,
            kda_step,
            tensors,
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
            qk_l2norm=scale_qk,
        )
    guard_recurrence(
        "Kimi Delta Attention",
        q_BTHK,
        k_BTHK,
        v_BTHV,
        cu_seqlens=cu_seqlens,
        initial_state=initial_state,
        per_head={"b": b_BTH},
        per_channel=a_BTHK,
        delta=True,
    )
    raw: dict[str, Any] = {}
    if real_BT is None:
        raw = {
            "A_log": A_log_H,
            "dt_bias": dt_bias_HK.flatten(),
            "use_gate_in_kernel": True,
            "use_beta_sigmoid_in_kernel": True,
            "allow_neg_eigval": allow_neg_eigval,
        }
    # The recurrent kernel has no gradient at all.
    decode = one_token((*tensors, A_log_H, dt_bias_HK), initial_state, cu_seqlens)
    kernel = fla_function("fla.ops.kda", "fused_recurrent_kda" if decode else "chunk_kda")
    return kernel(
        *tensors,
        scale=scale,
        initial_state=None if initial_state is None else initial_state.float(),
        output_final_state=output_final_state,
        use_qk_l2norm_in_kernel=scale_qk,
        cu_seqlens=cu_seqlens,
        **raw,
    )
