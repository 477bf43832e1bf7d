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
    ops.check_window(q_BTHK, k_BTGK, v_BTGV, window)
    on_gpu = q_BTHK.is_cuda and q_BTHK.dtype in FLASH_DTYPES
    if on_gpu and q_BTHK.shape[-1] > MAX_CHANNELS:
        raise ValueError(
            f"Window attention on a GPU takes up to {MAX_CHANNELS} channels a head,"
            f" not {q_BTHK.shape[-1]}; use more heads."
        )
    if on_gpu and flash_has_windows():
        return _flash(q_BTHK, k_BTGK, v_BTGV, window, scale, cu_seqlens, max_length)
    if on_gpu and fla:
        return fla_window_attention(
            q_BTHK, k_BTGK, v_BTGV, window, scale=scale, cu_seqlens=cu_seqlens
        )
    return ops.window_attention(q_BTHK, k_BTGK, v_BTGV, window, scale=scale, cu_seqlens=cu_seqlens)


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
) -> Tensor:
    """Causal flash attention over packed documents, 16-bit numbers on a GPU.

    torch renamed the causal switch: `is_causal` up to 2.11, a window open to the left later.

    Args:
        q, k, v: [t, heads, d]; keys and values may have fewer heads.
        bounds: document borders, int32 [documents + 1].
        longest: tokens of the longest document, or more.
        scale: factor on q^T k; default d**-0.5.
        window: keys a query sees, itself included; None: all of its document so far.

    Returns:
        [t, heads, d].
    """
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
    out: Any = varlen_attn(q, k, v, bounds, bounds, longest, longest, **causal)
    return out


def _flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int,
    scale: float | None,
    cu_seqlens: Tensor | None,
    max_length: int | None,
) -> Tensor:
    """torch's kernel, which takes one row: the rows of a batch become its documents."""
    batch, length = q.shape[:2]
    if cu_seqlens is None:
        bounds = torch.arange(batch + 1, dtype=torch.int32, device=q.device) * length
    else:
        bounds = cu_seqlens.to(torch.int32)
    longest = min(length, max_length or length)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o = varlen_attention(q, k, v, bounds, longest, scale=scale, window=window)
    return o.unflatten(0, (batch, length))


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
