"""Triton kernels of attention to gathered keys that all heads share, see `dsa_attention`.

A program has one query with all its heads: a tile of queries [H, K] meets blocks of gathered keys
[BJ, K], so that a key is read once and not once a head. The first V channels of a key are its
value. Channels are cut into V and the R behind them, since tiles are as wide as a power of two.

`lse` is the logarithm to base 2 of the sum of 2^(scale log2(e) q^T k); +inf where a query has no
key, which makes all its weights zero.
"""

import math

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

KEYS = 32
"""Gathered keys of a block."""

FORWARD = {"num_warps": 4, "num_stages": 2}
BACKWARD = {"num_warps": 8, "num_stages": 2}


def launch_forward(
    q: Tensor, k: Tensor, index: Tensor, values: int, scale: float
) -> tuple[Tensor, Tensor]:
    """q [n, H, K], k [S, K], index [n, J] int32 (-1: none) -> o [n, H, V] in q's dtype,
    lse [n, H] fp32. All contiguous."""
    n, heads, _ = q.shape
    o = q.new_empty(n, heads, values)
    lse = torch.empty(n, heads, device=q.device, dtype=torch.float32)
    _gathered_forward_kernel[(n,)](
        q, k, index, o, lse, scale * math.log2(math.e), index.shape[1],
        **_sizes(q, index, values), **FORWARD,
    )  # fmt: skip
    return o, lse


def launch_backward(
    q: Tensor,
    k: Tensor,
    index: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    scale: float,
    dq: Tensor,
    pairs: Tensor,
) -> None:
    """Writes dq [n, H, K], and of every query and chosen key what the key's gradient gets from the
    query, pairs [n, J, K]; nothing where the index is -1."""
    values = o.shape[-1]
    _gathered_backward_kernel[(len(q),)](
        q, k, index, o, lse, do, dq, pairs, scale, scale * math.log2(math.e), index.shape[1],
        **_sizes(q, index, values), **BACKWARD,
    )  # fmt: skip


def launch_mass(
    q: Tensor, k: Tensor, index: Tensor, lse: Tensor, values: int, scale: float
) -> Tensor:
    """Attention's weights of the chosen keys, summed over the heads: [n, J] fp32; -1: zero."""
    mass = torch.empty(index.shape, device=q.device, dtype=torch.float32)
    _gathered_mass_kernel[(len(q),)](
        q, k, index, lse, mass, scale * math.log2(math.e), index.shape[1],
        **_sizes(q, index, values), **FORWARD,
    )  # fmt: skip
    return mass


def _sizes(q: Tensor, index: Tensor, values: int) -> dict[str, int]:
    heads, channels = q.shape[1:]
    rest = channels - values
    return {
        "H": heads,
        "V": values,
        "R": rest,
        "BH": max(16, triton.next_power_of_2(heads)),
        "BV": max(16, triton.next_power_of_2(values)),
        "BR": max(16, triton.next_power_of_2(rest)),
        "BJ": KEYS,
        "BALL": max(16, triton.next_power_of_2(index.shape[1])),
    }


