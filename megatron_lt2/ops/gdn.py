"""Gated delta rule (Gated DeltaNet; Yang, Kautz, Hatamizadeh 2024, arXiv 2412.06464) in chunk form.

Per head, with a state S of K x V numbers:

    S_t = exp(g_t) (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T        o_t = scale * S_t^T q_t

Inside a chunk the update is S_t = exp(g_t) S_{t-1} + k_t u_t^T, and the rows u solve a unit
triangular system (the WY form of DeltaNet, Yang et al. 2024, arXiv 2406.06484). All chunks are
solved at once; only the K x V states run through a loop, one step a chunk.

Choices that are easy to undo by accident:
- Decay enters as exp of differences of cumulative log decays that are never positive, masked
  *before* exp: nothing overflows, nothing is divided by a decay that may have underflowed, no
  gradient is inf * 0.
- The system is inverted by substitution. The product (I - A)(I + A^2)(I + A^4).. is exact on paper,
  but its powers reach 1e18 for repeated keys.
- Everything is computed in fp32 (fp64 for fp64 inputs) whatever the inputs are, also under
  autocast.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import chunk_layout

L2_NORM_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension (epsilon inside the root, as in FLA)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def gdn_log_decay(a_BTH: Tensor, A_log_H: Tensor, dt_bias_H: Tensor) -> Tensor:
    """Log decay g = -exp(A_log) * softplus(a + dt_bias) <= 0, in fp32 (fp64 if `a` is)."""
    dtype = torch.promote_types(a_BTH.dtype, torch.float32)
    return -A_log_H.to(dtype).exp() * F.softplus(a_BTH.to(dtype) + dt_bias_H.to(dtype))


class _UnitLowerSolve(torch.autograd.Function):
    """X = (I + strict_lower(A))^-1 R for a batch of matrices.

    What A holds on and above the diagonal is ignored.

    Autograd's own rule would run a second substitution; keeping the inverse turns the backward pass
    into two matrix products.
    """

    @staticmethod
    def forward(ctx, A_MCC: Tensor, R_MCD: Tensor) -> Tensor:
        eye = torch.eye(A_MCC.shape[-1], dtype=A_MCC.dtype, device=A_MCC.device).expand_as(A_MCC)
        inverse = torch.linalg.solve_triangular(A_MCC, eye, upper=False, unitriangular=True)
        X_MCD = inverse @ R_MCD
        ctx.save_for_backward(inverse, X_MCD)
        return X_MCD

    @staticmethod
    def backward(ctx, dX_MCD: Tensor) -> tuple[Tensor, Tensor]:
        inverse, X_MCD = ctx.saved_tensors
        dR_MCD = inverse.transpose(1, 2) @ dX_MCD
        return (dR_MCD @ X_MCD.transpose(1, 2)).tril_(-1).neg_(), dR_MCD


def check_shapes(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Refuse inputs of the gated delta rule whose shapes do not belong together.

    Raises:
        ValueError: naming the shapes.
    """
    if q.shape != k.shape or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            "q, k and v need the same batch, length and heads, and q and k the same channels, but"
            f" their shapes are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )
    if g.shape != k.shape[:-1] or beta.shape != k.shape[:-1]:
        raise ValueError(
            f"g and beta need one number a token and head, {tuple(k.shape[:-1])}, but their shapes"
            f" are {tuple(g.shape)} and {tuple(beta.shape)}."
        )


def _without_autocast(device_type: str) -> AbstractContextManager:
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def _check_state(state: Tensor | None, shape: tuple[int, ...]) -> None:
    if state is not None and tuple(state.shape) != shape:
        raise ValueError(f"The recurrent state must have shape {shape}, not {tuple(state.shape)}.")


