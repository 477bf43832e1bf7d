"""The layer of DeepSeek sparse attention; see dsa.py.

It has two stages. In the dense one attention sees all keys and the indexer learns from its whole
distribution; in the sparse one both see the keys that the indexer selects. `dense` says which;
training/indexers.py sets it from the step.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_lt2.kernels.dsa import (
    Attention,
    indexer_loss,
    kernel_problem,
    select_keys,
    sparse_attention,
)
from megatron_lt2.mixers.indexer import Indexer, IndexerReport, attach_loss
from megatron_lt2.mixers.sparse import SparseMixer
from megatron_lt2.ops.dsa import mass_held
from megatron_lt2.ops.reach import Reach
from megatron_lt2.ops.sparse_layout import index_queries_and_keys, key_channels
from megatron_lt2.parallel.collectives import all_gather
from megatron_lt2.parallel.sequence import SequenceShard

SAMPLED = 16
"""Queries of a micro-batch that are looked at where a report is wanted."""


class DSAMixer(SparseMixer):
    """DeepSeek sparse attention in megatron-core's self_attention slot.

    Attributes:
        dense: whether attention sees all keys (the first stage of training).
        sampling: whether forward passes of training also measure what the selected keys hold.
        report: what the indexer did, see `IndexerReport`.
    """

    def __init__(
        self, config: TransformerConfig, layer_number: int, *, settings: Any, **kwargs: Any
    ) -> None:
        super().__init__(config, layer_number, settings=settings, **kwargs)
        self.shared = settings.kv == "shared"
        self._check_kernels()
        self.indexer = Indexer(settings, self.config.hidden_size, self.config.params_dtype)
        self.scale = key_channels("dsa", settings) ** -0.5
        self.dense, self.sampling = False, False
        self.report = IndexerReport()

    def _check_kernels(self) -> None:
        """Refuse a geometry that the kernels of a GPU do not take.

        Raises:
            ValueError: one sentence.
        """
        s = self.settings
        if self.kernels != "fla":
            return
        heads, key = s.num_heads // self.tp_size, s.latent_dim + s.rope_dim
        if not self.shared:  # only the selection of keys has kernels
            heads = key = 1
        if problem := kernel_problem(heads, key, s.index_dim):
            raise ValueError(
                f"model.dsa has {problem}; set model.dsa.num_heads, latent_dim, rope_dim or "
                "index_dim accordingly, or precision.kernels torch"
            )

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
        # A recomputed layer runs without gradients first: its loss counts when it runs again.
        learns = self.training and torch.is_grad_enabled() and self.settings.loss_weight > 0
        with torch.set_grad_enabled(learns):
            index = self._index(hidden_states, positions, shard)
        reach = self.reach(q, k, packing)
        chosen = None
        if not self.dense or self.sampling:
            qi, wi, ki = (x.detach() for x in index)
            chosen = select_keys(qi, wi, ki, reach, self.settings.top_k, backend=self.kernels)
        seen = None if self.dense else chosen
        given = Attention(q, k, v, reach, seen, self.scale, self.shared)
        out, lse = sparse_attention(given, backend=self.kernels)
        if learns:
            loss = indexer_loss(index, given, lse, self._over_heads)
            out = attach_loss(out, loss, self.settings.loss_weight)
            self.report.loss = self.report.loss + loss.detach()
            self.report.queries += q.shape[0] * q.shape[1]
        if self.sampling and self.training and torch.is_grad_enabled():
            assert chosen is not None
            self._sample(q, k, chosen, reach)
        return out

    def _index(
        self, hidden_states: Tensor, positions: Tensor, shard: SequenceShard | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The indexer's queries [B, T, heads, channels], weights [B, T, heads] and keys
        [B, S, channels], of all tokens on every tensor-parallel rank."""
        x = hidden_states.detach()
        if self.config.sequence_parallel:
            x = all_gather(x, self.pg_collection.tp)
        q, k, w = self.indexer(x.transpose(0, 1))
        q, k = index_queries_and_keys(self.settings, q, k, positions, self.rope)
        return q, w, self.with_earlier(k, shard)

    def _over_heads(self, mass: Tensor) -> Tensor:
        return reduce_from_tensor_model_parallel_region(mass, group=self.pg_collection.tp)

    @torch.no_grad()
    def _sample(self, q: Tensor, k: Tensor, chosen: Tensor, reach: Reach) -> None:
        """Count what the selected keys of a few queries hold, and how many of them the loop before
        selected too."""
        length = q.shape[1]
        queries = torch.linspace(0, length - 1, min(SAMPLED, length)).round().long()
        held = mass_held(q, k, chosen, reach, queries, self.scale, self._over_heads)
        self.report.add_held(self.loop, held)
        keys = chosen[:, queries.to(chosen.device)]
        backwards = self.config.recompute_layers == 1
        self.report.add_selection(self.loop, keys, backwards)
