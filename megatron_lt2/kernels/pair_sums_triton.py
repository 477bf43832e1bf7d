"""Sums over (query, key) pairs by key, in a fixed order: the gradient of gathered keys.

Many queries choose the same key. Adding their shares atomically would add them in another order in
each run; here the pairs are sorted by key once and a program adds the rows of one key.
"""

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # this file travels with exports, which also run without Triton
    triton = None

PAIRS = 32
"""Pairs of a block."""

CHANNELS = 64
"""Of a program."""


def add_by_key(pairs: Tensor, index: Tensor, total: Tensor) -> None:
    """total[index[n, j]] += pairs[n, j], in the order of n and j; nothing where the index is -1.

    Args:
        pairs: [n, J, channels], contiguous.
        index: int32 [n, J], contiguous.
        total: fp32 [S, channels], contiguous.
    """
    keys, channels = total.shape
    if not index.numel() or not keys:
        return
    place, order = index.reshape(-1).sort(stable=True)
    numbers = torch.arange(keys + 1, device=index.device, dtype=index.dtype)
    bounds = torch.searchsorted(place, numbers)
    width = min(CHANNELS, triton.next_power_of_2(channels))
    _pair_sums_kernel[(keys, triton.cdiv(channels, width))](
        pairs, order, bounds, total, channels, BP=PAIRS, BC=width, num_warps=2
    )


if triton is not None:

    @triton.jit
    def _pair_sums_kernel(
        pairs_ptr, order_ptr, bounds_ptr, total_ptr, channels, BP: tl.constexpr, BC: tl.constexpr
    ):
        key = tl.program_id(0).to(tl.int64)
        p = tl.arange(0, BP)
        c = tl.program_id(1) * BC + tl.arange(0, BC)
        start = tl.load(bounds_ptr + key).to(tl.int32)
        stop = tl.load(bounds_ptr + key + 1).to(tl.int32)
        sums = tl.zeros([BP, BC], dtype=tl.float32)
        for at in range(start, stop, BP):
            is_pair = at + p < stop
            row = tl.load(order_ptr + at + p, mask=is_pair, other=0).to(tl.int64)
            mask = is_pair[:, None] & (c < channels)[None, :]
            x = tl.load(pairs_ptr + row[:, None] * channels + c[None, :], mask=mask, other=0.0)
            sums += x.to(tl.float32)
        own = total_ptr + key * channels + c
        before = tl.load(own, mask=c < channels, other=0.0)
        tl.store(own, before + tl.sum(sums, axis=0), mask=c < channels)
