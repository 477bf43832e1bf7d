"""What the chunk forms of all linear recurrences share.

Every recurrence here is, inside a chunk that starts with the state S_0,

    S_t = D_t S_0 + sum_{s<=t} D_{s->t} k_s u_s^T        u = values - erase S_0
    o_t = q_t^T D_t S_0 + sum_{s<=t} (q_t^T D_{s->t} k_s) u_s

with diagonal decays D, and `erase` only in the delta rules. All products inside chunks are made
for all chunks at once; only the K x V states run through a loop, one step a chunk.

Choices that are easy to undo by accident:
- Decay enters as exp of differences of cumulative log decays that are never positive, masked
  *before* exp: nothing overflows, nothing is divided by a decay that may have underflowed, no
  gradient is inf * 0.
- A decay of its own for every key channel cannot be taken out of q_t^T D_{s->t} k_s. Splitting it
  as (q_t e^{G_t}) (k_s e^{-G_s}) would overflow. As in Gated Linear Attention (Yang et al. 2024,
  arXiv 2312.06635), a chunk is cut into sub-chunks: between two of them both factors are taken
  relative to the start of the later one, where both exponents are at most 0; inside one the
  differences are written out.
- Everything is computed in fp32 (fp64 for fp64 inputs) whatever the inputs are, also under
  autocast.
"""

import math
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from .documents import ChunkLayout, chunk_layout

SUB_CHUNK = 16
L2_NORM_EPS = 1e-6


def l2_normalize(x: Tensor) -> Tensor:
    """x / sqrt(sum x^2 + 1e-6) over the last dimension (epsilon inside the root, as in FLA)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """The widest dtype of these tensors, fp32 at least."""
    dtype = torch.float32
    for x in tensors:
        dtype = torch.promote_types(dtype, x.dtype)
    return dtype


def without_autocast(device_type: str) -> AbstractContextManager:
    """A context in which autocast leaves matrix products alone."""
    if torch.amp.is_autocast_available(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def default_scale(scale: float | None, key_dim: int) -> float:
    """The factor on the output: K**-0.5 unless one is given."""
    return key_dim**-0.5 if scale is None else scale


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse queries, keys and values whose shapes do not belong together.

    Raises:
        ValueError: naming the shapes.
    """
    if q.shape != k.shape or v.shape[:-1] != k.shape[:-1]:
        raise ValueError(
            "q, k and v need the same batch, length and heads, and q and k the same channels, but"
            f" their shapes are {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}."
        )


def check_per_head(k: Tensor, **gates: Tensor | None) -> None:
    """Refuse gates (None passes) that do not have one number a token and head.

    Raises:
        ValueError: naming the gates and their shapes.
    """
    given = {name: x for name, x in gates.items() if x is not None}
    if any(x.shape != k.shape[:-1] for x in given.values()):
        raise ValueError(
            f"{' and '.join(given)} need one number a token and head, {tuple(k.shape[:-1])}, but"
            f" have shape {' and '.join(str(tuple(x.shape)) for x in given.values())}."
        )


def check_per_channel(k: Tensor, g: Tensor) -> None:
    """Refuse log decays that do not have one number a token, head and key channel.

    Raises:
        ValueError: naming the shape.
    """
    if g.shape != k.shape:
        raise ValueError(
            "g needs one number a token, head and key channel,"
            f" {tuple(k.shape)}, but has shape {tuple(g.shape)}."
        )


def check_state(state: Tensor | None, shape: tuple[int, ...]) -> None:
    """Refuse a state of another shape; None passes.

    Raises:
        ValueError: naming both shapes.
    """
    if state is not None and tuple(state.shape) != shape:
        raise ValueError(f"The recurrent state must have shape {shape}, not {tuple(state.shape)}.")


def plan(
    q_BTHK: Tensor,
    value_dim: int,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    dtype: torch.dtype,
) -> tuple[ChunkLayout, Tensor]:
    """Where tokens go in chunks, and the first states [N, H, K, V] in the layout's order.

    Raises:
        ValueError: the borders do not fit the row, or the state not the documents.
    """
    batch, length, heads, key_dim = q_BTHK.shape
    layout = chunk_layout(batch, length, chunk_size, cu_seqlens, q_BTHK.device)
    documents = batch if layout.order is None else len(layout.order)
    shape = (documents, heads, key_dim, value_dim)
    check_state(initial_state, shape)
    if initial_state is None:
        return layout, q_BTHK.new_zeros(shape, dtype=dtype)
    return layout, layout.sort_documents(initial_state.to(dtype))


