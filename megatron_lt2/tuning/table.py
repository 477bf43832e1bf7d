"""Tuned configurations as data: one JSON file for a GPU architecture.

    {"format": 1, "architecture": "sm_90", "fla": "0.6.0", "triton": "3.8", "gpu": "NVIDIA H200",
     "kernels": {"fla.ops.gla.chunk:chunk_gla_fwd_kernel_o": [
        {"key": [128, 128, 64, "torch.bfloat16"], "ms": 0.12,
         "config": {"kwargs": {"BK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}}]}}

A kernel is named by module and function. `key` is Triton's own: the values of the arguments that
the kernel is tuned for, then the dtypes of its tensors. The file that came with the package is
overlaid by the one that `python -m megatron_lt2.warmup --tune` wrote on this machine.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_lt2.atomic import write_text_atomic
from megatron_lt2.caches import cache_root
from megatron_lt2.recurrent.names import RECURRENT

FORMAT = 1
FLA, TRITON = "0.6.0", "3.8"
"""The versions that this package's tuning was written for and timed with."""

TUNABLE = (*RECURRENT, "window", "nsa")
"""Mixers with kernels of FLA that have candidates to choose from."""


@dataclass
class TunedTable:
    """Chosen configurations of one architecture, `entries[kernel][key as JSON] = entry`.

    gpu: the GPU that they were timed on.
    """

    architecture: str
    gpu: str = ""
    entries: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def __len__(self) -> int:
        return sum(len(keys) for keys in self.entries.values())

    def put(self, kernel: str, key: Sequence[Any], config: dict[str, Any], ms: float) -> None:
        """Set the configuration of a kernel for one key; `ms` is what it took."""
        plain = plain_key(key)
        entry = {"key": plain, "ms": round(ms, 5), "config": config}
        self.entries.setdefault(kernel, {})[json.dumps(plain)] = entry

    def exact(self, kernel: str, key: Sequence[Any]) -> dict[str, Any] | None:
        """The configuration for this very key."""
        entry = self.entries.get(kernel, {}).get(json.dumps(plain_key(key)))
        return entry["config"] if entry else None

    def nearest(self, kernel: str, key: Sequence[Any]) -> list[dict[str, Any]]:
        """Configurations of the kernel's other keys, the most similar sizes first.

        Keys that differ in a flag or a dtype come after those that differ in sizes only.
        """
        wanted = plain_key(key)
        ranked = sorted(
            self.entries.get(kernel, {}).values(), key=lambda entry: _distance(entry["key"], wanted)
        )
        return [entry["config"] for entry in ranked]

    def overlaid(self, other: "TunedTable") -> "TunedTable":
        """This table with the entries of `other` in front."""
        merged = {kernel: dict(keys) for kernel, keys in self.entries.items()}
        for kernel, keys in other.entries.items():
            merged.setdefault(kernel, {}).update(keys)
        return TunedTable(self.architecture, other.gpu or self.gpu, merged)

    def to_json(self) -> str:
        """The file's text: sorted, one line an entry, so that differences can be read."""
        head = {
            "format": FORMAT,
            "architecture": self.architecture,
            "fla": FLA,
            "triton": TRITON,
            "gpu": self.gpu,
        }
        kernels = [
            f"  {json.dumps(kernel)}: [\n    "
            + ",\n    ".join(json.dumps(keys[key]) for key in sorted(keys))
            + "\n  ]"
            for kernel, keys in sorted(self.entries.items())
        ]
        body = "{\n" + ",\n".join(kernels) + "\n }" if kernels else "{}"
        return json.dumps(head, indent=1)[:-2] + f',\n "kernels": {body}\n}}\n'

    def save(self, path: Path) -> None:
        """Merge into the file at `path`: other keys of it stay. Written aside, then renamed."""
        path.parent.mkdir(parents=True, exist_ok=True)
        before = load_table(path, self.architecture)
        merged = self if before is None else before.overlaid(self)
        write_text_atomic(path, merged.to_json())


def plain_key(key: Sequence[Any]) -> list[Any]:
    """A key as JSON has it: numbers, flags, words and null stay, all else becomes its text."""
    return [
        value if value is None or isinstance(value, bool | int | float | str) else str(value)
        for value in key
    ]


def _distance(one: list[Any], other: list[Any]) -> tuple[int, float]:
    """How many places differ in more than a size; how far apart the sizes are, in logarithms."""
    odd, apart = abs(len(one) - len(other)), 0.0
    for a, b in zip(one, other, strict=False):
        if _is_size(a) and _is_size(b):
            apart += abs(math.log((abs(a) + 1) / (abs(b) + 1)))
        else:
            odd += a != b or type(a) is not type(b)
    return odd, apart


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def load_table(path: Path, architecture: str) -> TunedTable | None:
    """Read a file; None if it is missing, torn, or for another architecture or other versions."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
        table = TunedTable(loaded["architecture"], loaded.get("gpu", ""))
        made_for = (loaded["format"], loaded["architecture"], loaded["fla"], loaded["triton"])
        for kernel, key, config, ms in _read(loaded["kernels"]):
            table.put(kernel, key, config, ms)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return table if made_for == (FORMAT, architecture, FLA, TRITON) else None


def _read(kernels: dict[str, Any]) -> Iterator[tuple[str, list[Any], dict[str, Any], float]]:
    for kernel, entries in kernels.items():
        for entry in entries:
            config = entry["config"]
            if not isinstance(config["kwargs"], dict) or not isinstance(config["num_warps"], int):
                raise ValueError(f"{kernel}: not a configuration")
            yield kernel, entry["key"], config, float(entry.get("ms", 0))


def shipped_file(architecture: str) -> Path:
    """The file that comes with the package."""
    return Path(__file__).parent / f"{architecture}.json"


def own_file(architecture: str) -> Path:
    """The file that --tune writes on this machine; versions are in its name, so none is lost."""
    return cache_root() / "tuned" / f"{architecture}-fla-{FLA}-triton-{TRITON}.json"


def known_table(architecture: str) -> TunedTable:
    """What is known of an architecture: this machine's file over the shipped one; may be empty."""
    table = TunedTable(architecture)
    for path in (shipped_file(architecture), own_file(architecture)):
        loaded = load_table(path, architecture)
        table = table if loaded is None else table.overlaid(loaded)
    return table
