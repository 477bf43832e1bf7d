"""Padding and causality: which positions are real, and where a query may look.

Any row may be padded before or after its tokens. A hole between tokens is refused: attention could
skip it, but the short convolution of a linear mixer would look into it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.reach import Reach
from .cache_lt2 import LT2Cache


class Tokens(NamedTuple):
    """What the layers are told about the tokens of a call.

    A named tuple, because accelerate moves those between devices.

    positions: of each token in its row [B or 1, T].
    real: False where a token is padding [B, T]; None: no padding among them.
    rope: cosine and sine for attention layers; None without such layers.
    masks: of attention, by window, see `attention_mask_for`.
    reach: which keys sparse attention may see; None without such layers.
    """

    positions: Tensor
    real: Tensor | None = None
    rope: tuple[Tensor, Tensor] | None = None
    masks: dict[int | None, Tensor | None] | None = None
    reach: Reach | None = None


def real_positions(
    attention_mask: Tensor | None,
    cache: LT2Cache | None,
    batch: int,
    past: int,
    new: int,
    device: torch.device,
) -> Tensor | None:
    """Which positions hold real tokens, bool [B, past + new]; None if all of them do.

    Args:
        attention_mask: what the caller gave: [B, past + new], [B, new] or nothing.
        cache: remembers which past positions were padding.
        batch: rows.
        past: positions that the cache has seen.
        new: positions of this call.
        device: where the model's input is.

    Raises:
        ValueError: the mask has another shape, or padding lies between the tokens of a row.
    """
    known = cache.real if cache is not None else None
    if attention_mask is None and known is None:
        return None
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(
            f"attention_mask must be [batch, tokens], got shape {tuple(attention_mask.shape)}"
        )
    if attention_mask is None:
        real = torch.ones(batch, new, dtype=torch.bool, device=device)
    else:
        real = attention_mask.to(device=device, dtype=torch.bool)
    if real.shape[1] == new and past > 0:
        if known is None:
            known = torch.ones(batch, past, dtype=torch.bool, device=device)
        real = torch.cat([known.to(device), real], dim=1)
    if real.shape != (batch, past + new):
        raise ValueError(
            f"attention_mask has shape {tuple(real.shape)} "
            f"for {batch} rows of {past} past and {new} new tokens"
        )
    if bool(real.all()):
        return None
    after_a_token = ~real & (real.long().cumsum(-1) > 0)
    if bool((real & (after_a_token.long().cumsum(-1) > 0)).any()):
        raise ValueError(
            "attention_mask has padding between the tokens of a row; pad on the left (tokenizer "
            "padding_side='left') so that recurrent layers see a row without holes"
        )
    return real


def attention_mask_for(
    real_BS: Tensor | None,
    past: int,
    new: int,
    device: torch.device,
    window: int | None = None,
) -> Tensor | None:
    """Where each new query may look, bool [B or 1, 1, T, S]; None where causality alone says it.

    Args:
        real_BS: which positions hold real tokens, see `real_positions`.
        past: positions that the cache has seen.
        new: positions of this call.
        device: of the mask.
        window: tokens that a query sees, itself included; None: all before it. With a window, S
            counts the last window - 1 past positions only, which is what the cache keeps
            (cache_lt2.WindowSlot).
    """
    kept = past if window is None else min(past, window - 1)
    hides = window is not None and kept + new > window
    if real_BS is None and (new == 1 or (kept == 0 and not hides)):
        return None
    keys = torch.arange(past - kept, past + new, device=device)
    queries = torch.arange(past, past + new, device=device)[:, None]
    allowed = (keys <= queries)[None]
    if window is not None:
        allowed = allowed & (keys > queries - window)
    if real_BS is not None:
        # A padded query looks at itself: a row of the softmax with nothing in it would be NaN.
        allowed = (allowed & real_BS[:, None, past - kept :]) | (keys == queries)
    return allowed[:, None]
