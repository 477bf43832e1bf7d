"""What the projections of sparse attention layers mean: rows of each, and from them q, k and v.

`settings` is `config.mixers.NSAConfig` or `DSAConfig` with every None replaced, or anything with
these fields.
"""

from typing import Any

import torch
from torch import Tensor

from .rope import apply_rope, rope_cos_sin

NSA_GATES = ("gate_cmp", "gate_slc", "gate_win")
"""Gates of the compressed, selected and window branch, a number a head."""

Rope = tuple[float, bool]
"""Base of the rotary frequencies, and whether neighbouring channels are paired."""


def sections(name: str, settings: Any) -> dict[str, int]:
    """Rows of each projection of the layer's input, by name; "kv" is shared by all heads."""
    s = settings
    if name == "dsa" and s.kv == "shared":
        key = s.latent_dim + s.rope_dim
        return {"q": s.num_heads * key, "kv": key}
    rows = {"q": s.num_heads * s.head_dim}
    rows |= dict.fromkeys(("k", "v"), s.num_kv_heads * s.head_dim)
    return rows | (dict.fromkeys(NSA_GATES, s.num_heads) if name == "nsa" else {})


def output_width(name: str, settings: Any) -> int:
    """Channels of all heads' outputs."""
    shared = name == "dsa" and settings.kv == "shared"
    return settings.num_heads * (settings.latent_dim if shared else settings.head_dim)


def key_channels(name: str, settings: Any) -> int:
    """Channels of a query and key."""
    shared = name == "dsa" and settings.kv == "shared"
    return settings.latent_dim + settings.rope_dim if shared else settings.head_dim


def indexer_rows(settings: Any) -> dict[str, int]:
    """Rows of the indexer's projections."""
    heads, channels = settings.index_heads, settings.index_dim
    return {"q": heads * channels, "k": channels, "w": heads}


def queries_and_keys(
    name: str, settings: Any, parts: dict[str, Tensor], positions_BT: Tensor, rope: Rope
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [B, T, H, K], rotated keys [B, T, G, K] and values [B, T, G, V].

    Args:
        name, settings: of the mixer.
        parts: the projections, [B, T, rows]; those of some heads are enough.
        positions_BT: of the tokens in their documents.
        rope: base and pairing.
    """
    s, (theta, interleaved) = settings, rope
    if name == "dsa" and s.kv == "shared":
        q = parts["q"].unflatten(-1, (-1, s.latent_dim + s.rope_dim))
        k = parts["kv"].unsqueeze(-2)
        table = rope_cos_sin(positions_BT, s.rope_dim, theta)
        v = k[..., : s.latent_dim]
        q, k = (
            torch.cat(
                [x[..., : s.latent_dim], apply_rope(x[..., s.latent_dim :], *table, interleaved)],
                dim=-1,
            )
            for x in (q, k)
        )
        return q, k, v
    q, k, v = (parts[n].unflatten(-1, (-1, s.head_dim)) for n in ("q", "k", "v"))
    table = rope_cos_sin(positions_BT, s.head_dim, theta)
    return apply_rope(q, *table, interleaved), apply_rope(k, *table, interleaved), v


def index_queries_and_keys(
    settings: Any, q: Tensor, k: Tensor, positions_BT: Tensor, rope: Rope
) -> tuple[Tensor, Tensor]:
    """The indexer's rotated queries [B, T, heads, channels] and keys [B, T, channels].

    Args:
        settings: of the mixer.
        q, k: the indexer's projections, [B, T, rows].
        positions_BT, rope: as `queries_and_keys`.
    """
    q, k = q.unflatten(-1, (-1, settings.index_dim)), k.unsqueeze(-2)
    size, (theta, interleaved) = settings.index_rope_dim, rope
    if size:
        table = rope_cos_sin(positions_BT, size, theta)
        q, k = (
            torch.cat([apply_rope(x[..., :size], *table, interleaved), x[..., size:]], dim=-1)
            for x in (q, k)
        )
    return q, k.squeeze(-2)
