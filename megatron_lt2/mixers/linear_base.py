"""The shared body of the linear mixers: projections, short convolution, recurrence, gated norm.

A mixer declares its `Layout` (heads, widths of each projection, which of them go through the
convolution) and writes `recurrence`. Tensor and sequence parallelism (by heads), packed documents,
checkpoint keys and resharding follow from the declaration, here.

Shapes: [s, b, d] outside as everywhere in megatron-core; [B, T, H, channels] in the recurrence.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import (
    ensure_metadata_has_dp_cp_group,
    make_sharded_tensors_for_checkpoint,
    sharded_state_dict_default,
)
from torch import Tensor, nn

from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.kernels.norms import gated_rms_norm
from megatron_lt2.mixers.parameters import Shards, constant, declare, new_parameter, uniform


@dataclass(frozen=True)
class Layout:
    """Geometry of a linear mixer; widths are channels a head.

    sections: projections of the input in the order in which they are fused, name -> channels a
        head.
    conv: names of the leading sections that pass through the convolution.
    gate: name of the section that gates the output.
    """

    heads: int
    head_v_dim: int
    sections: dict[str, int]
    conv: tuple[str, ...]
    gate: str
    conv_size: int
    norm_eps: float

    def rows(self, names: tuple[str, ...] | None = None) -> tuple[int, ...]:
        """Global rows of each of the sections `names` (default: all)."""
        return tuple(self.sections[n] * self.heads for n in (names or tuple(self.sections)))


class HeadNorm(nn.Module):
    """Weight of the RMS norm over each head's channels; the same weight serves every head."""

    def __init__(self, channels: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(channels, dtype=dtype)
        declare(self.weight, init=constant(1.0))


class ShortConv(nn.Module):
    """Weights [channels, taps] of a causal depthwise convolution, sharded by heads."""

    def __init__(self, rows: tuple[int, ...], taps: int, tp_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(sum(rows) // tp_size, taps, dtype=dtype)
        # torch's Conv1d default: uniform within 1/sqrt(fan_in), here one channel of `taps` inputs.
        declare(
            self.weight,
            init=uniform(-(taps**-0.5), taps**-0.5),
            shards=Shards(rows),
            per_channel=True,
        )


class LinearMixer(MegatronModule):
    """Base of the linear mixers; subclasses add their own parameters and `recurrence`."""

    fp32_parameters: tuple[str, ...] = ()
    """Per-head parameters of the subclass, kept in fp32 and sharded by heads."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        layout: Layout,
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
        self.pg_collection, self.layout, self.kernels = groups, layout, kernels
        self.layer_number = layer_number
        self.tp_size = groups.tp.size()
        if layout.heads % self.tp_size:
            raise ValueError(
                f"a linear mixer with {layout.heads} heads cannot be split over "
                f"{self.tp_size} tensor-parallel ranks; choose a divisor of {layout.heads}"
            )
        if config.context_parallel_size > 1:
            raise ValueError(
                f"context_parallel_size {config.context_parallel_size} is not supported by the "
                "linear mixers; set it to 1"
            )
        self.heads = layout.heads // self.tp_size
        dtype = config.params_dtype
        self.in_proj = ColumnParallelLinear(
            config.hidden_size,
            sum(layout.rows()),
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            tp_group=groups.tp,
        )
        declare(self.in_proj.weight, shards=Shards(layout.rows()))
        self.conv1d = ShortConv(layout.rows(layout.conv), layout.conv_size, self.tp_size, dtype)
        self.out_norm = HeadNorm(layout.head_v_dim, dtype)
        self.out_proj = RowParallelLinear(
            layout.heads * layout.head_v_dim,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_group=groups.tp,
        )

    def recurrence(self, parts: dict[str, Tensor], cu_seqlens: Tensor | None) -> Tensor:
        """Mix tokens: parts[name] is [B, T, H, channels]; returns [B, T, H, head_v_dim]."""
        raise NotImplementedError(f"{type(self).__name__} must define recurrence")

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
        cu_seqlens = None if packed_seq_params is None else packed_seq_params.cu_seqlens_q
        fused, _ = self.in_proj(hidden_states)
        fused = fused.transpose(0, 1)  # [B, T, rows]
        parts = self._split(fused, cu_seqlens)
        mixed = self.recurrence(parts, cu_seqlens)
        # Each tensor-parallel rank holds other heads, so the gradients of the shared norm weight
        # are summed.
        weight = copy_to_tensor_model_parallel_region(self.out_norm.weight, self.pg_collection.tp)
        gate = parts[self.layout.gate]
        mixed = gated_rms_norm(mixed, gate, weight, self.layout.norm_eps, backend=self.kernels)
        out, _ = self.out_proj(mixed.flatten(2).transpose(0, 1).contiguous())
        return out, None

    def _split(self, fused: Tensor, cu_seqlens: Tensor | None) -> dict[str, Tensor]:
        layout = self.layout
        sizes = [rows // self.tp_size for rows in layout.rows()]
        conv_rows = sum(sizes[: len(layout.conv)])
        convolved, _ = causal_conv1d(
            fused[..., :conv_rows],
            self.conv1d.weight,
            activation="silu",
            cu_seqlens=cu_seqlens,
            backend=self.kernels,
        )
        pieces = list(torch.split(convolved, sizes[: len(layout.conv)], dim=-1))
        pieces += torch.split(fused[..., conv_rows:], sizes[len(layout.conv) :], dim=-1)
        shape = (*fused.shape[:2], self.heads, -1)
        return {
            name: piece.reshape(shape) for name, piece in zip(layout.sections, pieces, strict=True)
        }

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
        own: dict[str, Any] = {}
        self._save_to_state_dict(own, "", keep_vars=True)
        state = make_sharded_tensors_for_checkpoint(
            own,
            prefix,
            {name: 0 for name in self.fp32_parameters},
            sharded_offsets,
            tp_group=tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, module in self.named_children():
            if isinstance(module, ShortConv):
                part = make_sharded_tensors_for_checkpoint(
                    module.state_dict(prefix="", keep_vars=True),
                    f"{prefix}{name}.",
                    {"weight": 0},
                    sharded_offsets,
                    tp_group=tp_group,
                    dp_cp_group=metadata["dp_cp_group"],
                )
            else:
                part = sharded_state_dict_default(
                    module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp_group
                )
            state.update(part)
        layout = self.layout
        for key, names in (("in_proj", tuple(layout.sections)), ("conv1d", layout.conv)):
            full = f"{prefix}{key}.weight"
            local = [rows // self.tp_size for rows in layout.rows(names)]
            state[full] = _split_sections(state[full], names, local)
        return state


def _split_sections(
    fused: ShardedTensor, names: tuple[str, ...], local_rows: list[int]
) -> ShardedTensorFactory:
    """Save `fused` as one tensor a section, key.NAME, and put them together again when loading."""
    row_axis = fused.prepend_axis_num
    tp_rank, tp_size = 0, 1
    if fused.axis_fragmentations:
        tp_size = fused.axis_fragmentations[row_axis]
        tp_rank = fused.global_offset[row_axis] // fused.local_shape[0]
    other_offsets = [
        (axis, fused.global_offset[axis], fused.axis_fragmentations[axis])
        for axis in range(row_axis)
    ]

    def build(key: str, data: Tensor, replica_id: Any, flattened_range: Any) -> dict[str, Any]:
        assert flattened_range is None, "sections cannot be cut out of a flattened shard"
        return {
            name: ShardedTensor.from_rank_offsets(
                f"{key}.{name}",
                part,
                *other_offsets,
                (row_axis, tp_rank, tp_size),
                replica_id=replica_id,
                prepend_axis_num=row_axis,
            )
            for name, part in zip(names, torch.split(data, local_rows), strict=True)
        }

    def merge(parts: dict[str, Tensor]) -> Tensor:
        return torch.cat([parts[name] for name in names])

    return ShardedTensorFactory(
        fused.key, fused.data, build, merge, fused.replica_id, flattened_range=fused.flattened_range
    )