def chunk_gated_delta_rule(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    g_BTH: Tensor,
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
        g_BTH: log decay, at most 0.
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
    with _without_autocast(q_BTHK.device.type):
        return _chunk_form(
            q_BTHK,
            k_BTHK,
            v_BTHV,
            g_BTH,
            beta_BTH,
            scale,
            initial_state,
            cu_seqlens,
            chunk_size,
            qk_l2norm,
        )


def _chunk_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor]:
    (batch, length, heads, key_dim), value_dim = q.shape, v.shape[-1]
    out_dtype = v.dtype
    dtype = torch.promote_types(torch.promote_types(q.dtype, v.dtype), torch.float32)
    q, k, v, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * (key_dim**-0.5 if scale is None else scale)

    layout = chunk_layout(batch, length, chunk_size, cu_seqlens, q.device)
    documents = batch if layout.order is None else len(layout.order)
    state_shape = (documents, heads, key_dim, value_dim)
    _check_state(initial_state, state_shape)
    if initial_state is None:
        state = q.new_zeros(documents * heads, key_dim, value_dim)
    else:
        state = layout.sort_documents(initial_state.to(dtype)).flatten(0, 1)

    # From here on the first dimension is chunk-and-head (M*H). Padding has beta = g = 0, which
    # leaves the state alone.
    q, k, v = layout.to_chunks(q), layout.to_chunks(k), layout.to_chunks(v)
    g, beta = (layout.to_chunks(x.unsqueeze(-1), zero_padding=True) for x in (g, beta))
    g = g.cumsum(1)
    causal_CC = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=q.device).tril_()
    decay_CC = (g - g.transpose(1, 2)).masked_fill(~causal_CC, float("-inf")).exp()
    from_start = g.exp()
    to_end = (g[:, -1:] - g).exp()

    k_beta = k * beta
    system = (k_beta @ k.transpose(1, 2)) * decay_CC
    right_side = torch.cat([v * beta, k_beta * from_start], -1)
    u_own, w = _UnitLowerSolve.apply(system, right_side).split([value_dim, key_dim], -1)
    k_end = (k * to_end).transpose(1, 2)
    chunk_decay = from_start[:, -1:]

    # Split rather than index: the backward pass of a split is one concatenation.
    rows = [count * heads for count in layout.active]
    steps = zip(*(x.split(rows) for x in (u_own, w, k_end, chunk_decay)), strict=True)
    states, updates, finished = [], [], []
    for count, (u_own_step, w_step, k_end_step, decay_step) in zip(rows, steps, strict=True):
        if count < state.shape[0]:
            state, done = state.split([count, state.shape[0] - count])
            finished.append(done)
        states.append(state)
        u = torch.baddbmm(u_own_step, w_step, state, alpha=-1)
        updates.append(u)
        state = torch.baddbmm(state * decay_step, k_end_step, u)
    final = torch.cat([state, *reversed(finished)]).view(state_shape)
    final = layout.unsort_documents(final)
    if not states:
        return v.new_zeros(batch, length, heads, value_dim, dtype=out_dtype), final

    scores = (q @ k.transpose(1, 2)) * decay_CC
    o = torch.baddbmm((q * from_start) @ torch.cat(states), scores, torch.cat(updates))
    return layout.from_chunks(o, heads).to(out_dtype), final


def gated_delta_rule_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    g_BH: Tensor,
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
    _check_state(state_BHKV, (*k_BHK.shape, v_BHV.shape[-1]))
    dtype = torch.promote_types(torch.promote_types(q_BHK.dtype, v_BHV.dtype), torch.float32)
    q, k, v, g, beta, state = (
        x.to(dtype) for x in (q_BHK, k_BHK, v_BHV, g_BH, beta_BH, state_BHKV)
    )
    if qk_l2norm:
        q, k = l2_normalize(q), l2_normalize(k)
    # Products and sums instead of matmul: exact under autocast too, and no slower for one token.
    state = state * g.exp()[..., None, None]
    u = beta[..., None] * (v - (k[..., None] * state).sum(-2))
    state = state + k[..., None] * u[..., None, :]
    o = (q[..., None] * state).sum(-2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    return o.to(v_BHV.dtype), state
