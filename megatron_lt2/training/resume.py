"""What may change between two starts of the same run.

Refused: what the saved tensors or the position in the data depend on. Told: what changes the order
of the data, since the run goes on at the same step of another list. The rest may change freely.
"""

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
TOLD = ("data.weights", "data.split", "data.shuffle_buffer")


def refusal(saved: RunConfig, now: RunConfig) -> str | None:
    """Why `now` cannot continue a run of `saved`, or None."""
    for name, old, new in _differences(saved, now, REFUSED):
        return (
            f"was trained with {name} {old!r}, now it is {new!r}; use the old value, or another "
            "run_dir for a new run"
        )
    return None


def notes(saved: RunConfig, now: RunConfig, saved_data: list[str], data: list[str]) -> list[str]:
    """Lines to print about changes that are allowed and matter.

    Data counts as the same by the checksums of its token files, wherever they lie.
    """
    changes = [
        f"{n} was {old!r}, now it is {new!r}" for n, old, new in _differences(saved, now, TOLD)
    ]
    if saved_data != data:
        changes.append("the token files of data.path are not those of the checkpoint")
    return [
        f"warning: {change}: training goes on at the same step of another list of sequences"
        for change in changes
    ]


def _differences(
    saved: RunConfig, now: RunConfig, names: tuple[str, ...]
) -> Iterator[tuple[str, Any, Any]]:
    for name in names:
        old: Any = saved
        new: Any = now
        for part in name.split("."):
            old, new = getattr(old, part), getattr(new, part)
        yield from _leaves(name, old, new)


def _leaves(name: str, old: Any, new: Any) -> Iterator[tuple[str, Any, Any]]:
    if is_dataclass(old):
        for field in vars(old):
            yield from _leaves(f"{name}.{field}", getattr(old, field), getattr(new, field))
    elif old != new:
        yield name, old, new
