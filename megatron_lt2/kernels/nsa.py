"""Native sparse attention with a choice of kernel: FLA's for the compressed and the selected branch
and torch's flash attention (or FLA's) for the window, or plain torch.

FLA's compressed and selected branches mean what `megatron_lt2.ops.nsa` says; its own window branch
needs the flash-attn package, so it is left out and ours is added.
"""

import torch
from torch import Tensor

from ..ops.gathered import wide
from ..ops.nsa import check_nsa
from ..ops.nsa import nsa as plain_nsa
from ..ops.reach import Reach
from .backend import fla_function, use_fla
from .window import key_bounds, window_attention

HEADS = 16
"""FLA's kernel takes this many query heads a key head, or 2, 4, 8, .. times as many."""


def kernel_problem(heads: int, kv_heads: int, block: int, count: int) -> str | None:
    """What FLA's kernel does not take of a geometry, or None.

    Args:
        heads, kv_heads: of queries and of keys, of all ranks.
        block: tokens a block.
        count: selected blocks.
    """
    share = heads // kv_heads
    if heads % kv_heads or share < HEADS or share & (share - 1):
        return (
            f"{heads} query heads over {kv_heads} key heads are {heads / kv_heads:g} a key head; "
            f"FLA's kernel needs {HEADS}, 32, 64, .."
        )
    if block < 2 * _power_of_two(count) or block & (block - 1):
        return (
            f"blocks of {block} tokens with {count} selected; FLA's kernel needs a power of two of "
            f"at least {2 * _power_of_two(count)} tokens"
        )
    return None


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def nsa(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    reach: Reach,
    *,
    block: int,
    count: int,
    window: int,
    backend: str,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_length: int | None = None,
) -> Tensor:
    """As `megatron_lt2.ops.nsa`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: document borders of a packed row's queries, as in `reach`; FLA's kernels take
            these, so padded rows and caches run as "torch".
        max_length: queries of the longest document, if known.

    Raises:
        ValueError: the inputs do not belong together, or FLA's kernel does not take them.
    """
    if not use_fla(backend):
        inputs = (q_BTHK, k_BSGK, v_BSGV, gates, reach)
        return plain_nsa(*inputs, block=block, count=count, window=window, scale=scale)
    check_nsa(q_BTHK, k_BSGK, v_BSGV, block, count, reach)
    if problem := kernel_problem(q_BTHK.shape[2], k_BSGK.shape[2], block, count):
        raise ValueError(f"Native sparse attention has {problem}; use precision.kernels=torch.")
    earlier = reach.earlier
    # FLA's backward pass takes as many queries as keys: those in front get some that are not used.
    q, g_cmp, g_slc = (_behind(x, earlier) for x in (q_BTHK, gates[0], gates[1]))
    borders = None if cu_seqlens is None else key_bounds(cu_seqlens, earlier)
    out = fla_function("fla.ops.nsa", "parallel_nsa")(
        q,
        k_BSGK,
        v_BSGV,
        g_cmp=g_cmp,
        g_slc=g_slc,
        block_counts=count,
        block_size=block,
        window_size=0,
        scale=scale,
        cu_seqlens=borders,
    )
    recent = window_attention(
        q_BTHK,
        k_BSGK,
        v_BSGV,
        window,
        backend=backend,
        scale=scale,
        cu_seqlens=cu_seqlens,
        max_length=max_length,
        earlier=earlier,
    )
    total = wide(out[:, earlier:]) + wide(gates[2]).unsqueeze(-1) * wide(recent)
    return total.to(q_BTHK.dtype)


def _behind(x: Tensor, earlier: int) -> Tensor:
    """x [B, T, ...] behind `earlier` zeros."""
    return torch.cat([x.new_zeros(x.shape[0], earlier, *x.shape[2:]), x], 1) if earlier else x
