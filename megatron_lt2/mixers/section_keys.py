"""Checkpoint keys of a fused weight: one global tensor a section.

Every rank stacks its rows of each section, [q | k | v | ..], so the fused tensor means something
else for another number of ranks; the sections do not.
"""

from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def split_sections(
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
