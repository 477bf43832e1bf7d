"""Feature maps, and linear attention normalised by its own weights.

    o_t = sum_{s<=t} (q_t . k_s) v_s / (sum_{s<=t} q_t . k_s + eps)

(Katharopoulos et al. 2020, arXiv 2006.16236), for queries and keys that went through a feature map
with positive values. The denominator is the numerator of a value that is always 1, hence one more
value column in `megatron_lt2.ops.simple_gla` without decay.
"""

import torch.nn.functional as F
from torch import Tensor

from .chunks import check_qkv, check_state, compute_dtype
from .mlstm import with_ones
from .simple_gla import chunk_simple_gla, simple_gla_step

FEATURE_MAPS = ("elu1", "relu", "silu", "identity", "softmax")
NORMALIZER_EPS = 1e-6


def feature_map(x: Tensor, name: str) -> Tensor:
    """Map queries or keys [..., K]: computed in fp32 at least, returned in x's dtype.

    Args:
        x: queries or keys.
        name: "elu1" (elu(x) + 1), "relu", "silu", "identity" or "softmax" (over the channels).

    Raises:
        ValueError: unknown name.
    """
    if name == "identity":
        return x
    y = x.to(compute_dtype(x))
    if name == "elu1":
        y = F.elu(y) + 1
    elif name == "relu":
        y = F.relu(y)
    elif name == "silu":
        y = F.silu(y)
    elif name == "softmax":
        y = y.softmax(-1)
    else:
        raise ValueError(f"A feature map is one of {', '.join(FEATURE_MAPS)}, not {name!r}.")
    return y.to(x.dtype)


def normalize(o: Tensor, value_dim: int, eps: float) -> Tensor:
    """num / (den + eps) from the output [.., V + 1 or more] of the recurrence."""
    o = o.to(compute_dtype(o))
    return o[..., :value_dim] / (o[..., value_dim : value_dim + 1] + eps)


def chunk_normalized_linear_attention(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    v_BTHV: Tensor,
    *,
    scale: float = 1.0,
    eps: float = NORMALIZER_EPS,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Normalised linear attention over whole sequences of any length.

    Args:
        q_BTHK, k_BTHK, v_BTHV: queries and keys after the feature map, values.
        scale: factor on the queries, which matters against `eps` only.
        eps: added to the sum of weights.
        initial_state: state before the first token of each document [N, H, K, V+1], whose last
            column is the sum of keys; default zero.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.
        chunk_size: tokens a chunk; changes speed, and results only by rounding.

    Returns:
        Output [B, T, H, V] in v's dtype, and the state after each document [N, H, K, V+1] in fp32
        (fp64).

    Raises:
        ValueError: shapes or borders do not fit together.
    """
    check_qkv(q_BTHK, k_BTHK, v_BTHV)
    value_dim = v_BTHV.shape[-1]
    o, state = chunk_simple_gla(
        q_BTHK,
        k_BTHK,
        with_ones(v_BTHV.to(compute_dtype(q_BTHK, v_BTHV))),
        None,
        scale=scale,
        initial_state=initial_state,
        cu_seqlens=cu_seqlens,
        chunk_size=chunk_size,
    )
    return normalize(o, value_dim, eps).to(v_BTHV.dtype), state


def normalized_linear_attention_step(
    q_BHK: Tensor,
    k_BHK: Tensor,
    v_BHV: Tensor,
    state_BHKV: Tensor,
    *,
    scale: float = 1.0,
    eps: float = NORMALIZER_EPS,
) -> tuple[Tensor, Tensor]:
    """One token of `chunk_normalized_linear_attention`, for decoding.

    Arguments as there, without T; the state [B, H, K, V+1] is the one before this token.

    Returns:
        Output [B, H, V] in v's dtype and the new state [B, H, K, V+1] in fp32 (fp64).

    Raises:
        ValueError: shapes do not fit together.
    """
    check_qkv(q_BHK, k_BHK, v_BHV)
    value_dim = v_BHV.shape[-1]
    check_state(state_BHKV, (*k_BHK.shape, value_dim + 1))
    v = with_ones(v_BHV.to(compute_dtype(q_BHK, v_BHV)))
    o, state = simple_gla_step(q_BHK, k_BHK, v, None, state_BHKV, scale=scale)
    return normalize(o, value_dim, eps).to(v_BHV.dtype), state
