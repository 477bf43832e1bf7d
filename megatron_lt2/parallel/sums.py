"""Sums over ranks that hold different tokens."""

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


def sum_over_tokens(values: Tensor, sequence_parallel: bool) -> Tensor:
    """The sum over data- and context-parallel ranks and, where `sequence_parallel`, over the
    tensor-parallel ranks, which then have other tokens too; in place, a collective call."""
    dist.all_reduce(
        values, group=parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    if sequence_parallel:
        dist.all_reduce(values, group=parallel_state.get_tensor_model_parallel_group())
    return values
