"""Short depthwise causal convolution over time, with carried history and packed documents.

It is a sum of W shifted products instead of `conv1d`: data stays in [B, T, D] order, and the
backward pass is several times faster on a CPU. 16-bit inputs are accumulated in fp32. The state is
the last W-1 inputs, oldest first (FLA keeps W; `megatron_lt2.kernels.conv` converts).

The channels of a head may be scaled to length 1 behind the activation, as delta rules want of their
queries and keys: done here, it is rounded once instead of twice.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import l2_normalize
from .documents import document_bounds, document_ids

Activation = Literal["silu"] | None


def _activate(y: Tensor, activation: Activation) -> Tensor:
    if activation is None:
        return y
    if activation == "silu":
        return F.silu(y)
    raise ValueError(f"The convolution knows the activations 'silu' and None, not {activation!r}.")


def _check(
    x: Tensor, weight_DW: Tensor, bias_D: Tensor | None, state: Tensor | None, documents: int
) -> None:
    channels, taps = weight_DW.shape
    if bias_D is not None and tuple(bias_D.shape) != (channels,):
        raise ValueError(
            f"The convolution has {channels} channels, but its bias has shape"
            f" {tuple(bias_D.shape)}."
        )
    if x.shape[-1] != channels:
        raise ValueError(
            f"The convolution has {channels} channels, but its input has {x.shape[-1]}."
        )
    expected = (documents, channels, taps - 1)
    if state is not None and tuple(state.shape) != expected:
        raise ValueError(
            f"The convolution state must have shape {expected}, not {tuple(state.shape)}."
        )


def _shifted_sum(x_BTD: Tensor, weight_DW: Tensor, length: int) -> Tensor:
    """y[t] = sum_w weight[:, w] * x[t + w] for t < length."""
    y = x_BTD[:, :length] * weight_DW[:, 0]
    for tap in range(1, weight_DW.shape[1]):
        y = y + x_BTD[:, tap : tap + length] * weight_DW[:, tap]
    return y


def causal_conv1d(
    x_BTD: Tensor,
    weight_DW: Tensor,
    *,
    bias_D: Tensor | None = None,
    activation: Activation = "silu",
    initial_state_NDW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    unit: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve every channel with its own W taps, looking back W-1 tokens inside the same document.

    Args:
        x_BTD: input.
        weight_DW: taps; the last one multiplies the current token.
        bias_D: added before the activation.
        activation: applied to the result.
        initial_state_NDW: the W-1 inputs before each document, oldest first [N, D, W-1]; default
            zero.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.
        unit: channels of a head; y / sqrt(sum y^2 + 1e-6) over each, after the activation.

    Returns:
        Output [B, T, D] in x's dtype, and the last W-1 inputs of each document [N, D, W-1], which
        reach back into its initial state if the document is shorter than that.

    Raises:
        ValueError: shapes or borders do not fit together, or an unknown activation.
    """
    batch, length, channels = x_BTD.shape
    history = weight_DW.shape[1] - 1
    documents = batch
    if cu_seqlens is not None:
        documents = len(document_bounds(cu_seqlens, batch, length)) - 1
    _check(x_BTD, weight_DW, bias_D, initial_state_NDW, documents)
    if initial_state_NDW is None:
        past = x_BTD.new_zeros(documents, history, channels)
    else:
        past = initial_state_NDW.to(x_BTD.dtype).transpose(1, 2)

    # Put each document's history before it; a plain convolution then never crosses a border.
    if cu_seqlens is None:
        extended = torch.cat([past, x_BTD], 1)
        y = _convolve(extended, weight_DW, length)
    else:
        borders = cu_seqlens.to(device=x_BTD.device, dtype=torch.long)
        document_T = document_ids(borders, length)
        token_row = torch.arange(length, device=x_BTD.device) + (document_T + 1) * history
        offsets = torch.arange(history, device=x_BTD.device)
        document_N1 = torch.arange(documents, device=x_BTD.device)[:, None]
        history_row = borders[:-1, None] + document_N1 * history + offsets
        source = torch.empty(length + documents * history, dtype=torch.long, device=x_BTD.device)
        source[history_row.flatten()] = torch.arange(documents * history, device=x_BTD.device)
        source[token_row] = torch.arange(length, device=x_BTD.device) + documents * history
        table = torch.cat([past.reshape(-1, channels), x_BTD[0]])
        extended = table.index_select(0, source)[None]
        y = _convolve(extended, weight_DW, extended.shape[1] - history)
        y = y.index_select(1, token_row - history)
    if bias_D is not None:
        y = y + bias_D.to(y.dtype)
    y = _activate(y, activation)
    if unit is not None:
        y = l2_normalize(y.unflatten(-1, (-1, unit))).flatten(-2)
    state = last_inputs(x_BTD, history, initial_state_NDW, cu_seqlens)
    return y.to(x_BTD.dtype), state


