"""Gated linear attention: one decay a key channel and token, in chunk form.

    S_t = Diag(exp g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

GLA: Yang et al. 2024, arXiv 2312.06635. HGRN-2 (Qin et al. 2024, arXiv 2404.07904) is the same
recurrence with k = 1 - exp(g). `megatron_lt2.ops.chunks` explains the chunk form.
"""

import torch
from torch import Tensor

from .chunks import (
    check_per_channel,
    check_qkv,
    check_state,
    compute_dtype,
    decayed_scores,
    default_scale,
    plan,
    run_chunks,
    without_autocast,
)


def chunk_gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTHK: Tensor,
    *,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Gated linear attention over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        g_BTHK: log decay of every key channel, at most 0.
        scale: factor on the output; default K**-0.5.
        initial_state: state before the first token of each document [N, H, K, V]; default zero.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.
        chunk_size: tokens a chunk; changes speed, and results only by rounding.

    Returns:
        Output [B, T, H, V] in v's dtype, and the state after each document [N, H, K, V] in fp32
        (fp64).

    Raises:
        ValueError: shapes or borders do not fit together.
    """
    check_qkv(q_BTHK, k_BTHK, v_BTHV)
    check_per_channel(k_BTHK, g_BTHK)
    dtype = compute_dtype(q_BTHK, v_BTHV)
    with without_autocast(q_BTHK.device.type):
        layout, state = plan(q_BTHK, v_BTHV.shape[-1], initial_state, cu_seqlens, chunk_size, dtype)
        q = layout.to_chunks(q_BTHK.to(dtype) * default_scale(scale, q_BTHK.shape[-1]))
        # Padding writes nothing (k = 0) and decays nothing (g = 0).
        k, g = (layout.to_chunks(x.to(dtype), zero_padding=True) for x in (k_BTHK, g_BTHK))
        g = g.cumsum(1)
        (scores,) = decayed_scores([q], k, g)
        o, final = run_chunks(
            layout,
            state,
            q_decayed_MCK=q * g.exp(),
            scores_MCC=scores,
            values_MCV=layout.to_chunks(v_BTHV.to(dtype)),
            k_to_end_MCK=k * (g[:, -1:] - g).exp(),
            decay_M1K=g[:, -1:].exp(),
        )
    return o.to(v_BTHV.dtype), final


def gla_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BHK: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_gla`, for decoding.

    Arguments as there, without T; state_BHKV is the state before this token and is not changed.

    Returns:
        Output [B, H, V] in v's dtype and the new state [B, H, K, V] in fp32 (fp64).

    Raises:
        ValueError: shapes do not fit together.
    """
    check_qkv(q_BHK, k_BHK, v_BHV)
    check_per_channel(k_BHK, g_BHK)
    check_state(state_BHKV, (*k_BHK.shape, v_BHV.shape[-1]))
    dtype = compute_dtype(q_BHK, v_BHV)
    q, k, v, g, state = (x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, g_BHK, state_BHKV))
    state = torch.addcmul(state * g.exp().unsqueeze(-1), k.unsqueeze(-1), v.unsqueeze(-2))
    o = (q.unsqueeze(-1) * state).sum(-2) * default_scale(scale, q.shape[-1])
    return o.to(v_BHV.dtype), state
