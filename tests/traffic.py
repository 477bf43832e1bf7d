"""What ranks send: counts the calls of torch.distributed's collectives, and their bytes.

megatron-core keeps some of these functions under names of its own; those are wrapped too.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """A collective or a message.

    bytes: that this rank puts in.
    sent: that leave this rank in the usual algorithms, as model/traffic.py counts them.
    group: number of the process group object.
    """

    name: str
    bytes: int
    sent: float = 0.0
    group: int = 0


def _sent(name: str, size: int, args: Any, kwargs: Any, group: Any) -> float:
    ranks = group.size()
    if name in ("all_gather_into_tensor", "_all_gather_base", "all_gather"):
        return float(size * (ranks - 1))
    if name == "all_reduce":
        return 2 * size * (ranks - 1) / ranks
    if name == "all_to_all_single":
        splits = args[3] if len(args) > 3 else kwargs.get("input_split_sizes")
        if splits:
            total = sum(splits)
            return size * (total - splits[group.rank()]) / total if total else 0.0
    if name in ("all_to_all_single", "reduce_scatter_tensor", "_reduce_scatter_base"):
        return size * (ranks - 1) / ranks
    return float(size)


@contextmanager
def recorded() -> Iterator[list[Call]]:
    """A list that fills with the collectives of more than one rank that this process joins."""
    calls: list[Call] = []

    def recording(name: str, call: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            group = kwargs.get("group") or dist.group.WORLD
            given = args[SENT[name]] if len(args) > SENT[name] else kwargs["tensor"]
            tensors = given if isinstance(given, list | tuple) else [given]
            if group.size() > 1:
                size = sum(x.numel() * x.element_size() for x in tensors)
                calls.append(Call(name, size, _sent(name, size, args, kwargs, group), id(group)))
            return call(*args, **kwargs)

        return wrapper

    originals = {name: getattr(dist, name) for name in SENT if hasattr(dist, name)}
    wrapped = {name: recording(name, call) for name, call in originals.items()}
    batched, send = dist.batch_isend_irecv, originals["isend"]

    def messages(operations: Any) -> Any:
        for operation in operations:
            if operation.op in (send, wrapped["isend"]):
                size = operation.tensor.numel() * operation.tensor.element_size()
                calls.append(Call("isend", size, float(size), id(operation.group)))
                operation.op = send
        return batched(operations)

    kept = {id(call): name for name, call in originals.items()}
    with ExitStack() as stack:
        for module in [m for n, m in sys.modules.items() if n.startswith("megatron.")]:
            for attribute, value in list(vars(module).items()):
                if id(value) in kept:
                    patch = mock.patch.object(module, attribute, wrapped[kept[id(value)]])
                    stack.enter_context(patch)
        stack.enter_context(mock.patch.multiple(dist, batch_isend_irecv=messages, **wrapped))
        yield calls
