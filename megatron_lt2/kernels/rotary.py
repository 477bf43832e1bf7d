"""Rotary position embedding with a choice of kernel, in the half-split layout; see
`megatron_lt2.ops.rope`."""

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.documents import document_positions
from ..ops.rope import apply_rope, rope_cos_sin
from .backend import fla_function, use_fla
from .guards import guard_rotary

TABLE_MIN = 2048


@lru_cache(maxsize=16)
def _table(
    length: int, dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin of the first `length` positions [length, dim/2]."""
    # A tensor made in inference mode could never be used in training again.
    with torch.inference_mode(False):
        positions = torch.arange(length, device=device)[None]
        cos, sin = rope_cos_sin(positions, dim, theta)
        cos, sin = (x[0, :, : dim // 2].to(dtype).contiguous() for x in (cos, sin))
        return cos, sin


def rotary(
    q_BTHK: Tensor,
    k_BTHK: Tensor,
    *,
    theta: float,
    backend: str,
    positions_BT: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions.

    Args:
        q_BTHK, k_BTHK: queries and keys; the heads may differ in number.
        theta: base of the frequencies.
        backend: "fla" (one kernel; cos and sin are rounded to q's dtype) or "torch". Positions that
            are given take the torch way with either: FLA's kernel only knows offsets.
        positions_BT: integer positions; default: counted from the start of each document.
        cu_seqlens: document borders of a packed row (B must be 1); default: every row is one
            document.

    Returns:
        Rotated q and k in their dtypes.

    Raises:
        ValueError: an odd number of channels, or the backend cannot take these inputs.
    """
    batch, length, _, dim = q_BTHK.shape
    if use_fla(backend) and positions_BT is None:
        guard_rotary(q_BTHK, k_BTHK, cu_seqlens)
        # Rounded up, because FLA compiles its kernel anew for every length of the table.
        size = max(TABLE_MIN, 1 << (length - 1).bit_length())
        cos, sin = _table(size, dim, theta, q_BTHK.dtype, q_BTHK.device)
        kernel = fla_function("fla.modules.rotary", "rotary_embedding")
        q, k = (kernel(x, cos, sin, cu_seqlens=cu_seqlens) for x in (q_BTHK, k_BTHK))
        return q, k
    if positions_BT is None:
        if cu_seqlens is None:
            positions_BT = torch.arange(length, device=q_BTHK.device)[None]
        else:
            if batch != 1:
                raise ValueError(f"cu_seqlens needs one packed row, but the batch size is {batch}.")
            positions_BT = document_positions(cu_seqlens, length)[None]
    cos, sin = rope_cos_sin(positions_BT, dim, theta)
    return apply_rope(q_BTHK, cos, sin), apply_rope(k_BTHK, cos, sin)


def rotate_by_tables(
    q_BTHK: Tensor, k_BTHK: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """`rotary` on FLA's kernel with tables given: cos and sin [T, K/2] of each token's position,
    the same in every row, in q's dtype."""
    kernel = fla_function("fla.modules.rotary", "rotary_embedding")
    q, k = (kernel(x, cos, sin) for x in (q_BTHK, k_BTHK))
    return q, k
