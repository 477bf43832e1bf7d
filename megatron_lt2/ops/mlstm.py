"""mLSTM, the matrix memory of xLSTM (Beck et al. 2024, arXiv 2405.04517), in chunk form.

With an exponential input gate e^{i_t} and a forget gate e^{f_t},

    C_t = e^{f_t} C_{t-1} + e^{i_t} k_t v_t^T    n_t = e^{f_t} n_{t-1} + e^{i_t} k_t
    h_t = C_t^T q_t / max(|n_t^T q_t|, 1)        (q scaled first)

n is one more value column that is always 1. e^{i_t} may overflow, so the state is kept as
S = [C | n] e^{-m} with m_t = max(m_{t-1} + f_t, i_t), and then

    S_t = e^{f_t + m_{t-1} - m_t} S_{t-1} + e^{i_t - m_t} k_t [v_t | 1]^T

is a recurrence with scalar decay (`megatron_lt2.ops.simple_gla`), whose log decay is at most 0.
h = num / max(|den|, e^{-m}) is the same for every m, so m may be computed without gradient and with
less care than the rest; everything else differentiates exactly. The factor e^{i_t - m_t} goes to
the key: 16-bit kernels then round numerator and denominator alike.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from .chunks import check_per_head, check_qkv, check_state, compute_dtype, default_scale
from .documents import document_bounds, document_ids
from .simple_gla import chunk_simple_gla, simple_gla_step

State = tuple[Tensor, Tensor]
SMALLEST_GATE = -1e4
"""What a smaller input gate counts as when m is chosen."""


def check_mlstm(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, f: Tensor, state: State | None, documents: int
) -> None:
    """Refuse inputs of the mLSTM whose shapes do not belong together.

    Raises:
        ValueError: naming the shapes.
    """
    check_qkv(q, k, v)
    check_per_head(k, i=i, f=f)
    if state is not None:
        heads, key_dim, value_dim = *k.shape[-2:], v.shape[-1]
        check_state(state[0], (documents, heads, key_dim, value_dim + 1))
        if tuple(state[1].shape) != (documents, heads):
            raise ValueError(
                f"The stabiliser of the mLSTM state must have shape {(documents, heads)},"
                f" not {tuple(state[1].shape)}."
            )


def _running_max(x: Tensor, dim: int) -> Tensor:
    return x.cummax(dim).values


def _along_time(scan: Callable[..., Tensor], x_BTH: Tensor) -> Tensor:
    """A scan over T with T innermost: a GPU takes 50 times as long over an outer dimension."""
    return scan(x_BTH.transpose(1, 2).contiguous(), dim=-1).transpose(1, 2)


@torch.no_grad()
def stabilisers(
    i_BTH: Tensor, f_BTH: Tensor, m_NH: Tensor | None, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """m before and after every token [B, T, H], and after every document [N, H].

    With F the sum of f since the document's start, m_t = F_t + max(m_0, max_{s<=t} (i_s - F_s)).
    The running maximum starts anew at every document, because an offset a document lifts it over
    all that came before. It is computed in fp64 and never waits for the device.

    Args:
        i_BTH, f_BTH: log gates.
        m_NH: m before each document; default zero.
        cu_seqlens: document borders of a packed row.
    """
    batch, length, heads = i_BTH.shape
    documents = batch if cu_seqlens is None else len(cu_seqlens) - 1
    dtype = compute_dtype(i_BTH)
    if m_NH is None:
        m_NH = i_BTH.new_zeros(documents, heads, dtype=dtype)
    m_NH = m_NH.to(dtype)
    if not length:
        empty = i_BTH.new_zeros(i_BTH.shape, dtype=dtype)
        return empty, empty, m_NH
    # A broken number must not reach the other documents of the row.
    i, f = (x.double().nan_to_num() for x in (i_BTH, f_BTH))
    total = _along_time(torch.cumsum, f)
    if cu_seqlens is None:
        rising = _along_time(_running_max, i.clamp_min(SMALLEST_GATE) - total)
        m = (torch.maximum(rising, m_NH.unsqueeze(1)) + total).to(dtype)
        before = torch.cat([m_NH.unsqueeze(1), m[:, :-1]], 1)
        return before, m, m[:, -1]

    borders = cu_seqlens.to(device=i.device, dtype=torch.long)
    document_T = document_ids(borders, length)
    first_N = borders[:-1].clamp_max(length - 1)
    total = total - (total - f)[0, first_N][document_T]
    own = i.clamp_min(SMALLEST_GATE) - total
    m_first = m_NH.double()[document_T]
    offset_T1 = document_T.unsqueeze(1) * (own.amax() - torch.minimum(own, m_first).amin() + 1)
    rising = _along_time(_running_max, own + offset_T1) - offset_T1
    m = (torch.maximum(rising, m_first) + total).to(dtype)
    at_start = document_T.diff(prepend=document_T.new_full((1,), -1)) > 0
    shifted = torch.cat([m[:, :1], m[:, :-1]], 1)
    before = torch.where(at_start.unsqueeze(1), m_NH[document_T], shifted)
    last_N = (borders[1:] - 1).clamp_min(0)
    final = torch.where(borders.diff().unsqueeze(1) > 0, m[0, last_N], m_NH)
    return before, m, final


def stabilised_inputs(
    k: Tensor, i: Tensor, f: Tensor, before: Tensor, m: Tensor
) -> tuple[Tensor, Tensor]:
    """Keys e^{i-m} k in k's dtype, and the log decay f + m_{t-1} - m_t in fp32 (fp64)."""
    dtype = compute_dtype(k, i)
    gain = (i.to(dtype) - m).exp()
    return (k * gain.unsqueeze(-1)).to(k.dtype), f.to(dtype) + (before - m)


