"""Every linear mixer as a layer for megatron-core: projections, convolution, recurrence, norm.

What a mixer is stands in `megatron_lt2/recurrent`; this module makes a tensor-, sequence- and
context-parallel layer of it, with packed documents and checkpoint keys that do not depend on the
layout of the ranks. Heads are spread over the tensor-parallel ranks; what all heads share is
computed in slices and gathered (recurrent/base.py).

Shapes: [s, b, d] outside as everywhere in megatron-core; [B, T, H, channels] in the recurrence.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
from torch import Tensor, nn

from megatron_lt2.kernels.conv import Part, convolve_parts
from megatron_lt2.kernels.rematerialise import drop_and_rebuild
from megatron_lt2.mixers.linear_heads import check_heads, mix_by_heads
from megatron_lt2.mixers.linear_norm import output_norm
from megatron_lt2.mixers.linear_parts import (
    OutputNorm,
    ShortConv,
    WayUp,
    check_splits,
    group_sections,
)
from megatron_lt2.mixers.linear_shards import mix_shard, positions_of, shard_of, span_of
from megatron_lt2.mixers.parameters import Shards, declare, new_parameter
from megatron_lt2.mixers.section_keys import split_sections
from megatron_lt2.parallel.halo import exchange_halo
from megatron_lt2.parallel.linear import column_linear, row_linear
from megatron_lt2.parallel.remake import remakable
from megatron_lt2.parallel.sectioned_linear import sectioned_linear
from megatron_lt2.parallel.sequence import SequenceShard
from megatron_lt2.recurrent.base import RecurrentMixer, Scan

NARROW = 256
"""A section of fewer rows shares its matrix product with narrow neighbours."""


class LinearMixer(MegatronModule):
    """A linear mixer in megatron-core's self_attention slot.

    Args:
        recurrent: class of the mixer, from megatron_lt2/recurrent.
        settings: its resolved settings.
        kernels: "fla" or "torch".
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        recurrent: type[RecurrentMixer],
        settings: Any,
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
        self.recurrent = recurrent(settings, depth=layer_number / config.num_layers)
        self.layout = layout = self.recurrent.layout
        self.pg_collection, self.kernels = groups, kernels
        self.layer_number = layer_number
        self.tp_size = groups.tp.size()
        check_splits(layout, self.tp_size)
        self.heads = layout.heads // self.tp_size
        self.by_heads = getattr(config, "context_exchange", "state") == "heads"
        if self.by_heads:
            check_heads(self.heads, groups.cp.size())
        dtype = config.params_dtype
        rows = tuple(layout.rows(name) for name in layout.sections)
        self.in_proj = column_linear(
            config.hidden_size,
            sum(rows),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=groups.tp,
        )
        declare(self.in_proj.weight, shards=Shards(rows))
        self.products = group_sections(layout, narrow=NARROW * self.tp_size)
        self.conv1d: ShortConv | None = None
        if layout.conv_names:
            conv_rows = tuple(layout.rows(name) for name in layout.conv_names)
            self.conv1d = ShortConv(
                conv_rows, layout.conv_size, layout.conv_bias, self.tp_size, dtype
            )
        self.up = nn.ModuleDict()
        for name in layout.low_rank_names:
            section = layout.sections[name]
            assert section.rank is not None
            self.up[name] = WayUp(
                layout.width(name), section.rank, section.bias, self.tp_size, dtype
            )
        for name, weight in layout.weights.items():
            numbers = weight.channels * layout.heads
            parameter = new_parameter(numbers // self.tp_size, dtype=torch.float32)
            declare(parameter, init=weight.init, shards=Shards((numbers,)))
            self.register_parameter(name, parameter)
        self.out_norm = OutputNorm(layout, self.tp_size, dtype)
        self.out_proj = row_linear(
            layout.heads * layout.head_v_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=groups.tp,
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

        Rotary arguments are accepted and unused: a recurrence knows the order of its tokens.
        """
        if inference_context is not None:
            raise ValueError(
                "linear mixers keep no megatron-core inference cache; export the model and "
                "generate there"
            )
        shard = shard_of(packed_seq_params, self.pg_collection.cp.size())
        pieces = self._projected(hidden_states)
        if shard is not None and self.by_heads:
            mixed, gate = mix_by_heads(self, self._split(pieces), shard)
        else:
            cu_seqlens = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
            mixed, gate = self._mix(pieces, cu_seqlens, shard)
        kept = (mixed, self.out_norm.weight) + (() if gate is None else (gate,))
        normed = self._normed(*kept)
        across = self.layout.norm == "layer" and self.tp_size > 1
        if getattr(self.config, "recompute_cheap", False) and not across:
            normed = remakable(normed, kept, self._normed)
        out, _ = self.out_proj(normed)
        return out, None

    def _normed(self, mixed: Tensor, weight: Tensor, gate: Tensor | None = None) -> Tensor:
        """Norm and gate of the recurrence's output [b, s, H, V] -> [s, b, H * V]."""
        tp = self.pg_collection.tp
        normed = output_norm(mixed, gate, weight, self.layout, tp, self.kernels)
        return normed.flatten(2).transpose(0, 1).contiguous()

    def _projected(self, x: Tensor) -> list[Tensor]:
        """[s, b, d] -> `self.products`, each [b, s, rows of its sections]."""
        gather = self.config.sequence_parallel
        widths = [sum(self._sizes(names)) for names in self.products]
        if self.config.fp8:  # one product, whose quantised weight serves all loops of a step
            whole, _ = self.in_proj(x)
            return list(whole.transpose(0, 1).split(widths, dim=-1))
        group = self.pg_collection.tp
        return list(sectioned_linear(x, self.in_proj.weight, widths, group, gather))

    def _sizes(self, names: tuple[str, ...]) -> list[int]:
        """Rows of sections on this rank."""
        return [self.layout.rows(name) // self.tp_size for name in names]

    def _split(self, pieces: list[Tensor], skip: int = 0) -> dict[str, Tensor]:
        """The sections of the matrix products but the first `skip`."""
        parts: dict[str, Tensor] = {}
        for names, piece in zip(self.products[skip:], pieces[skip:], strict=True):
            parts |= zip(names, torch.split(piece, self._sizes(names), dim=-1), strict=True)
        return parts

    def _mix(
        self, pieces: list[Tensor], cu_seqlens: Tensor | None, shard: SequenceShard | None
    ) -> tuple[Tensor, Tensor | None]:
        """Output of the recurrence and the gate on it, [b, s, H, V]; changes `pieces`."""
        convolved, rebuild = self._convolve(pieces, cu_seqlens, shard)
        # All sections with a convolution are one product, the first.
        parts = self._sections(convolved | self._split(pieces, skip=1 if convolved else 0))
        own = {name: getattr(self, name) for name in self.layout.weights}
        first = self.pg_collection.tp.rank() * self.heads
        scan = Scan(self.kernels, slice(first, first + self.heads), cu_seqlens, scaled=True)
        if shard is None:
            mixed, _ = self.recurrent.mix(parts, own, scan)
        else:
            if self.recurrent.reads_positions:
                scan = replace(scan, positions=positions_of(shard, pieces[0].device))
            mixed = mix_shard(self.recurrent, parts, own, scan, shard, self.pg_collection.cp)
        if convolved and self.training and getattr(self.config, "recompute_cheap", False):
            drop_and_rebuild(list(convolved.values()), rebuild, mixed)
        return mixed, None if self.layout.gate is None else parts[self.layout.gate]

    def _sections(self, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The sections as `RecurrentMixer.prepare` takes them."""
        layout = self.layout
        parts.update(self.gather_sections({name: parts[name] for name in layout.gathered_names}))
        for name, up in self.up.items():
            parts[name] = up(parts[name])
        return {
            name: part if layout.sections[name].shared else part.unflatten(-1, (self.heads, -1))
            for name, part in parts.items()
        }

    def _convolve(
        self, pieces: list[Tensor], cu_seqlens: Tensor | None, shard: SequenceShard | None
    ) -> tuple[dict[str, Tensor], Callable[..., Any]]:
        """The sections that are convolved, and what writes them again; changes `pieces`."""
        conv, names = self.conv1d, self.layout.conv_names
        if conv is None:
            return {}, lambda: None
        before: Tensor | None = None
        if shard is not None:
            span = span_of(shard)
            pieces[:1], (before,) = exchange_halo(
                pieces[:1],
                self.layout.conv_size - 1,
                self.pg_collection.cp,
                last=span.last,
                continues=span.continues,
                documents=len(pieces[0]) if cu_seqlens is None else len(cu_seqlens) - 1,
            )
        parts = [
            Part(rows, self.layout.sections[name].channels if self._unit(name) else None)
            for name, rows in zip(names, self._sizes(names), strict=True)
        ]
        convolved = partial(
            convolve_parts,
            pieces[0],
            conv.weight,
            parts,
            bias_D=conv.bias,
            activation="silu",
            initial_state_NDW=before,
            cu_seqlens=cu_seqlens,
            backend=self.kernels,
        )
        made = dict(zip(names, convolved(), strict=True))
        return made, lambda *into: convolved(into=into)

    def _unit(self, name: str) -> bool:
        return self.layout.sections[name].unit

    def gather_sections(self, slices: dict[str, Tensor]) -> dict[str, Tensor]:
        """Whole sections from the slices that the ranks hold, in one collective."""
        if self.tp_size == 1 or not slices:
            return slices
        together = torch.cat(list(slices.values()), dim=-1)
        together = all_gather_last_dim_from_tensor_parallel_region(
            together, group=self.pg_collection.tp
        ).unflatten(-1, (self.tp_size, -1))
        sizes = [part.shape[-1] for part in slices.values()]
        whole = torch.split(together, sizes, dim=-1)
        return {name: part.flatten(-2) for name, part in zip(slices, whole, strict=True)}

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
        tp_group: Any = None,
    ) -> dict[str, Any]:
        """Checkpoint entries that do not depend on the tensor-parallel size.

        A fused weight is stacked [q | k | v | ..] *per rank*; it is saved as one global tensor
        a section.
        """
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        tp_group = tp_group or self.pg_collection.tp
        state: dict[str, Any] = {}
        for name in ("in_proj", "out_proj"):
            state.update(
                sharded_state_dict_default(
                    getattr(self, name),
                    f"{prefix}{name}.",
                    sharded_offsets,
                    metadata,
                    tp_group=tp_group,
                )
            )
        own = {
            name: parameter
            for name, parameter in self.named_parameters()
            if not name.startswith(("in_proj.", "out_proj."))
        }
        cut = {name: 0 for name, parameter in own.items() if hasattr(parameter, "lt2_shards")}
        state.update(
            make_sharded_tensors_for_checkpoint(
                own,
                prefix,
                cut,
                sharded_offsets,
                tp_group=tp_group,
                dp_cp_group=metadata["dp_cp_group"],
            )
        )
        layout = self.layout
        for key, names in (
            ("in_proj.weight", tuple(layout.sections)),
            ("conv1d.weight", layout.conv_names),
            ("conv1d.bias", layout.conv_names),
        ):
            full = f"{prefix}{key}"
            if full in state:
                local = [layout.rows(name) // self.tp_size for name in names]
                state[full] = split_sections(state[full], names, local)
        return state
