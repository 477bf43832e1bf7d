"""Initial values: functions from a global shape and a generator to a tensor."""

import math

import torch
from torch import Tensor, nn

from .base import Initialiser


def constant(value: float) -> Initialiser:
    """Every element starts at `value`."""
    return lambda shape, generator: torch.full(shape, value, device=generator.device)


def uniform(low: float, high: float) -> Initialiser:
    """Uniform between `low` and `high`."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return torch.rand(shape, generator=generator, device=generator.device) * (high - low) + low

    return fill


def truncated_normal(std: float, cutoff: float) -> Initialiser:
    """Normal with standard deviation `std`, cut off at `cutoff` standard deviations."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        values = torch.empty(shape, device=generator.device)
        return nn.init.trunc_normal_(
            values, std=std, a=-cutoff * std, b=cutoff * std, generator=generator
        )

    return fill


def evenly(first: float, last: float) -> Initialiser:
    """Rising evenly from `first` to `last`."""
    return lambda shape, generator: torch.linspace(
        first, last, math.prod(shape), device=generator.device
    ).view(shape)


def log_uniform(low: float, high: float) -> Initialiser:
    """log A with A uniform in [low, high]; a low of 0 is lifted to keep the logarithm finite."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        rates = torch.rand(shape, generator=generator, device=generator.device)
        return (rates * (high - low) + low).clamp_min(1e-4).log()

    return fill


def inverse_softplus_of_steps(smallest: float, largest: float) -> Initialiser:
    """b such that softplus(b) is log-uniform in [smallest, largest]."""

    def fill(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        u = torch.rand(shape, generator=generator, device=generator.device)
        steps = torch.exp(u * math.log(largest / smallest) + math.log(smallest)).clamp_min(1e-4)
        return steps + torch.log(-torch.expm1(-steps))

    return fill
