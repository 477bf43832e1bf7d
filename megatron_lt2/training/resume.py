"""What may change between two starts of the same run.

Refused: what the saved tensors or the position in the data depend on. Told: what changes the order
of the data, since the run goes on at the same step of another list. The rest may change freely.
"""

import os
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

from megatron_lt2.config.schema import RunConfig

REFUSED = (
    "model",
    "data.sequence_length",
    "data.isolate_documents",
    "training.global_batch_size",
    "training.seed",
    # megatron-core finds a parameter group of the checkpoint by these values.
    "optimizer.lr",
    "optimizer.min_lr",
    "optimizer.weight_decay",
    "parallel.distributed_optimizer",
)
TOLD = ("data.path", "data.weights", "data.split")


def refusal(saved: RunConfig, now: RunConfig) -> str | None:
    """Why `now` cannot continue a run of `saved`, or None."""
    for name, old, new in _differences(saved, now, REFUSED):
        return (
            f"was trained with {name} {old!r}, now it is {new!r}; use the old value, or another "
            "run_dir for a new run"
        )
    return None


def notes(saved: RunConfig, now: RunConfig) -> list[str]:
    """Lines to print about changes that are allowed and matter."""
    return [
        f"warning: {name} was {old!r}, now it is {new!r}: training goes on at the same step of "
        "another list of sequences"
        for name, old, new in _differences(saved, now, TOLD)
    ]


def _differences(
    saved: RunConfig, now: RunConfig, names: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old: Any = saved
        new: Any = now
        for part in name.split("."):
            old, new = getattr(old, part), getattr(new, part)
        if name == "data.path":
            old, new = ([os.path.abspath(p) for p in x.data.prefixes] for x in (saved, now))
        yield from _leaves(name, old, new)


def _leaves(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if is_dataclass(old):
        for field in vars(old):
            yield from _leaves(f"{name}.{field}", getattr(old, field), getattr(new, field))
    elif old != new:
        yield name, old, new
