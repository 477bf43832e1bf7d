"""megatron-core's two tensor-parallel linear layers, for looped models.

Parameters, names and checkpoints are megatron-core's. What differs: the weight's gradient is added
in fp32 where megatron-core keeps it (weight_gradient.py), and an input that can be made again is
not kept (remake.py). With FP8 the layers are Transformer Engine's (`precision.fp8`).
"""

import copy
from typing import Any

from megatron.core.tensor_parallel import ColumnParallelLinear as CoreColumnLinear
from megatron.core.tensor_parallel import RowParallelLinear as CoreRowLinear
from megatron.core.tensor_parallel.mappings import (
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from megatron_lt2.parallel.sectioned_linear import project


class ColumnLinear(CoreColumnLinear):
    """x W^T, the rows of W spread over the tensor-parallel ranks; no bias, nothing gathered."""

    def forward(self, input_: Tensor, *unused: Any, **options: Any) -> tuple[Tensor, None]:
        """[s, b, d] (part of s under sequence parallelism) -> [s, b, rows of this rank]."""
        assert self.bias is None and not self.gather_output
        return project(input_, self.weight, self.tp_group, self.sequence_parallel), None


class RowLinear(CoreRowLinear):
    """x W^T, the columns of W spread over the tensor-parallel ranks; no bias."""

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        """[s, b, columns of this rank] -> [s, b, d] (part of s under sequence parallelism)."""
        return self.reduced(project(input_, self.weight, None, False)), None

    def reduced(self, output: Tensor) -> Tensor:
        """The sum over the ranks of what each made of its columns, [s, b, d]."""
        assert self.bias is None and self.input_is_parallel
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(output, group=self.tp_group)
        return reduce_from_tensor_model_parallel_region(output, group=self.tp_group)


def column_linear(rows_in: int, rows_out: int, *, config: Any, **options: Any) -> Any:
    """A ColumnLinear, or Transformer Engine's with FP8; arguments as megatron-core's."""
    if not config.fp8:
        return ColumnLinear(rows_in, rows_out, config=config, **options)
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear

    return TEColumnParallelLinear(rows_in, rows_out, config=_for_engine(config), **_all(options))


def row_linear(rows_in: int, rows_out: int, *, config: Any, **options: Any) -> Any:
    """A RowLinear, or Transformer Engine's with FP8; arguments as megatron-core's."""
    if not config.fp8:
        return RowLinear(rows_in, rows_out, config=config, **options)
    from megatron.core.extensions.transformer_engine import TERowParallelLinear

    return TERowParallelLinear(rows_in, rows_out, config=_for_engine(config), **_all(options))


def _for_engine(config: Any) -> Any:
    """The config for Transformer Engine's layers, which add weight gradients in fp32 themselves;
    megatron-core's own, as the output head, would need Apex for that."""
    config = copy.copy(config)
    config.gradient_accumulation_fusion = True
    return config


def _all(options: dict[str, Any]) -> dict[str, Any]:
    """Options that Transformer Engine's layers insist on."""
    return {"bias": False, "skip_bias_add": True, "is_expert": False} | options
