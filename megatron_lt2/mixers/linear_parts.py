"""The parameters of a linear mixer's layer beside its two projections, cut by heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lt2.mixers.parameters import Shards, declare, new_parameter
from megatron_lt2.recurrent.base import Layout
from megatron_lt2.recurrent.initial import constant, uniform

Products = list[tuple[str, ...]]
"""Sections by name, those of one matrix product together."""


class OutputNorm(nn.Module):
    """Weight of the RMS norm on the recurrence's output: one head's channels, or all heads'."""

    def __init__(self, layout: Layout, tp_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        whole = layout.norm == "layer"
        channels = layout.norm_channels // (tp_size if whole else 1)
        self.weight = new_parameter(channels, dtype=dtype)
        shards = Shards((layout.norm_channels,)) if whole else None
        declare(self.weight, init=constant(1.0), shards=shards)


class ShortConv(nn.Module):
    """Weights [channels, taps] and bias of a causal depthwise convolution, sharded by heads."""

    def __init__(
        self, rows: tuple[int, ...], taps: int, bias: bool, tp_size: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        # torch's Conv1d default: uniform within 1/sqrt(fan_in), here one channel of `taps` inputs.
        init = uniform(-(taps**-0.5), taps**-0.5)
        local = sum(rows) // tp_size
        self.weight = new_parameter(local, taps, dtype=dtype)
        declare(self.weight, init=init, shards=Shards(rows), per_channel=True)
        self.bias = new_parameter(local, dtype=dtype) if bias else None
        if self.bias is not None:
            declare(self.bias, init=init, shards=Shards(rows), per_channel=True)


class WayUp(nn.Module):
    """Second half of a bottleneck [channels of this rank's heads, rank], with an optional bias."""

    def __init__(self, rows: int, rank: int, bias: bool, tp_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = new_parameter(rows // tp_size, rank, dtype=dtype)
        declare(self.weight, shards=Shards((rows,)))
        self.bias = new_parameter(rows // tp_size, dtype=dtype) if bias else None
        if self.bias is not None:
            declare(self.bias, init=constant(0.0), shards=Shards((rows,)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def group_sections(layout: Layout, narrow: int) -> Products:
    """Which sections share a matrix product, such that no kernel behind it has to copy its slice.

    Those with a convolution, whose kernel reads slices and writes whole tensors; and neighbours
    with fewer than `narrow` rows, whose copies cost less than small products.
    """
    products: Products = []
    open_group = False
    for name, section in layout.sections.items():
        joins = section.conv or layout.rows(name) < narrow
        if open_group and joins and layout.sections[products[-1][0]].conv == section.conv:
            products[-1] += (name,)
        else:
            products.append((name,))
        open_group = joins
    return products


def check_splits(layout: Layout, ranks: int) -> None:
    """Refuse a layout that tensor parallelism cannot cut.

    Raises:
        ValueError: heads, or the rows of a shared section, are no multiple of the ranks.
    """
    if layout.heads % ranks:
        raise ValueError(
            f"a linear mixer with {layout.heads} heads cannot be split over "
            f"{ranks} tensor-parallel ranks; choose a divisor of {layout.heads}"
        )
    for name in layout.gathered_names:
        if layout.rows(name) % ranks:
            rank = layout.sections[name].rank is not None
            raise ValueError(
                f"the {layout.rows(name)} channels that all heads share in {name} (the mixer's "
                f"{'rank' if rank else 'groups x head_k_dim'}) cannot be split over {ranks} "
                f"tensor-parallel ranks; choose a divisor of {layout.rows(name)}"
            )
