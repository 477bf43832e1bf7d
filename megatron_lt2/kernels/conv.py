"""Short causal convolution with a choice of kernel.

On a GPU our own Triton kernels run (conv_triton.py): they read slices of a fused projection and
write a whole tensor a section, scale heads to length 1 on the way, and write the projection's
gradient in one piece. FLA's serves more than four taps, and comparisons.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils.weak import WeakIdKeyDictionary

from ..ops import conv
from ..ops.chunks import l2_normalize
from ..ops.conv import Activation
from ..ops.documents import document_ids
from .backend import fla_function, use_fla
from .guards import guard_conv

Places = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Part:
    """Some channels of a convolution, side by side.

    channels: how many.
    unit: of a head, each of which is scaled to length 1 after the activation; None: not scaled.
    """

    channels: int
    unit: int | None = None


def causal_conv1d(
    x_BTD: Tensor,
    weight_DW: Tensor,
    *,
    backend: str,
    bias_D: Tensor | None = None,
    activation: Activation = "silu",
    initial_state_NDW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
    kernel: Literal["own", "fla"] = "own",
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over time.

    Arguments as `megatron_lt2.ops.conv.causal_conv1d` (the state has W-1 columns with either
    backend), and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the last W-1 inputs of each document.
        kernel: with "fla": our own, or FLA's.

    Returns:
        Output [B, T, D] in x's dtype, and the final state [N, D, W-1] or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    (y,) = convolve_parts(
        x_BTD,
        weight_DW,
        [Part(x_BTD.shape[-1])],
        backend=backend,
        bias_D=bias_D,
        activation=activation,
        initial_state_NDW=initial_state_NDW,
        cu_seqlens=cu_seqlens,
        kernel=kernel,
    )
    if not output_final_state:
        return y, None
    history = weight_DW.shape[1] - 1
    return y, conv.last_inputs(x_BTD, history, initial_state_NDW, cu_seqlens)


def convolve_parts(
    x_BTD: Tensor,
    weight_DW: Tensor,
    parts: Sequence[Part],
    *,
    backend: str,
    bias_D: Tensor | None = None,
    activation: Activation = "silu",
    initial_state_NDW: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    kernel: Literal["own", "fla"] = "own",
    into: Sequence[Tensor] | None = None,
) -> list[Tensor]:
    """`causal_conv1d` with an output of its own for each part of the channels.

    Args:
        parts: of x's channels, all of them in order.
        into: write here instead of into new tensors; without gradients.

    Returns:
        One contiguous tensor [B, T, channels] a part, in x's dtype.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if use_fla(backend):
        guard_conv(x_BTD, weight_DW, bias_D, initial_state_NDW, cu_seqlens)
        if activation not in ("silu", None):
            raise ValueError(
                f"The convolution has activations 'silu' and None, not {activation!r}."
            )
        if kernel == "own" and weight_DW.shape[1] <= OWN_TAPS:
            places = None
            if cu_seqlens is not None:
                places = _places(cu_seqlens, x_BTD)
            silu, x = activation == "silu", _rows(x_BTD)
            if into is None:
                made = _Convolution.apply(
                    x, weight_DW, bias_D, initial_state_NDW, places, tuple(parts), silu, cu_seqlens
                )
                return list(made)
            _launch(x, weight_DW, bias_D, initial_state_NDW, places, parts, silu, into)
            return list(into)
    made = []
    for part, at in zip(parts, _slices(parts), strict=True):
        state = None if initial_state_NDW is None else initial_state_NDW[:, at]
        own: dict[str, Any] = {
            "bias_D": None if bias_D is None else bias_D[at],
            "activation": activation,
            "initial_state_NDW": state,
            "cu_seqlens": cu_seqlens,
        }
        if use_fla(backend):
            y = _fla(x_BTD[..., at], weight_DW[at], part.unit, **own)
        else:
            y, _ = conv.causal_conv1d(x_BTD[..., at], weight_DW[at], unit=part.unit, **own)
        made.append(y)
    if into is None:
        return made
    for y, to in zip(made, into, strict=True):
        to.copy_(y)
    return list(into)


