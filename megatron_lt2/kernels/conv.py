"""Short causal convolution with a choice of kernel."""

import torch.nn.functional as F
from torch import Tensor

from ..ops import conv
from ..ops.conv import Activation
from .backend import fla_function, use_fla
from .guards import guard_conv


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
) -> tuple[Tensor, Tensor | None]:
    """Depthwise causal convolution over time.

    Arguments as `megatron_lt2.ops.conv.causal_conv1d` (the state has W-1 columns with either
    backend), and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the last W-1 inputs of each document.

    Returns:
        Output [B, T, D] in x's dtype, and the final state [N, D, W-1] or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        y, state = conv.causal_conv1d(
            x_BTD,
            weight_DW,
            bias_D=bias_D,
            activation=activation,
            initial_state_NDW=initial_state_NDW,
            cu_seqlens=cu_seqlens,
        )
        return y, state if output_final_state else None

    guard_conv(x_BTD, weight_DW, bias_D, cu_seqlens)

    if initial_state_NDW is not None:
        # FLA's state has W columns, of which it never reads the oldest.
        initial_state_NDW = F.pad(initial_state_NDW.to(x_BTD.dtype), (1, 0))
    y, state = fla_function("fla.modules.convolution", "causal_conv1d")(
        x_BTD,
        weight_DW,
        bias=bias_D,
        initial_state=initial_state_NDW,
        output_final_state=output_final_state,
        activation=activation,
        cu_seqlens=cu_seqlens,
    )
    return y, None if state is None else state[..., 1:]
