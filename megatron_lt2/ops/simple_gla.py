"""Linear attention with one decay a head and token, in chunk form.

    S_t = exp(g_t) S_{t-1} + k_t v_t^T        o_t = scale * S_t^T q_t

With g = None nothing decays (linear attention, Katharopoulos et al. 2020, arXiv 2006.16236); with a
constant decay a head it is RetNet's retention (Sun et al. 2023, arXiv 2307.08621); with
g = dt A, k = B, q = C, v = dt x and scale 1 it is Mamba-2's recurrence (Dao and Gu 2024,
arXiv 2405.21060). `megatron_lt2.ops.chunks` explains the chunk form.
"""

import torch
from torch import Tensor

from .chunks import (
    check_per_head,
    check_qkv,
    check_state,
    compute_dtype,
    decay_between_tokens,
    default_scale,
    plan,
    run_chunks,
    without_autocast,
)


def log_decay_per_token(k: Tensor, g: Tensor | None, decay_H: Tensor | None) -> Tensor | None:
    """g, or the constant log decay of every head repeated for every token; None without either.

    Args:
        k: keys [..., H, K].
        g: log decay [..., H] or None.
        decay_H: constant log decay or None. It is a constant: no gradient reaches it.

    Raises:
        ValueError: both are given, or a shape does not fit.
    """
    if decay_H is None:
        check_per_head(k, g=g)
        return g
    if g is not None:
        raise ValueError("Give either g or decay_H, not both.")
    if decay_H.shape != k.shape[-2:-1]:
        raise ValueError(
            f"decay_H needs one number a head, {tuple(k.shape[-2:-1])},"
            f" but has shape {tuple(decay_H.shape)}."
        )
    return decay_H.detach().expand(k.shape[:-1])


def chunk_simple_gla(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor | None,
    *,
    decay_H: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Linear attention with scalar decay over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        g_BTH: log decay, at most 0; None for no decay.
        decay_H: instead of g, a constant log decay a head (every token decays, padding too).
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
    g_BTH = log_decay_per_token(k_BTHK, g_BTH, decay_H)
    dtype = compute_dtype(q_BTHK, v_BTHV)
    with without_autocast(q_BTHK.device.type):
        layout, state = plan(q_BTHK, v_BTHV.shape[-1], initial_state, cu_seqlens, chunk_size, dtype)
        q = layout.to_chunks(q_BTHK.to(dtype) * default_scale(scale, q_BTHK.shape[-1]))
        # Padding writes nothing (k = 0) and decays nothing (g = 0).
        k = layout.to_chunks(k_BTHK.to(dtype), zero_padding=True)
        v = layout.to_chunks(v_BTHV.to(dtype))
        if g_BTH is None:
            g = k.new_zeros(*k.shape[:2], 1)
        else:
            g = layout.to_chunks(g_BTH.to(dtype).unsqueeze(-1), zero_padding=True)
        g = g.cumsum(1)
        o, final = run_chunks(
            layout,
            state,
            q_decayed_MCK=q * g.exp(),
            scores_MCC=(q @ k.transpose(1, 2)) * decay_between_tokens(g),
            values_MCV=v,
            k_to_end_MCK=k * (g[:, -1:] - g).exp(),
            decay_M1K=g[:, -1:].exp(),
        )
    return o.to(v_BTHV.dtype), final


def simple_gla_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BH: Tensor | None,
    state_BHKV: Tensor,
    *,
    decay_H: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_simple_gla`, for decoding.

    Arguments as there, without T; state_BHKV is the state before this token and is not changed.

    Returns:
        Output [B, H, V] in v's dtype and the new state [B, H, K, V] in fp32 (fp64).

    Raises:
        ValueError: shapes do not fit together.
    """
    check_qkv(q_BHK, k_BHK, v_BHV)
    g_BH = log_decay_per_token(k_BHK, g_BH, decay_H)
    check_state(state_BHKV, (*k_BHK.shape, v_BHV.shape[-1]))
    dtype = compute_dtype(q_BHK, v_BHV)
    q, k, v, state = (x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, state_BHKV))
    if g_BH is not None:
        state = state * g_BH.to(dtype).exp()[..., None, None]
    state = torch.addcmul(state, k.unsqueeze(-1), v.unsqueeze(-2))
    # Products and sums instead of matmul: exact under autocast too, and no slower for one token.
    o = (q.unsqueeze(-1) * state).sum(-2) * default_scale(scale, q.shape[-1])
    return o.to(v_BHV.dtype), state