def with_ones(v: Tensor, columns: int = 1) -> Tensor:
    """[v | 1 | 0 ..] with so many more columns."""
    more = v.new_zeros(*v.shape[:-1], columns)
    more[..., 0] = 1
    return torch.cat([v, more], -1)


def read_out(o: Tensor, m: Tensor, value_dim: int) -> Tensor:
    """h = num / max(|den|, e^{-m}) from the output [.., V + 1 or more] of the recurrence."""
    dtype = compute_dtype(o)
    # e^{-m} must neither overflow nor vanish: den is 0 where q or k is.
    limit = 0.9 * math.log(torch.finfo(dtype).max)
    least = (-m.to(dtype)).clamp(-limit, limit).exp().unsqueeze(-1)
    num, den = o[..., :value_dim].to(dtype), o[..., value_dim : value_dim + 1].to(dtype)
    return num / torch.maximum(den.abs(), least)


def chunk_mlstm(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    i_BTH: Tensor,
    f_BTH: Tensor,
    *,
    scale: float | None = None,
    initial_state: State | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, State]:
    """mLSTM over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries, keys, values.
        i_BTH: log of the input gate, any number.
        f_BTH: log of the forget gate, at most 0 and finite.
        scale: factor on the queries; default K**-0.5.
        initial_state: (S [N, H, K, V+1], m [N, H]) before the first token of each document, where
            the last column of S is n; default zero.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.
        chunk_size: tokens a chunk; changes speed, and results only by rounding.

    Returns:
        Output [B, T, H, V] in v's dtype, and the state after each document in fp32 (fp64).

    Raises:
        ValueError: shapes or borders do not fit together.
    """
    batch, length = k_BTHK.shape[:2]
    documents = batch
    if cu_seqlens is not None:
        documents = len(document_bounds(cu_seqlens, batch, length)) - 1
    check_mlstm(q_BTHK, k_BTHK, v_BTHV, i_BTH, f_BTH, initial_state, documents)
    dtype = compute_dtype(q_BTHK, v_BTHV)
    q, k, v, i, f = (x.to(dtype) for x in (q_BTHK, k_BTHK, v_BTHV, i_BTH, f_BTH))
    state, m_NH = (None, None) if initial_state is None else initial_state
    before, m, m_final = stabilisers(i, f, m_NH, cu_seqlens)
    k, g = stabilised_inputs(k, i, f, before, m)
    o, final = chunk_simple_gla(
        q,
        k,
        with_ones(v),
        g,
        scale=scale,
        initial_state=state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    return read_out(o, m, v.shape[-1]).to(v_BTHV.dtype), (final, m_final)


def mlstm_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    i_BH: Tensor,
    f_BH: Tensor,
    state: State,
    *,
    scale: float | None = None,
) -> tuple[Tensor, State]:
    """One token of `chunk_mlstm`, for decoding.

    Arguments as there, without T; `state` is the one before this token and is not changed.

    Returns:
        Output [B, H, V] in v's dtype and the new state in fp32 (fp64).

    Raises:
        ValueError: shapes do not fit together.
    """
    check_mlstm(q_BHK, k_BHK, v_BHV, i_BH, f_BH, state, k_BHK.shape[0])
    dtype = compute_dtype(q_BHK, v_BHV)
    q, k, v, i, f = (x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, i_BH, f_BH))
    before = state[1].to(dtype)
    with torch.no_grad():
        m = torch.maximum(before + f, i)
    k, g = stabilised_inputs(k, i, f, before, m)
    scale = default_scale(scale, q.shape[-1])
    o, matrix = simple_gla_step(q, k, with_ones(v), g, state[0], scale=scale)
    return read_out(o, m, v.shape[-1]).to(v_BHV.dtype), (matrix, m)
