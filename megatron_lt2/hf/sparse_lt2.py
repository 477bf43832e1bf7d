"""Sparse attention layers of an LT2 model: `nsa` and `dsa`.

The attention is that of ops/, on plain torch. What a layer remembers is in sparse_slots_lt2.py; it
reads the selected keys only. `dsa` is always in its sparse stage here.
"""

from types import SimpleNamespace

from torch import Tensor, nn

from ..ops.dsa import select_keys
from ..ops.gathered import attend, listed_keys, wide
from ..ops.nsa import nsa
from ..ops.sparse_layout import (
    NSA_GATES,
    index_queries_and_keys,
    indexer_rows,
    output_width,
    queries_and_keys,
    sections,
)
from .configuration_lt2 import LT2Config
from .masks_lt2 import Tokens
from .sparse_slots_lt2 import BlockSlot, SparseSlot


class LT2Indexer(nn.Module):
    """The projections of the lightning indexer."""

    def __init__(self, settings: SimpleNamespace, width: int) -> None:
        super().__init__()
        rows = indexer_rows(settings)
        self.q_proj = nn.Linear(width, rows["q"], bias=False)
        self.k_proj = nn.Linear(width, rows["k"], bias=False)
        self.w_proj = nn.Linear(width, rows["w"], bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, T, d] -> queries, keys and weights [B, T, rows]."""
        return self.q_proj(x), self.k_proj(x), self.w_proj(x)


class LT2SparseAttention(nn.Module):
    """Native or DeepSeek sparse attention, with the settings of config.mixer_settings.

    Args:
        config: of the model.
        mixer: "nsa" or "dsa".
    """

    def __init__(self, config: LT2Config, mixer: str) -> None:
        super().__init__()
        self.mixer = mixer
        self.settings = SimpleNamespace(**config.mixer_settings[mixer])
        self.rope = (config.rope_theta, config.rope_interleaved)
        self.parts = tuple(sections(mixer, self.settings))
        for name, rows in sections(mixer, self.settings).items():
            self.add_module(f"{name}_proj", nn.Linear(config.hidden_size, rows, bias=False))
        self.indexer = LT2Indexer(self.settings, config.hidden_size) if mixer == "dsa" else None
        width = output_width(mixer, self.settings)
        self.o_proj = nn.Linear(width, config.hidden_size, bias=False)

    def forward(
        self, x_BTd: Tensor, tokens: Tokens, slot: SparseSlot | None, loop: int = 0
    ) -> Tensor:
        """[B, T, d] -> [B, T, d]; `slot` takes in the new keys and values."""
        s, reach = self.settings, tokens.reach
        assert reach is not None
        parts = {name: getattr(self, f"{name}_proj")(x_BTd) for name in self.parts}
        q, k, v = queries_and_keys(self.mixer, s, parts, tokens.positions, self.rope)
        if self.indexer is None:
            means = None
            if slot is not None:
                assert isinstance(slot, BlockSlot)
                k, v, *both = slot.update_blocks(k, v, reach, s.block_size)
                means = (both[0], both[1])
            g_cmp, g_slc, g_win = (wide(parts[name]).sigmoid().to(q.dtype) for name in NSA_GATES)
            sizes = {"block": s.block_size, "count": s.selected_blocks, "window": s.window}
            out = nsa(q, k, v, (g_cmp, g_slc, g_win), reach, **sizes, means=means)
        else:
            index_q, index_k, index_w = self.indexer(x_BTd)
            index_q, index_k = index_queries_and_keys(
                s, index_q, index_k, tokens.positions, self.rope
            )
            if slot is not None and s.kv == "shared":  # the value is a part of the key
                k, index_k = slot.update(k, index_k)
                v = k[..., : s.latent_dim]
            elif slot is not None:
                k, v, index_k = slot.update(k, v, index_k)
            chosen = select_keys(index_q, index_w, index_k, reach, s.top_k)
            out = attend(q, k, v, listed_keys(chosen))
        return self.o_proj(out.flatten(2))
