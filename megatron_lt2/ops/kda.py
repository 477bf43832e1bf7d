"""Kimi Delta Attention (Kimi Team 2025, arXiv 2510.26692): the delta rule with a decay a channel.

Per head, with a state S of K x V numbers:

    S_t = (I - beta_t k_t k_t^T) Diag(exp g_t) S_{t-1} + beta_t k_t v_t^T
    o_t = scale * S_t^T q_t

`megatron_lt2.ops.chunks` explains the chunk form.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import (
    check_per_channel,
    check_per_head,
    check_qkv,
    check_state,
    compute_dtype,
    decayed_scores,
    default_scale,
    delta_updates,
    l2_normalize,
    plan,
    run_chunks,
    without_autocast,
)


def kda_log_decay(a_BTHK: Tensor, A_log_H: Tensor, dt_bias_HK: Tensor) -> Tensor:
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) <= 0, in fp32 (fp64 if `a` is).

    Args:
        a_BTHK: raw gate.
        A_log_H: one number a head.
        dt_bias_HK: one number a head and channel, as [H, K] or flat [H*K].
    """
    dtype = compute_dtype(a_BTHK)
    bias = dt_bias_HK.to(dtype).view(a_BTHK.shape[-2:])
    return -A_log_H.to(dtype).exp().unsqueeze(-1) * F.softplus(a_BTHK.to(dtype) + bias)


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse inputs of Kimi Delta Attention whose shapes do not belong together.

    Raises:
        ValueError: naming the shapes.
    """
    check_qkv(q, k, v)
    check_per_channel(k, g)
    check_per_head(k, beta=beta)


def chunk_kda(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    beta_BTH: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """Kimi Delta Attention over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        g_BTHK: log decay of every key channel, at most 0.
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
    check_shapes(q_BTHK, k_BTHK, v_BTHV, g_BTHK, beta_BTH)
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
        g = layout.to_chunks(g_BTHK.to(dtype), zero_padding=True).cumsum(1)
        scores, key_scores = decayed_scores([q, k], k, g)
        from_start = g.exp()
        values, erase = delta_updates(key_scores, v, k * from_start, beta)
        o, final = run_chunks(
            layout,
            state,
            q_decayed_MCK=q * from_start,
            scores_MCC=scores,
            values_MCV=values,
            k_to_end_MCK=k * (g[:, -1:] - g).exp(),
            decay_M1K=from_start[:, -1:],
            erase_MCK=erase,
        )
    return o.to(v_BTHV.dtype), final


def kda_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor,
    beta_BH: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_kda`, for decoding.

    Arguments as there, without T; state_BHKV is the state before this token and is not changed.

    Returns:
        Output [B, H, V] in v's dtype and the new state [B, H, K, V] in fp32 (fp64).

    Raises:
        ValueError: shapes do not fit together.
    """
    check_shapes(q_BHK, k_BHK, v_BHV, g_BHK, beta_BH)
    check_state(state_BHKV, (*k_BHK.shape, v_BHV.shape[-1]))
    dtype = compute_dtype(q_BHK, v_BHV)
    q, k, v, g, beta, state = (
        x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, g_BHK, beta_BH, state_BHKV)
    )
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    state = state * g.exp().unsqueeze(-1)
    u = beta.unsqueeze(-1) * (v - (k.unsqueeze(-1) * state).sum(-2))
    state = torch.addcmul(state, k.unsqueeze(-1), u.unsqueeze(-2))
    o = (q.unsqueeze(-1) * state).sum(-2) * default_scale(scale, q.shape[-1])
    return o.to(v_BHV.dtype), state
