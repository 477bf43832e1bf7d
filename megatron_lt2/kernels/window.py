"""Sliding-window attention with a choice of kernel: torch's flash attention, FLA's, or plain torch.

Flash attention of 16-bit numbers serves windows from torch 2.12 on; older torch uses FLA's Triton
kernel. What neither takes (a CPU, fp32) runs as `megatron_lt2.ops.window`.

Kernels count windows differently: flash attention's left window is the tokens *before* the query,
FLA's window includes it, as ours does.
"""

import functools
import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops import window as ops
from .backend import fla_function, use_fla

FLASH_DTYPES = (torch.bfloat16, torch.float16)
MAX_CHANNELS = 256
"""Channels a head that the GPU kernels take."""


def window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    window: int,
    *,
    backend: str,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    max_length: int | None = None,
    earlier: int = 0,
) -> Tensor:
    """Causal attention to the last `window` tokens; arguments as `megatron_lt2.ops.window`, and:

    Args:
        backend: "fla" or "torch"; "fla" allows FLA's kernel where torch's has no window.
        max_length: tokens of the longest document, if known; else the row's.

    Returns:
        Output [B, T, H, V].

    Raises:
        ValueError: the inputs do not belong together, or no kernel takes them.
    """
    fla = use_fla(backend)
    ops.check_window(q_BTHK, k_BTGK, v_BTGV, window, earlier)
    on_gpu = q_BTHK.is_cuda and q_BTHK.dtype in FLASH_DTYPES
    if on_gpu and q_BTHK.shape[-1] > MAX_CHANNELS:
        raise ValueError(
            f"Window attention on a GPU takes up to {MAX_CHANNELS} channels a head,"
            f" not {q_BTHK.shape[-1]}; use more heads."
        )
    if on_gpu and flash_has_windows():
        if cu_seqlens is None:
            return varlen_rows(q_BTHK, k_BTGK, v_BTGV, scale=scale, window=window)
        q, k, v = (x.flatten(0, 1) for x in (q_BTHK, k_BTGK, v_BTGV))
        longest = min(len(q), max_length or len(q))
        bounds = cu_seqlens.to(torch.int32)
        return varlen_attention(
            q, k, v, bounds, longest, scale=scale, window=window, earlier=earlier
        ).unflatten(0, q_BTHK.shape[:2])
    if on_gpu and fla:
        # FLA's kernel takes as many queries as keys: those in front get some that are not used.
        q = F.pad(q_BTHK, (0, 0, 0, 0, earlier, 0))
        borders = None if cu_seqlens is None else key_bounds(cu_seqlens, earlier)
        o = fla_window_attention(q, k_BTGK, v_BTGV, window, scale=scale, cu_seqlens=borders)
        return o[:, earlier:]
    return ops.window_attention(
        q_BTHK, k_BTGK, v_BTGV, window, scale=scale, cu_seqlens=cu_seqlens, earlier=earlier
    )


@functools.cache
def _flash_parameters() -> frozenset[str]:
    from torch.nn.attention.varlen import varlen_attn

    return frozenset(inspect.signature(varlen_attn).parameters)


def flash_has_windows() -> bool:
    """Whether torch's variable-length attention takes a window (from 2.12 on)."""
    return "window_size" in _flash_parameters()


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bounds: Tensor,
    longest: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    earlier: int = 0,
) -> Tensor:
    """Causal flash attention over packed documents, 16-bit numbers on a GPU.

    The last query of a document sees its last key: the kernel's causal mask sits at the bottom
    right.

    torch renamed the causal switch: `is_causal` up to 2.11, a window open to the left later.

    Args:
        q, k, v: [t, heads, d]; keys and values may have fewer heads.
        bounds: document borders of the queries, int32 [documents + 1].
        longest: queries of the longest document, or more.
        scale: factor on q^T k; default d**-0.5.
        window: keys a query sees, itself included; None: all of its document so far.
        earlier: keys before the first query, of the first document; k and v are longer by them.

    Returns:
        [t, heads, d].
    """
    borders = key_bounds(bounds, earlier)
    return _flash(q, k, v, bounds, borders, longest, longest + earlier, scale, window)


def varlen_rows(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None, window: int | None = None
) -> Tensor:
    """Causal flash attention in each row of [b, s, heads, d], 16-bit numbers on a GPU.

    k and v may be longer: their first tokens come before the first query. The rows become the
    documents of one, which the kernel takes; other arguments as `varlen_attention`.
    """
    batch, queries, keys = *q.shape[:2], k.shape[1]
    rows = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o = _flash(q, k, v, rows * queries, rows * keys, queries, keys, scale, window)
    return o.unflatten(0, (batch, queries))


def key_bounds(bounds: Tensor, earlier: int) -> Tensor:
    """Borders of the keys where the first document has `earlier` more of them than queries."""
    return torch.cat([bounds[:1], bounds[1:] + earlier]) if earlier else bounds


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_bounds: Tensor,
    key_bounds: Tensor,
    longest_queries: int,
    longest_keys: int,
    scale: float | None,
    window: int | None,
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    if k.shape[1] != q.shape[1]:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    causal: dict[str, Any] = {"is_causal": True}
    if flash_has_windows():
        causal = {"window_size": (-1 if window is None else window - 1, 0)}
    else:
        assert window is None, "this torch has no window in its variable-length attention"
    if scale is not None:
        causal["scale"] = scale
    out: Any = varlen_attn(
        q, k, v, query_bounds, key_bounds, longest_queries, longest_keys, **causal
    )
    return out


def fla_window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    window: int,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """FLA's Triton kernel; arguments as `megatron_lt2.ops.window`."""
    return fla_function("fla.ops.attn", "parallel_attn")(
        q_BTHK,
        k_BTGK,
        v_BTGV,
        scale=scale,
        window_size=window,
        cu_seqlens=cu_seqlens,
    )
