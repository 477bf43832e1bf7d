"""Normalised linear attention with a choice of kernel; `megatron_lt2.ops.linear` explains the
mathematics. Unnormalised linear attention is `simple_gla` without decay.

FLA's own linear attention normalises by a separate running sum that knows neither states nor
documents; here its kernel for scalar decay computes numerator and denominator at once, as in
`megatron_lt2.kernels.mlstm`.
"""

import torch.nn.functional as F
from torch import Tensor

from ..ops import linear
from ..ops.linear import (
    NORMALIZER_EPS,
    chunk_normalized_linear_attention,
    normalize,
    normalized_linear_attention_step,
)
from ..ops.mlstm import with_ones
from .backend import fla_function, run_torch, use_fla
from .mlstm import extra_columns
from .simple_gla import simple_gla

FLA_MAPS = {"elu1": "elu_p1", "silu": "swish"}
"""Feature maps that FLA has a kernel of."""

MANY_NUMBERS = 1 << 25
"""From here on (16,384 tokens of width 2,048) one fused kernel saves time; below, torch's
operations do, which are launched sooner than a Triton kernel."""


def feature_map(x: Tensor, name: str, *, backend: str) -> Tensor:
    """Map queries or keys [..., K] as `megatron_lt2.ops.linear.feature_map` does.

    Args:
        x: queries or keys.
        name: of the map.
        backend: "fla" (one kernel each way where FLA has the map) or "torch".

    Raises:
        ValueError: unknown name.
    """
    if use_fla(backend) and name in FLA_MAPS and x.numel() >= MANY_NUMBERS:
        return fla_function("fla.modules.activations", FLA_MAPS[name])(x)
    return linear.feature_map(x, name)


def normalized_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    backend: str,
    scale: float = 1.0,
    eps: float = NORMALIZER_EPS,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    output_final_state: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """o_t = sum_s (q_t . k_s) v_s / (sum_s q_t . k_s + eps) over the tokens up to t.

    Arguments as `megatron_lt2.ops.linear.chunk_normalized_linear_attention`, and:

    Args:
        backend: "fla" or "torch".
        cu_seqlens: see `megatron_lt2.kernels.simple_gla.simple_gla`.
        output_final_state: also return the state after each document.

    Returns:
        Output [B, T, H, V] in v's dtype, and the final state [N, H, K, V+1] in fp32 or None.

    Raises:
        ValueError: the backend cannot take these inputs.
    """
    if not use_fla(backend):
        return run_torch(
            chunk_normalized_linear_attention,
            normalized_linear_attention_step,
            (q_BTHK, k_BTHK, v_BTHV),
            initial_state=initial_state,
            cu_seqlens=cu_seqlens,
            output_final_state=output_final_state,
            scale=scale,
            eps=eps,
        )

    value_dim = v_BTHV.shape[-1]
    extra = extra_columns(value_dim)
    if initial_state is not None:
        initial_state = F.pad(initial_state.float(), (0, extra - 1))
    o, final = simple_gla(
        q_BTHK,
        k_BTHK,
        with_ones(v_BTHV, extra),
        None,
        backend=backend,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        output_final_state=output_final_state,
    )
    o = normalize(o, value_dim, eps).to(v_BTHV.dtype)
    return o, None if final is None else final[..., : value_dim + 1]