def last_inputs(
    x_BTD: Tensor, history: int, state_NDW: Tensor | None, cu_seqlens: Tensor | None
) -> Tensor:
    """The last inputs of each document, its state for what follows.

    Args:
        x_BTD: input.
        history: of how many tokens, W-1.
        state_NDW: the state before each document, which a document shorter than `history` reaches
            back into; default zero.
        cu_seqlens: document borders; default: every row is one document.

    Returns:
        [N, D, W-1] in x's dtype, oldest first. A copy: a view would keep the whole input alive as
        long as a cache holds the state.
    """
    length = x_BTD.shape[1]
    if cu_seqlens is None:
        starts = torch.zeros(len(x_BTD), dtype=torch.long, device=x_BTD.device)
        ends, row = starts + length, torch.arange(len(x_BTD), device=x_BTD.device)
    else:
        borders = cu_seqlens.to(device=x_BTD.device, dtype=torch.long)
        starts, ends = borders[:-1], borders[1:]
        row = torch.zeros_like(starts)
    place = ends[:, None] + torch.arange(-history, 0, device=x_BTD.device)
    inside = (place >= starts[:, None])[..., None]
    last = x_BTD[row[:, None], place.clamp(min=0)]
    if state_NDW is None:
        return last.where(inside, 0.0).transpose(1, 2).contiguous()
    # Column c of what came before is the input W-1-c tokens before the document.
    column = (place - starts[:, None] + history).clamp(max=history - 1) if history else place
    before = state_NDW.to(x_BTD.dtype).transpose(1, 2)
    before = before.gather(1, column[..., None].expand(-1, -1, x_BTD.shape[-1]))
    return last.where(inside, before).transpose(1, 2).contiguous()


def _convolve(x_BTD: Tensor, weight_DW: Tensor, length: int) -> Tensor:
    dtype = torch.promote_types(x_BTD.dtype, torch.float32)
    return _shifted_sum(x_BTD.to(dtype), weight_DW.to(dtype), length)


def conv1d_step(
    x_BD: Tensor,
    weight_DW: Tensor,
    state: Tensor,
    *,
    bias_D: Tensor | None = None,
    activation: Activation = "silu",
) -> tuple[Tensor, Tensor]:
    """One token of `causal_conv1d`, for decoding.

    Args:
        x_BD: input of this token.
        weight_DW: taps.
        state: the W-1 inputs before it [B, D, W-1]; not changed.
        bias_D: added before the activation.
        activation: applied to the result.

    Returns:
        Output [B, D] in x's dtype and the new state.

    Raises:
        ValueError: shapes do not fit together, or an unknown activation.
    """
    _check(x_BD, weight_DW, bias_D, state, x_BD.shape[0])
    window = torch.cat([state.to(x_BD.dtype), x_BD.unsqueeze(-1)], -1)
    dtype = torch.promote_types(x_BD.dtype, torch.float32)
    y = (window.to(dtype) * weight_DW.to(dtype)).sum(-1)
    if bias_D is not None:
        y = y + bias_D.to(dtype)
    return _activate(y, activation).to(x_BD.dtype), window[..., 1:]
