"""Padding and causality: which positions are real, and where a query may look.

Any row may be padded before or after its tokens. A hole between tokens is refused: attention could
skip it, but the short convolution of a recurrent layer would look into it.
"""

import torch
from torch import Tensor

from .cache_lt2 import LT2Cache


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
    real_BS: Tensor | None, past: int, new: int, device: torch.device
) -> Tensor | None:
    """Where each new query may look, bool [B or 1, 1, T, S]; None where causality alone says it."""
    if real_BS is None and (past == 0 or new == 1):
        return None
    keys = torch.arange(past + new, device=device)
    queries = torch.arange(past, past + new, device=device)[:, None]
    allowed = (keys <= queries)[None]
    if real_BS is not None:
        # A padded query looks at itself: a row of the softmax with nothing in it would be NaN.
        allowed = (allowed & real_BS[:, None, :]) | (keys == queries)
    return allowed[:, None]
