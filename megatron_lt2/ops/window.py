"""Sliding-window softmax attention in plain PyTorch, in blocks: O(T * window) work and memory.

    o_t = sum_s p_ts v_s,   p_t = softmax over s of (scale * q_t^T k_s),   t - window < s <= t

The row is cut into blocks of at least `window` queries. A query then finds all its keys in its own
block and the one before, so each block attends to two blocks of keys under a mask, and no T x T
matrix is made. Documents of a packed row are told apart in that mask; blocks may span several.
Keys that lie before the first query, where there are some, are the block before the first one.

G key/value heads may serve H = n G query heads (grouped queries), n consecutive ones each.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .documents import document_bounds, document_ids

MIN_BLOCK = 64
"""Queries a block for small windows: fewer would make many tiny products."""


def check_window(q: Tensor, k: Tensor, v: Tensor, window: int, earlier: int = 0) -> None:
    """Refuse inputs of window attention that do not belong together.

    Raises:
        ValueError: in one sentence, naming the shapes.
    """
    if window < 1:
        raise ValueError(f"An attention window holds at least the token itself, not {window} keys.")
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"Window attention needs [B, T, heads, channels], not {shapes}.")
    places = (q.shape[0], q.shape[1] + earlier)
    if places != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"The shapes of window attention do not fit together: {shapes}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"{q.shape[2]} query heads cannot share {k.shape[2]} key heads evenly; choose a divisor"
            f" of {q.shape[2]}."
        )


def window_attention(
    q_BTHK: Tensor,
    k_BTGK: Tensor,
    v_BTGV: Tensor,
    window: int,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    earlier: int = 0,
) -> Tensor:
    """Causal attention to the last `window` tokens, the token itself included.

    Args:
        q_BTHK, k_BTGK, v_BTGV: queries, keys, values; G divides H.
        window: keys a query sees, in tokens, at least 1.
        scale: factor on q^T k; default K**-0.5.
        cu_seqlens: document borders of a packed row's queries (B must be 1); default: every row
            is one document.
        earlier: keys before the first query, of its document; k and v are longer by them.

    Returns:
        Output [B, T, H, V] in q's dtype.

    Raises:
        ValueError: window, shapes or borders that make no sense.
    """
    check_window(q_BTHK, k_BTGK, v_BTGV, window, earlier)
    batch, length, heads = q_BTHK.shape[:3]
    if cu_seqlens is not None:
        document_bounds(cu_seqlens, batch, length)
    if not length:
        return q_BTHK.new_zeros(*q_BTHK.shape[:3], v_BTGV.shape[-1])
    halo = min(earlier, window - 1)
    size = max(min(length, max(window, MIN_BLOCK)), halo)
    count = -(-length // size)
    two = count > 1 or halo > 0

    def blocks(x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [B, M, C, heads, D], padded at the end."""
        return F.pad(x, (0, 0, 0, 0, 0, count * size - length)).unflatten(1, (count, size))

    def keyed(x: Tensor) -> Tensor:
        """[B, T, heads, D] -> [B*M, heads, 2C, D]: each block behind its predecessor."""
        own = blocks(x[:, earlier:])
        if two:
            first = F.pad(x[:, earlier - halo : earlier], (0, 0, 0, 0, size - halo, 0))
            before = torch.cat([first[:, None], own[:, :-1]], dim=1)
            own = torch.cat([before, own], dim=2)
        return own.flatten(0, 1).transpose(1, 2)

    mask_MQS = _visible(length, size, count, window, halo, cu_seqlens, q_BTHK.device)
    mask = mask_MQS.expand(batch, *mask_MQS.shape).flatten(0, 1).unsqueeze(1)
    o = F.scaled_dot_product_attention(
        blocks(q_BTHK).flatten(0, 1).transpose(1, 2),
        keyed(k_BTGK),
        keyed(v_BTGV),
        attn_mask=mask,
        scale=scale,
        enable_gqa=heads != k_BTGK.shape[2],
    )
    return o.transpose(1, 2).reshape(batch, count * size, heads, -1)[:, :length]


def _visible(
    length: int,
    size: int,
    count: int,
    window: int,
    halo: int,
    cu_seqlens: Tensor | None,
    device: torch.device,
) -> Tensor:
    """Which keys of its two blocks a query sees, bool [M, C, 2C] ([1, C, C] for one block)."""
    place_MC = torch.arange(count * size, device=device).view(count, size)
    # A document of its own before the row, and one behind it: padding attends to padding only, and
    # no row of the mask is empty.
    document = torch.zeros(count * size, dtype=torch.long, device=device)
    if cu_seqlens is not None:
        document[:length] = document_ids(cu_seqlens, length)
    document[length:] = -1
    document_MC = document.view(count, size)
    place_MS, document_MS = place_MC, document_MC
    if count > 1 or halo:
        place_MS = torch.cat([place_MC - size, place_MC], dim=1)
        first = document.new_full((1, size), -2)
        first[:, size - halo :] = document[0]
        document_MS = torch.cat([torch.cat([first, document_MC[:-1]]), document_MC], dim=1)
    distance = place_MC[:, :, None] - place_MS[:, None, :]
    same = document_MC[:, :, None] == document_MS[:, None, :]
    return (distance >= 0) & (distance < window) & same
