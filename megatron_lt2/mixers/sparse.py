"""What `nsa` and `dsa` have in common as layers for megatron-core: projections, positions, keys of
other context-parallel ranks, checkpoint keys.

Heads are spread over the tensor-parallel ranks, and so are the rows of what all heads share, which
is gathered. Under context parallelism a rank is sent the keys of its documents that lie before its
tokens (parallel/attention_exchange.py).

Shapes: [s, b, d] outside as everywhere in megatron-core; [B, T, heads, channels] inside.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor

from megatron_lt2.mixers.attention import loop_number
from megatron_lt2.mixers.linear_shards import positions_of, shard_of
from megatron_lt2.mixers.parameters import Shards, declare
from megatron_lt2.mixers.section_keys import split_sections
from megatron_lt2.ops.documents import document_positions
from megatron_lt2.ops.reach import Reach, reach_of_documents
from megatron_lt2.ops.sparse_layout import Rope, output_width, queries_and_keys, sections
from megatron_lt2.parallel.attention_exchange import with_earlier_keys
from megatron_lt2.parallel.linear import ColumnLinear, RowLinear
from megatron_lt2.parallel.sectioned_linear import sectioned_linear
from megatron_lt2.parallel.sequence import SequenceShard


class SparseMixer(MegatronModule):
    """A sparse attention mixer in megatron-core's self_attention slot.

    Args:
        mixer: "nsa" or "dsa".
        settings: its resolved settings.
        rope: base of the rotary frequencies, and whether neighbouring channels are paired.
        kernels: "fla" or "torch".
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        mixer: str,
        settings: Any,
        rope: Rope,
        kernels: str,
        pg_collection: ProcessGroupCollection | None = None,
        cp_comm_type: str | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(
            required_pgs=["tp", "cp"]
        )
        self.mixer, self.settings, self.rope, self.kernels = mixer, settings, rope, kernels
        self.pg_collection, self.layer_number = groups, layer_number
        self.tp_size = groups.tp.size()
        self.rows = sections(mixer, settings)
        self.loop = 0
        self._check_splits()
        self.in_proj = ColumnLinear(
            config.hidden_size,
            sum(self.rows.values()),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=groups.tp,
        )
        declare(self.in_proj.weight, shards=Shards(tuple(self.rows.values())))
        self.out_proj = RowLinear(
            output_width(mixer, settings),
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=groups.tp,
        )

    def _check_splits(self) -> None:
        """Refuse heads that the tensor-parallel ranks cannot share.

        Raises:
            ValueError: one sentence.
        """
        s = self.settings
        counts = {"num_heads": s.num_heads}
        counts |= {"latent_dim + rope_dim": self.rows["kv"]} if "kv" in self.rows else {}
        counts |= {} if "kv" in self.rows else {"num_kv_heads": s.num_kv_heads}
        for setting, count in counts.items():
            if count % self.tp_size:
                raise ValueError(
                    f"model.{self.mixer}.{setting} {count} cannot be split over {self.tp_size} "
                    f"tensor-parallel ranks; choose a divisor of {count}"
                )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        inference_context: Any = None,
        packed_seq_params: PackedSeqParams | None = None,
        **positions: Any,
    ) -> tuple[Tensor, None]:
        """[s, b, d] (a shard of s under sequence parallelism) -> ([s, b, d], no bias).

        attention_mask: the number of the loop, see model/looped_block.py. Rotary arguments are
        accepted and unused: the rotary channels here are fewer than a head's.
        """
        if inference_context is not None:
            raise ValueError(
                f"{self.mixer} keeps no megatron-core inference cache; export the model and "
                "generate there"
            )
        shard = shard_of(packed_seq_params, self.pg_collection.cp.size())
        widths = [rows // self.tp_size for rows in self.rows.values()]
        group, gather = self.pg_collection.tp, self.config.sequence_parallel
        pieces = sectioned_linear(hidden_states, self.in_proj.weight, widths, group, gather)
        parts = dict(zip(self.rows, pieces, strict=True))
        if "kv" in parts and self.tp_size > 1:
            parts["kv"] = all_gather_last_dim_from_tensor_parallel_region(parts["kv"], group=group)
        bounds = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        at = self._positions(parts["q"], bounds, shard)
        qkv = queries_and_keys(self.mixer, self.settings, parts, at, self.rope)
        self.loop = loop_number(attention_mask)
        mixed = self.attend(hidden_states, parts, qkv, at, packed_seq_params, shard)
        out, _ = self.out_proj(mixed.flatten(2).transpose(0, 1).contiguous())
        return out, None

    def attend(
        self,
        hidden_states: Tensor,
        parts: dict[str, Tensor],
        qkv: tuple[Tensor, Tensor, Tensor],
        positions: Tensor,
        packing: PackedSeqParams | None,
        shard: SequenceShard | None,
    ) -> Tensor:
        """The attention itself, [B, T, heads of this rank, V]."""
        raise NotImplementedError

    def with_earlier(self, x: Tensor, shard: SequenceShard | None) -> Tensor:
        """Keys or values [B, T, ...] behind those of earlier context-parallel ranks."""
        if shard is None:
            return x
        seen = with_earlier_keys(x.transpose(0, 1).contiguous(), shard, self.pg_collection.cp)
        return seen.transpose(0, 1)

    @staticmethod
    def _positions(x: Tensor, bounds: Tensor | None, shard: SequenceShard | None) -> Tensor:
        """Position of each token of [B, T, ...] in its document, [1, T]."""
        if shard is not None:
            return positions_of(shard, x.device)
        if bounds is not None:
            return document_positions(bounds.to(x.device), x.shape[1])[None]
        return torch.arange(x.shape[1], device=x.device)[None]

    @staticmethod
    def reach(q: Tensor, k: Tensor, packing: PackedSeqParams | None) -> Reach:
        """Which of the keys [B, S, ...] the queries [B, T, ...] see."""
        bounds = None if packing is None else packing.cu_seqlens_q
        earlier = k.shape[1] - q.shape[1]
        return reach_of_documents(q.shape[1], bounds, earlier, q.device, q.shape[0])

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Checkpoint entries that do not depend on the tensor-parallel size: the fused projection
        is saved as one global tensor a section."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tp_group = tp_group or self.pg_collection.tp
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            module, full = getattr(self, name), f"{prefix}{name}."
            state |= sharded_state_dict_default(
                module, full, sharded_offsets, metadata, tp_group=tp_group
            )
        own = {
            name: parameter
            for name, parameter in self.named_parameters()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        state |= make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {},
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        full = f"{prefix}in_proj.weight"
        local = [rows // self.tp_size for rows in self.rows.values()]
        state[full] = split_sections(state[full], tuple(self.rows), local)
        return state