def causal_mask(size: int, device: torch.device) -> Tensor:
    """True where a token (row) sees another (column), itself included [C, C]."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril_()


def decay_between_tokens(g_cum_MC1: Tensor) -> Tensor:
    """exp(G_t - G_s) for s <= t, else 0 [M, C, C]; G is a cumulative log decay of the head."""
    causal_CC = causal_mask(g_cum_MC1.shape[1], g_cum_MC1.device)
    difference_MCC = g_cum_MC1 - g_cum_MC1.transpose(1, 2)
    return difference_MCC.masked_fill(~causal_CC, float("-inf")).exp()


def decayed_scores(left: list[Tensor], k_MCK: Tensor, g_cum_MCK: Tensor) -> list[Tensor]:
    """sum_K x_t k_s exp(G_t - G_s) for s <= t, else 0 [M, C, C], for every x in `left`.

    Args:
        left: queries or keys, each [M, C, K].
        k_MCK: keys.
        g_cum_MCK: cumulative log decay G of every channel since the chunk's start, never rising.
    """
    chunks, size, key_dim = k_MCK.shape
    small = math.gcd(size, SUB_CHUNK)
    count = size // small

    def cut(x: Tensor) -> Tensor:
        return x.view(chunks, count, small, key_dim)

    k_cut, g_cut = cut(k_MCK), cut(g_cum_MCK)
    # Inside a sub-chunk: every difference of its own.
    inside = causal_mask(small, k_MCK.device)[..., None]
    difference = g_cut.unsqueeze(3) - g_cut.unsqueeze(2)
    weighted = difference.masked_fill(~inside, float("-inf")).exp() * k_cut.unsqueeze(2)
    stacked = torch.stack([cut(x) for x in left], 3)
    own = stacked @ weighted.transpose(3, 4)  # [M, count, small, len(left), small]
    if count == 1:
        return [x.reshape(chunks, size, size) for x in own.unbind(3)]

    # Towards earlier sub-chunks: relative to the decay at the start of the query's.
    start = torch.cat([torch.zeros_like(g_cut[:, :1, -1]), g_cut[:, :-1, -1]], 1)
    from_start = (g_cut - start.unsqueeze(2)).exp()
    key_number = torch.arange(size, device=k_MCK.device)
    first_of_query = torch.arange(count, device=k_MCK.device) * small
    later = (key_number >= first_of_query[:, None])[..., None]
    to_start = (start.unsqueeze(2) - g_cum_MCK.unsqueeze(1)).masked_fill(later, float("-inf")).exp()
    k_to_start = (k_MCK.unsqueeze(1) * to_start).transpose(2, 3)
    scores = []
    for x, own_x in zip(left, own.unbind(3), strict=True):
        earlier = ((cut(x) * from_start) @ k_to_start).view(chunks, count, small, count, small)
        whole = earlier.diagonal_scatter(own_x.permute(0, 2, 3, 1), dim1=1, dim2=3)
        scores.append(whole.reshape(chunks, size, size))
    return scores


def run_chunks(
    layout: ChunkLayout,
    state_NHKV: Tensor,
    *,
    q_decayed_MCK: Tensor,
    scores_MCC: Tensor,
    values_MCV: Tensor,
    k_to_end_MCK: Tensor,
    decay_M1K: Tensor,
    erase_MCK: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Carry the states through the chunks and read the outputs.

    The first dimension of the arguments is chunk-and-head (M*H), in the layout's order.

    Args:
        layout, state_NHKV: from `plan`.
        q_decayed_MCK: queries, scaled, times the decay since the chunk's start.
        scores_MCC: query-key products inside chunks with scale and decay, 0 for later keys.
        values_MCV: what the tokens write.
        k_to_end_MCK: keys times the decay to the chunk's end.
        decay_M1K: decay of a whole chunk; the last dimension may be 1.
        erase_MCK: values lose erase @ state, the state being the one at the chunk's start.

    Returns:
        Output [B, T, H, V], and the state after each document [N, H, K, V].
    """
    documents, heads, key_dim, value_dim = state_NHKV.shape
    state = state_NHKV.flatten(0, 1)
    # Split rather than index: the backward pass of a split is one concatenation.
    rows = [count * heads for count in layout.active]
    values_steps = values_MCV.split(rows)
    k_steps = k_to_end_MCK.transpose(1, 2).split(rows)
    decay_steps = decay_M1K.transpose(1, 2).split(rows)
    erase_steps = [None] * len(rows) if erase_MCK is None else erase_MCK.split(rows)
    states, updates, finished = [], [], []
    for count, values, k, decay, erase in zip(
        rows, values_steps, k_steps, decay_steps, erase_steps, strict=True
    ):
        if count < state.shape[0]:
            state, done = state.split([count, state.shape[0] - count])
            finished.append(done)
        states.append(state)
        if erase is not None:
            values = torch.baddbmm(values, erase, state, alpha=-1)
            updates.append(values)
        state = torch.baddbmm(state * decay, k, values)
    final = torch.cat([state, *reversed(finished)]).view(documents, heads, key_dim, value_dim)
    final = layout.unsort_documents(final)
    if not states:
        return values_MCV.new_zeros(layout.batch, layout.length, heads, value_dim), final
    written = torch.cat(updates) if updates else values_MCV
    o = torch.baddbmm(q_decayed_MCK @ torch.cat(states), scores_MCC, written)
    return layout.from_chunks(o, heads), final


class _UnitLowerSolve(torch.autograd.Function):
    """X = (I + strict_lower(A))^-1 R for a batch of matrices.

    What A holds on and above the diagonal is ignored. Substitution, because the product
    (I - A)(I + A^2)(I + A^4).. is exact on paper, but its powers reach 1e18 for repeated keys.

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


def delta_updates(
    key_scores_MCC: Tensor, v_MCV: Tensor, k_decayed_MCK: Tensor, beta_MC1: Tensor
) -> tuple[Tensor, Tensor]:
    """The WY form of the delta rule (Yang et al. 2024, arXiv 2406.06484).

    Token t writes u_t = beta_t (v_t - what it recalls), and what it recalls contains the u_s of
    earlier tokens of its chunk: a unit triangular system.

    Args:
        key_scores_MCC: key-key products with decay inside chunks; the strictly lower part counts.
        v_MCV: values.
        k_decayed_MCK: keys times the decay since the chunk's start.
        beta_MC1: write strengths.

    Returns:
        `values_MCV` and `erase_MCK` for `run_chunks`.
    """
    right_side = torch.cat([v_MCV, k_decayed_MCK], -1) * beta_MC1
    solved = _UnitLowerSolve.apply(key_scores_MCC * beta_MC1, right_side)
    values, erase = solved.split([v_MCV.shape[-1], k_decayed_MCK.shape[-1]], -1)
    return values, erase
