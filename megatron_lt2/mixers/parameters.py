"""What a parameter declares about itself: its initial values and how tensor parallelism cuts it.

Weights are initialised from their *global* shape with a generator seeded by their name, then cut to
the local shard (`model/init.py`). So a model starts from the same weights on any number of ranks. A
parameter that needs more than the default declares it here, next to where it is made.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_lt2.recurrent.base import Initialiser


@dataclass(frozen=True)
class Shards:
    """Tensor-parallel cut of a parameter along its first axis.

    sections: global sizes of the parts stacked on that axis; every rank holds its slice of each
        part, in the same order. One part means a plain contiguous cut.
    """

    sections: tuple[int, ...]

    def local(self, full: Tensor, rank: int, world: int) -> Tensor:
        """The shard of `full` that `rank` of `world` holds."""
        parts = torch.split(full, list(self.sections), dim=0)
        return torch.cat([part.chunk(world, dim=0)[rank] for part in parts], dim=0)


def declare(
    parameter: nn.Parameter,
    *,
    init: Initialiser | None = None,
    shards: Shards | None = None,
    per_channel: bool = False,
) -> None:
    """Attach to `parameter` its initial values, its cut, and whether it acts a channel.

    What acts a channel is not subject to weight decay, like any parameter with one axis.
    """
    if per_channel:
        parameter.lt2_per_channel = True  # type: ignore[attr-defined]
    if init is not None:
        parameter.lt2_init = init  # type: ignore[attr-defined]
    if shards is not None:
        parameter.lt2_shards = shards  # type: ignore[attr-defined]
        parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
        parameter.partition_dim = 0  # type: ignore[attr-defined]
        parameter.partition_stride = 1  # type: ignore[attr-defined]


def new_parameter(*shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """An uninitialised parameter on this rank's device."""
    return nn.Parameter(torch.empty(*shape, dtype=dtype, device=torch.cuda.current_device()))