OWN_TAPS = 4
"""Our own kernels hold so many taps, as conv_triton.py says."""


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor | None,
        places: Places | None,
        parts: tuple[Part, ...],
        silu: bool,
        cu_seqlens: Tensor | None,
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(x, weight, bias, state, cu_seqlens)
        ctx.places, ctx.parts, ctx.silu = places, parts, silu
        made = [x.new_empty(*x.shape[:2], part.channels) for part in parts]
        _launch(x, weight, bias, state, places, parts, silu, made)
        return tuple(made)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from .conv_triton import count_sums, launch_backward

        x, weight, bias, state, cu_seqlens = ctx.saved_tensors
        channels, taps = weight.shape
        weight = weight.contiguous()
        dx = x.new_empty(x.shape)
        rows, d_weight, d_bias = taps + (bias is not None), [], []
        for part, at, dy in zip(ctx.parts, _slices(ctx.parts), gradients, strict=True):
            own = x[..., at]
            sums = torch.empty(
                count_sums(own, part.unit),
                rows,
                part.channels,
                device=x.device,
                dtype=torch.float32,
            )
            launch_backward(
                own,
                weight[at],
                None if bias is None else bias[at],
                None if state is None else state[:, at],
                ctx.places,
                ctx.silu,
                part.unit,
                dy.contiguous(),
                dx[..., at],
                sums,
            )
            total = sums.sum(0)
            d_weight.append(total[:taps].t())
            d_bias.append(total[taps:].flatten())
        d_state = None
        if ctx.needs_input_grad[3]:
            d_state = _state_gradient(x, weight, bias, state, ctx, cu_seqlens, gradients)
        d_taps = torch.cat(d_weight).to(weight.dtype)
        return (
            dx,
            d_taps,
            None if bias is None else torch.cat(d_bias).to(bias.dtype),
            d_state,
            *(None,) * 4,
        )


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor | None,
    places: Places | None,
    parts: Sequence[Part],
    silu: bool,
    into: Sequence[Tensor],
) -> None:
    from .conv_triton import launch_forward

    weight = weight.contiguous()
    for part, at, y in zip(parts, _slices(parts), into, strict=True):
        launch_forward(
            x[..., at],
            weight[at],
            None if bias is None else bias[at],
            None if state is None else state[:, at],
            places,
            silu,
            part.unit,
            y,
        )


def _state_gradient(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    ctx: Any,
    cu_seqlens: Tensor | None,
    gradients: Sequence[Tensor],
) -> Tensor:
    """Gradient of the initial state [N, D, W-1]: the plain form on each document's first tokens,
    which alone look back at it."""
    history = state.shape[-1]
    if cu_seqlens is None:
        heads, dys = x[:, :history], [dy[:, :history] for dy in gradients]
    else:
        borders = cu_seqlens.long()
        first = borders[:-1, None] + torch.arange(history, device=x.device)
        real = (first < borders[1:, None])[..., None]
        first = first.clamp(max=x.shape[1] - 1)
        heads = x[0, first]
        # Tokens of the next document count for nothing.
        dys = [dy[0, first].where(real, 0.0) for dy in gradients]
    with torch.enable_grad():
        leaf = state.detach().requires_grad_()
        made = convolve_parts(
            heads,
            weight.detach(),
            ctx.parts,
            backend="torch",
            bias_D=None if bias is None else bias.detach(),
            activation="silu" if ctx.silu else None,
            initial_state_NDW=leaf,
        )
        (gradient,) = torch.autograd.grad(made, leaf, dys)
    return gradient


def _fla(
    x: Tensor, weight: Tensor, unit: int | None, *, initial_state_NDW: Tensor | None, **own: Any
) -> Tensor:
    if initial_state_NDW is not None:
        # FLA's state has W columns, of which it never reads the oldest.
        initial_state_NDW = F.pad(initial_state_NDW.to(x.dtype), (1, 0))
    y, _ = fla_function("fla.modules.convolution", "causal_conv1d")(
        x,
        weight,
        bias=own["bias_D"],
        initial_state=initial_state_NDW,
        output_final_state=False,
        activation=own["activation"],
        cu_seqlens=own["cu_seqlens"],
    )
    if unit is None:
        return y
    heads = y.unflatten(-1, (-1, unit)).float()
    return l2_normalize(heads).flatten(-2).to(x.dtype)


def _slices(parts: Sequence[Part]) -> list[slice]:
    """Where the parts lie among the channels."""
    ends = accumulate(part.channels for part in parts)
    return [slice(end - part.channels, end) for part, end in zip(parts, ends, strict=True)]


def _rows(x: Tensor) -> Tensor:
    """x [B, T, D] with neighbouring channels side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


# Every layer and loop of a step asks for the same borders.
_known: Any = WeakIdKeyDictionary()


def _places(cu_seqlens: Tensor, x_BTD: Tensor) -> Places:
    """Of each token of a packed row, int32 [T]: how many before it belong to its document, and the
    document's number."""
    length, device = x_BTD.shape[1], x_BTD.device
    version = (-1 if cu_seqlens.is_inference() else cu_seqlens._version, length, device)
    found = _known.get(cu_seqlens)
    if found is None or found[0] != version:
        borders = cu_seqlens.to(device=device, dtype=torch.long)
        document = document_ids(borders, length)
        since = torch.arange(length, device=device) - borders[document]
        found = version, (since.int(), document.int())
        _known[cu_seqlens] = found
    places: Places = found[1]
    return places
