"""Triton kernels for the gates of Mamba2, see `megatron_lt2.kernels.mamba2`.

A program takes a block of tokens of the flat row. The forward pass has one a head, the backward
pass one a group, since the gradient of B sums over the group's heads.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

TOKENS = 32
"""Of a block."""


def launch_forward(
    dt: Tensor, B: Tensor, A_log: Tensor, bias: Tensor, groups: int
) -> tuple[Tensor, Tensor]:
    """dt [n, H] and B [n, G*N] (rows may be slices), A_log and bias [H] fp32 -> log decay [n, H]
    in fp32, keys [n, H, N] in B's dtype."""
    tokens, heads = dt.shape
    channels = B.shape[1] // groups
    decay = torch.empty(tokens, heads, device=dt.device, dtype=torch.float32)
    keys = B.new_empty(tokens, heads, channels)
    _forward_kernel[(triton.cdiv(tokens, TOKENS), heads)](
        dt, B, A_log, bias, decay, keys, tokens, dt.stride(0), B.stride(0),
        H=heads, N=channels, PER_GROUP=heads // groups,
        BT=TOKENS, BN=triton.next_power_of_2(channels),
    )  # fmt: skip
    return decay, keys


def launch_backward(
    dt: Tensor,
    B: Tensor,
    A_log: Tensor,
    bias: Tensor,
    groups: int,
    d_decay: Tensor,
    d_keys: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of dt, B, A_log and bias from those of what `launch_forward` gives."""
    tokens, heads = dt.shape
    channels = B.shape[1] // groups
    blocks = triton.cdiv(tokens, TOKENS)
    d_dt = dt.new_empty(tokens, heads)
    d_B = B.new_empty(tokens, groups * channels)
    sums = torch.empty(2, blocks, heads, device=dt.device, dtype=torch.float32)
    _backward_kernel[(blocks, groups)](
        dt, B, A_log, bias, d_decay, d_keys, d_dt, d_B, sums, tokens, dt.stride(0), B.stride(0),
        H=heads, N=channels, PER_GROUP=heads // groups,
        BT=TOKENS, BN=triton.next_power_of_2(channels),
    )  # fmt: skip
    d_A_log, d_bias = sums.sum(1)
    return d_dt, d_B, d_A_log, d_bias


if triton is not None:

    @triton.jit
    def _softplus(x):
        return tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))

    @triton.jit
    def _forward_kernel(
        dt_ptr, b_ptr, a_ptr, bias_ptr, decay_ptr, keys_ptr, tokens, dt_stride, b_stride,
        H: tl.constexpr, N: tl.constexpr, PER_GROUP: tl.constexpr,
        BT: tl.constexpr, BN: tl.constexpr,
    ):  # fmt: skip
        head = tl.program_id(1)
        t = (tl.program_id(0) * BT + tl.arange(0, BT)).to(tl.int64)
        n = tl.arange(0, BN)
        is_token = t < tokens
        is_pair = is_token[:, None] & (n < N)[None, :]
        raw = tl.load(dt_ptr + t * dt_stride + head, mask=is_token, other=0.0).to(tl.float32)
        step = _softplus(raw + tl.load(bias_ptr + head))
        rate = -tl.exp(tl.load(a_ptr + head))
        tl.store(decay_ptr + t * H + head, rate * step, mask=is_token)
        own = b_ptr + t[:, None] * b_stride + (head // PER_GROUP) * N + n[None, :]
        key = step[:, None] * tl.load(own, mask=is_pair, other=0.0).to(tl.float32)
        to = keys_ptr + (t[:, None] * H + head) * N + n[None, :]
        tl.store(to, key.to(keys_ptr.dtype.element_ty), mask=is_pair)

    @triton.jit
    def _backward_kernel(
        dt_ptr, b_ptr, a_ptr, bias_ptr, d_decay_ptr, d_keys_ptr, d_dt_ptr, d_b_ptr, sums_ptr,
        tokens, dt_stride, b_stride,
        H: tl.constexpr, N: tl.constexpr, PER_GROUP: tl.constexpr,
        BT: tl.constexpr, BN: tl.constexpr,
    ):  # fmt: skip
        block, group = tl.program_id(0), tl.program_id(1)
        blocks = tl.num_programs(0)
        t = (block * BT + tl.arange(0, BT)).to(tl.int64)
        n = tl.arange(0, BN)
        is_token = t < tokens
        is_pair = is_token[:, None] & (n < N)[None, :]
        own = b_ptr + t[:, None] * b_stride + group * N + n[None, :]
        b = tl.load(own, mask=is_pair, other=0.0).to(tl.float32)
        d_b = tl.zeros([BT, BN], dtype=tl.float32)
        for h in range(PER_GROUP):
            head = group * PER_GROUP + h
            raw = tl.load(dt_ptr + t * dt_stride + head, mask=is_token, other=0.0).to(tl.float32)
            raw += tl.load(bias_ptr + head)
            step = _softplus(raw)
            rate = -tl.exp(tl.load(a_ptr + head))
            d_decay = tl.load(d_decay_ptr + t * H + head, mask=is_token, other=0.0)
            from_keys = d_keys_ptr + (t[:, None] * H + head) * N + n[None, :]
            d_key = tl.load(from_keys, mask=is_pair, other=0.0).to(tl.float32)
            d_b += step[:, None] * d_key
            d_raw = (d_decay * rate + tl.sum(d_key * b, axis=1)) * tl.sigmoid(raw)
            tl.store(d_dt_ptr + t * H + head, d_raw.to(d_dt_ptr.dtype.element_ty), mask=is_token)
            tl.store(sums_ptr + block * H + head, tl.sum(d_decay * rate * step, axis=0))
            d_raw = tl.where(is_token, d_raw, 0.0)
            tl.store(sums_ptr + (blocks + block) * H + head, tl.sum(d_raw, axis=0))
        to = d_b_ptr + t[:, None] * (tl.num_programs(1) * N) + group * N + n[None, :]
        tl.store(to, d_b.to(d_b_ptr.dtype.element_ty), mask=is_pair)
