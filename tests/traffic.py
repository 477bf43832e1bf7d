"""What ranks send: counts the calls of torch.distributed's collectives, and their bytes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch.distributed as dist

# Name of the collective, and which argument holds what this rank puts in.
SENT = {
    "all_gather_into_tensor": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all_single": 1,
    "all_reduce": 0,
    "broadcast": 0,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
    "send": 0,
    "isend": 0,
    "_all_gather_base": 1,
    "_reduce_scatter_base": 1,
}


@dataclass(frozen=True)
class Call:
    """A collective, and the bytes that this rank puts in."""

    name: str
    bytes: int


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """A list that fills with the collectives of more than one rank that this process joins."""
    calls: list[Call] = []

    def recording(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            given = args[SENT[name]]
            tensors = given if isinstance(given, list | tuple) else [given]
            if group.size() > 1:
                calls.append(Call(name, sum(x.numel() * x.element_size() for x in tensors)))
            return call(*args, **kwargs)

        return wrapper

    patches = {name: recording(name, getattr(dist, name)) for name in SENT if hasattr(dist, name)}
    with mock.patch.multiple(dist, **patches):
        yield calls
