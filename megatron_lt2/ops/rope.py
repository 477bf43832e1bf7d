"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864).

Two layouts exist for the same rotation: "half-split" pairs channel i with i + D/2 (Llama in
transformers), "interleaved" pairs 2i with 2i + 1 (the paper, Meta's Llama and Lingua). Weights
trained with one are wrong with the other. cos and sin are the same for both, so the choice is made
where they are applied.
"""

import torch
from torch import Tensor


def rope_cos_sin(positions_BT: Tensor, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i/dim).

    Args:
        positions_BT: integer positions; in packed rows they restart at every document.
        dim: channels a head, even.
        theta: base of the frequencies.

    Returns:
        cos and sin, fp32 [B, T, dim]: the frequencies i = 0 .. dim/2 - 1, then the same again.

    Raises:
        ValueError: `dim` is odd.
    """
    if dim % 2:
        raise ValueError(f"Rotary embedding needs an even number of channels a head, not {dim}.")
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=positions_BT.device) / dim
    angle = positions_BT[..., None].float() * theta**-exponent
    angle = torch.cat([angle, angle], -1)
    return angle.cos(), angle.sin()


def apply_rope(x_BTHD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate queries or keys.

    Args:
        x_BTHD: queries or keys.
        cos, sin: from `rope_cos_sin` with dim = D, [B or 1, T, D].
        interleaved: pair neighbouring channels instead of the two halves.

    Returns:
        The rotated tensor in x's dtype (computed in fp32 at least).

    Raises:
        ValueError: cos and sin were made for another head size.
    """
    dim = x_BTHD.shape[-1]
    if cos.shape[-1] != dim:
        raise ValueError(f"cos and sin are for {cos.shape[-1]} channels, but a head has {dim}.")
    x = x_BTHD.to(torch.promote_types(x_BTHD.dtype, torch.float32))
    cos, sin = (y[..., None, : dim // 2].to(x.dtype) for y in (cos, sin))
    if interleaved:
        first, second = x[..., 0::2], x[..., 1::2]
    else:
        first, second = x[..., : dim // 2], x[..., dim // 2 :]
    rotated = first * cos - second * sin, second * cos + first * sin
    y = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return y.to(x_BTHD.dtype)
