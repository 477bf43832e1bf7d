"""The layer of native sparse attention; see nsa.py."""

from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lt2.kernels.nsa import kernel_problem, nsa
from megatron_lt2.mixers.sparse import SparseMixer
from megatron_lt2.ops.gathered import wide
from megatron_lt2.ops.sparse_layout import NSA_GATES
from megatron_lt2.parallel.sequence import SequenceShard


class NSAMixer(SparseMixer):
    """Native sparse attention in megatron-core's self_attention slot."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        settings: Any,
        kernels: str,
        **kwargs: Any,
    ) -> None:
        s = settings
        problem = kernel_problem(s.num_heads, s.num_kv_heads, s.block_size, s.selected_blocks)
        if kernels == "fla" and problem is not None:
            raise ValueError(
                f"model.nsa has {problem}; set model.nsa.num_kv_heads, block_size or "
                "selected_blocks accordingly, or precision.kernels torch"
            )
        super().__init__(config, layer_number, settings=settings, kernels=kernels, **kwargs)

    def attend(
        self,
        hidden_states: Tensor,
        parts: dict[str, Tensor],
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        packing: PackedSeqParams | None,
        shard: SequenceShard | None,
    ) -> Tensor:
        """[B, T, heads of this rank, V]."""
        q, k, v = qkv
        k, v = self.with_earlier(k, shard), self.with_earlier(v, shard)
        g_cmp, g_slc, g_win = (wide(parts[name]).sigmoid().to(q.dtype) for name in NSA_GATES)
        bounds = None if packing is None else packing.cu_seqlens_q
        return nsa(
            q,
            k,
            v,
            (g_cmp, g_slc, g_win),
            self.reach(q, k, packing),
            block=self.settings.block_size,
            count=self.settings.selected_blocks,
            window=self.settings.window,
            backend=self.kernels,
            cu_seqlens=bounds,
            max_length=None if bounds is None else int(packing.max_seqlen_q),  # type: ignore[union-attr]
        )