if triton is not None:

    @triton.jit
    def _keys_in_use(own_ptr, J, BALL: tl.constexpr):
        """Length of the list without what is -1 at its end."""
        j = tl.arange(0, BALL)
        place = tl.load(own_ptr + j, mask=j < J, other=-1)
        return tl.max(tl.where(place >= 0, j + 1, 0), axis=0)

    @triton.jit
    def _tile(
        row_ptr, is_row, V: tl.constexpr, R: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr
    ):
        """Rows of V + R channels, in two pieces."""
        v, r = tl.arange(0, BV), tl.arange(0, BR)
        first = tl.load(
            row_ptr[:, None] + v[None, :], mask=is_row[:, None] & (v < V)[None, :], other=0.0
        )
        rest = tl.load(
            row_ptr[:, None] + V + r[None, :], mask=is_row[:, None] & (r < R)[None, :], other=0.0
        )
        return first, rest

    @triton.jit
    def _products(q_v, q_r, k_v, k_r):
        s = tl.dot(q_v, tl.trans(k_v), input_precision="ieee")
        return tl.dot(q_r, tl.trans(k_r), s, input_precision="ieee")

    @triton.jit
    def _gathered_forward_kernel(
        q_ptr, k_ptr, index_ptr, o_ptr, lse_ptr, scale2, J,
        H: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
        BH: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
        BJ: tl.constexpr, BALL: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, v, j = tl.arange(0, BH), tl.arange(0, BV), tl.arange(0, BJ)
        q_v, q_r = _tile(q_ptr + (t * H + h) * (V + R), h < H, V, R, BV, BR)
        own = index_ptr + t * J
        used = _keys_in_use(own, J, BALL)
        highest = tl.full([BH], -float("inf"), dtype=tl.float32)
        total = tl.zeros([BH], dtype=tl.float32)
        out = tl.zeros([BH, BV], dtype=tl.float32)
        for start in range(0, used, BJ):
            place = tl.load(own + start + j, mask=start + j < J, other=-1)
            seen = place >= 0
            k_v, k_r = _tile(k_ptr + place.to(tl.int64) * (V + R), seen, V, R, BV, BR)
            s = tl.where(seen[None, :], _products(q_v, q_r, k_v, k_r) * scale2, -float("inf"))
            higher = tl.maximum(highest, tl.max(s, axis=1))
            base = tl.where(higher == -float("inf"), 0.0, higher)
            fade = tl.exp2(highest - base)
            p = tl.exp2(s - base[:, None])
            total = total * fade + tl.sum(p, axis=1)
            out = tl.dot(p.to(k_v.dtype), k_v, out * fade[:, None], input_precision="ieee")
            highest = higher
        out = out / tl.where(total > 0, total, 1.0)[:, None]
        lse = tl.where(total > 0, highest + tl.log2(total), float("inf"))
        to = o_ptr + (t * H + h)[:, None] * V + v[None, :]
        is_out = (h < H)[:, None] & (v < V)[None, :]
        tl.store(to, out.to(o_ptr.dtype.element_ty), mask=is_out)
        tl.store(lse_ptr + t * H + h, lse, mask=h < H)

    @triton.jit
    def _gathered_backward_kernel(
        q_ptr, k_ptr, index_ptr, o_ptr, lse_ptr, do_ptr, dq_ptr, pairs_ptr, scale, scale2, J,
        H: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
        BH: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
        BJ: tl.constexpr, BALL: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, v, r, j = tl.arange(0, BH), tl.arange(0, BV), tl.arange(0, BR), tl.arange(0, BJ)
        q_v, q_r = _tile(q_ptr + (t * H + h) * (V + R), h < H, V, R, BV, BR)
        is_out = (h < H)[:, None] & (v < V)[None, :]
        from_out = (t * H + h)[:, None] * V + v[None, :]
        do = tl.load(do_ptr + from_out, mask=is_out, other=0.0)
        o = tl.load(o_ptr + from_out, mask=is_out, other=0.0)
        delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), axis=1)
        lse = tl.load(lse_ptr + t * H + h, mask=h < H, other=float("inf"))
        own = index_ptr + t * J
        used = _keys_in_use(own, J, BALL)
        dq_v = tl.zeros([BH, BV], dtype=tl.float32)
        dq_r = tl.zeros([BH, BR], dtype=tl.float32)
        for start in range(0, used, BJ):
            place = tl.load(own + start + j, mask=start + j < J, other=-1)
            seen = place >= 0
            k_v, k_r = _tile(k_ptr + place.to(tl.int64) * (V + R), seen, V, R, BV, BR)
            s = _products(q_v, q_r, k_v, k_r) * scale2
            p = tl.where(seen[None, :], tl.exp2(s - lse[:, None]), 0.0)
            dp = tl.dot(do, tl.trans(k_v), input_precision="ieee")
            ds = (p * (dp - delta[:, None]) * scale).to(k_v.dtype)
            dq_v = tl.dot(ds, k_v, dq_v, input_precision="ieee")
            dq_r = tl.dot(ds, k_r, dq_r, input_precision="ieee")
            dk_v = tl.dot(tl.trans(ds), q_v, input_precision="ieee")
            dk_v = tl.dot(tl.trans(p.to(k_v.dtype)), do, dk_v, input_precision="ieee")
            dk_r = tl.dot(tl.trans(ds), q_r, input_precision="ieee")
            to = pairs_ptr + (t * J + start + j)[:, None] * (V + R)
            kind = pairs_ptr.dtype.element_ty
            tl.store(to + v[None, :], dk_v.to(kind), mask=seen[:, None] & (v < V)[None, :])
            tl.store(to + V + r[None, :], dk_r.to(kind), mask=seen[:, None] & (r < R)[None, :])
        to = dq_ptr + (t * H + h)[:, None] * (V + R)
        kind = dq_ptr.dtype.element_ty
        tl.store(to + v[None, :], dq_v.to(kind), mask=is_out)
        tl.store(to + V + r[None, :], dq_r.to(kind), mask=(h < H)[:, None] & (r < R)[None, :])

    @triton.jit
    def _gathered_mass_kernel(
        q_ptr, k_ptr, index_ptr, lse_ptr, mass_ptr, scale2, J,
        H: tl.constexpr, V: tl.constexpr, R: tl.constexpr,
        BH: tl.constexpr, BV: tl.constexpr, BR: tl.constexpr,
        BJ: tl.constexpr, BALL: tl.constexpr,
    ):  # fmt: skip
        t = tl.program_id(0).to(tl.int64)
        h, j = tl.arange(0, BH), tl.arange(0, BJ)
        q_v, q_r = _tile(q_ptr + (t * H + h) * (V + R), h < H, V, R, BV, BR)
        lse = tl.load(lse_ptr + t * H + h, mask=h < H, other=float("inf"))
        own = index_ptr + t * J
        used = _keys_in_use(own, J, BALL)
        for start in range(0, used, BJ):
            place = tl.load(own + start + j, mask=start + j < J, other=-1)
            seen = place >= 0
            k_v, k_r = _tile(k_ptr + place.to(tl.int64) * (V + R), seen, V, R, BV, BR)
            s = _products(q_v, q_r, k_v, k_r) * scale2
            p = tl.where(seen[None, :], tl.exp2(s - lse[:, None]), 0.0)
            tl.store(mass_ptr + t * J + start + j, tl.sum(p, axis=0), mask=start + j < J)
        for start in range((used + BJ - 1) // BJ * BJ, J, BJ):
            tl.store(mass_ptr + t * J + start + j, tl.zeros([BJ], tl.float32), mask=start + j < J)
