"""Gated delta rule (Gated DeltaNet; Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464) in chunk form.

Per head, with a state S of K x V numbers:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Without decay (g = None) it is DeltaNet (Yang et al. 2024, arXiv 2406.06484).
`megatron_lt2.ops.chunks` explains the chunk form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import (
    check_per_head,
    check_qkv,
    check_state,
    compute_dtype,
    decay_between_tokens,
    default_scale,
    delta_updates,
    l2_normalize,
    plan,
    run_chunks,
    without_autocast,
)

__all__ = [
    "check_shapes",
    "chunk_gated_delta_rule",
    "gated_delta_rule_step",
    "gdn_log_decay",
    "l2_normalize",
]


def gdn_log_decay(a_BTH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> Tensor:
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) <= 0, in fp32 (fp64 if `a` is)."""
    dtype = compute_dtype(a_BTH)
    return -A_log_H.to(dtype).exp() * F.softplus(a_BTH.to(dtype) + dt_bias_H.to(dtype))


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor | None, beta: Tensor) -> None:
    """Refuse inputs of the gated delta rule whose shapes do not belong together.

    Raises:
        ValueError: naming the shapes.
    """
    check_qkv(q, k, v)
    check_per_head(k, g=g, beta=beta)


def chunk_gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor | None,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        g_BTH: log decay, at most 0; None for no decay.
        beta_BTH: write strength, in [0, 1], or [0, 2] for negative eigenvalues.
        scale: factor on the output; default K**-0.5.
        initial_state: state before the first token of each document [N, H, K, V]; default zero.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.
        chunk_size: tokens a chunk; changes speed, and results only by rounding.
        qk_l2norm: normalise q and k first. Without it keys must not be longer than 1, or the state
            may grow without bound.

    Returns:
        Output [B, T, H, V] in v's dtype, and the state after each document [N, H, K, V] in fp32
        (fp64).

    Raises:
        ValueError: shapes or borders do not fit together.
    """
    check_shapes(q_BTHK, k_BTHK, v_BTHV, g_BTH, beta_BTH)
    dtype = compute_dtype(q_BTHK, v_BTHV)
    with without_autocast(q_BTHK.device.type):
        layout, state = plan(q_BTHK, v_BTHV.shape[-1], initial_state, cu_seqlens, chunk_size, dtype)
        q, k = q_BTHK.to(dtype), k_BTHK.to(dtype)
        if qk_l2norm:
            q, k = l2_normalize(q), l2_normalize(k)
        q = layout.to_chunks(q * default_scale(scale, q.shape[-1]))
        k, v = layout.to_chunks(k), layout.to_chunks(v_BTHV.to(dtype))
        # Padding has beta = g = 0, which leaves the state alone.
        beta = layout.to_chunks(beta_BTH.to(dtype).unsqueeze(-1), zero_padding=True)
        if g_BTH is None:
            g = torch.zeros_like(beta)
        else:
            g = layout.to_chunks(g_BTH.to(dtype).unsqueeze(-1), zero_padding=True).cumsum(1)
        between, from_start = decay_between_tokens(g), g.exp()
        k_transposed = k.transpose(1, 2)
        values, erase = delta_updates((k @ k_transposed) * between, v, k * from_start, beta)
        o, final = run_chunks(
            layout,
            state,
            q_decayed_MCK=q * from_start,
            scores_MCC=(q @ k_transposed) * between,
            values_MCV=values,
            k_to_end_MCK=k * (g[:, -1:] - g).exp(),
            decay_M1K=from_start[:, -1:],
            erase_MCK=erase,
        )
    return o.to(v_BTHV.dtype), final


def gated_delta_rule_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BH: Tensor | None,
    beta_BH: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token of the gated delta rule, for decoding.

    Arguments as `chunk_gated_delta_rule`, without T; state_BHKV is the state before this token.

    Returns:
        Output [B, H, V] in v's dtype and the new state [B, H, K, V] in fp32 (fp64). The old state
        is not changed.

    Raises:
        ValueError: shapes do not fit together.
    """
    check_shapes(q_BHK, k_BHK, v_BHV, g_BH, beta_BH)
    check_state(state_BHKV, (*k_BHK.shape, v_BHV.shape[-1]))
    dtype = compute_dtype(q_BHK, v_BHV)
    q, k, v, beta, state = (x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, beta_BH, state_BHKV))
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    # Products and sums instead of matmul: exact under autocast too, and no slower for one token.
    if g_BH is not None:
        state = state * g_BH.to(dtype).exp()[..., None, None]
    u = beta[..., None] * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * u[..., None, :]
    o = (q[..., None] * state).sum(-2) * default_scale(scale, q.shape[-1])
    return o.to(v_BHV.dtype), state
