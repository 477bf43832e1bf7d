"""safetensors files, read tensor by tensor.

The library's own reader maps whole files into memory; this one reads a tensor into a place that is
given, or copies its bytes to another file, so a model larger than memory passes through in pieces.
Before anything is used, headers, sizes and the index are checked against each other.

A file is: 8 bytes with the length of the header, the header (JSON: name -> dtype, shape, place of
the data), the data.
"""

import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.byte_copy import ByteCopier, Run

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    **{"F64": ("float64", 8), "F32": ("float32", 4), "F16": ("float16", 2)},
    **{"BF16": ("bfloat16", 2), "I64": ("int64", 8), "I32": ("int32", 4)},
}
"""Names in a header: torch's name and bytes an element."""
NAMES = {torch_name: name for name, (torch_name, _) in DTYPES.items()}


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies, and what it is."""

    file: Path
    start: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return self.count * DTYPES[self.dtype][1]


def read_header(path: Path) -> dict[str, Entry]:
    """The tensors of one file.

    Raises:
        ValueError: the file is missing, cut short, or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > min(size - 8, MAX_HEADER_BYTES):
                raise ValueError(f"{size} bytes cannot hold a header of {length}")
            header = json.loads(stream.read(length))
        header.pop("__metadata__", None)
        entries = {name: _entry(path, 8 + length, name, said) for name, said in header.items()}
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise ValueError(f"{path}: no whole safetensors file ({error})") from None
    end = max((entry.start + entry.nbytes for entry in entries.values()), default=8 + length)
    if end != size:
        last = max(entries, key=lambda name: entries[name].start, default="nothing")
        raise ValueError(
            f"{path}: {size} bytes, but its header says {end} (the last tensor is {last}); the "
            "file is cut short or damaged"
        )
    return entries


def _entry(path: Path, data: int, name: str, said: Mapping[str, Any]) -> Entry:
    if said["dtype"] not in DTYPES:
        raise ValueError(f"{name} has dtype {said['dtype']}, which no training model has")
    start, end = said["data_offsets"]
    entry = Entry(path, data + start, said["dtype"], tuple(said["shape"]))
    if end - start != entry.nbytes:
        raise ValueError(f"{name} takes {end - start} bytes, its shape needs {entry.nbytes}")
    return entry


class SafetensorsFolder(Mapping[str, "Tensor"]):
    """The tensors of a Hugging Face folder by name; each is read when it is asked for.

    Raises:
        ValueError: no weights, a missing or damaged file, or an index that says something else
            than the files; names the tensor or file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.entries: dict[str, Entry] = {}
        index = folder / INDEX
        for name in _shards(folder):
            for key, entry in read_header(folder / name).items():
                if key in self.entries:
                    raise ValueError(
                        f"{folder}: {key} is in {self.entries[key].file.name} and in {name}"
                    )
                self.entries[key] = entry
        if index.is_file():
            _check_index(index, self.entries)
        self._copier = ByteCopier()

    def __getitem__(self, name: str) -> "Tensor":
        import torch

        entry = self.entries[name]
        tensor = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype][0]))
        self.fill(name, tensor)
        return tensor

    def fill(self, name: str, place: "Tensor") -> None:
        """Read a tensor into `place`, which has its dtype and number of elements."""
        if not place.is_contiguous():
            place.copy_(self[name].view(place.shape))
            return
        entry = self.entries[name]
        with open(entry.file, "rb", buffering=0) as stream:
            stream.seek(entry.start)
            read_into(stream, place, entry.file)

    def copy_bytes(self, name: str, target: Any, places: Sequence[Run]) -> None:
        """Write a tensor's bytes to `places` of an open file.

        Raises:
            OSError: the tensor's file ends too early, or the other cannot be written.
        """
        entry = self.entries[name]
        self._copier.copy(entry.file, [(entry.start, entry.nbytes)], target, places)

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def dtype(self, name: str) -> str:
        """torch's name of a tensor's dtype."""
        return DTYPES[self.entries[name].dtype][0]


def read_into(stream: Any, tensor: "Tensor", path: Path) -> None:
    """Fill a contiguous tensor with the next bytes of a file.

    Raises:
        OSError: the file ends too early.
    """
    view = memoryview(bytes_of(tensor))
    while view:
        count = stream.readinto(view)
        if not count:
            raise OSError(f"{path}: ended {len(view)} bytes too early")
        view = view[count:]


def bytes_of(tensor: "Tensor") -> Any:
    """The memory of a contiguous tensor as a numpy array of bytes."""
    import torch

    return tensor.reshape(-1).view(torch.uint8).numpy()


def _shards(folder: Path) -> list[str]:
    """File names of the weights, those of the index if there is one."""
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        names = sorted(set(_weight_map(index).values()))
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise ValueError(f"{index}: names the file {name!r}")
            if not (folder / name).is_file():
                keys = sorted(k for k, v in _weight_map(index).items() if v == name)
                raise ValueError(
                    f"{folder / name}: no such file, but the index puts {keys[0]} and "
                    f"{len(keys) - 1} more tensors into it"
                )
        return names
    if single.is_file():
        return [SINGLE]
    if any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder}: has shards of weights but no {INDEX}")
    raise ValueError(f"{folder}: no {SINGLE} and no {INDEX} in this folder")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        return dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index}: not a usable index ({error})") from None


def _check_index(index: Path, entries: Mapping[str, Entry]) -> None:
    said = _weight_map(index)
    for name, file in said.items():
        if name not in entries:
            raise ValueError(f"{index}: puts {name} into {file}, which does not have it")
        if entries[name].file.name != file:
            raise ValueError(
                f"{index}: puts {name} into {file}, but it is in {entries[name].file.name}"
            )
    for name in entries:
        if name not in said:
            raise ValueError(f"{index}: does not name {name}, which is in {entries[name].file}")
    metadata = json.loads(index.read_text(encoding="utf-8")).get("metadata") or {}
    total = sum(entry.nbytes for entry in entries.values())
    if metadata.get("total_size", total) != total:
        raise ValueError(
            f"{index}: total_size is {metadata['total_size']}, the tensors have {total} bytes"
        )


@dataclass(frozen=True)
class Spec:
    """A tensor that is going to be written: torch's name of the dtype, and the shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the data."""
        return math.prod(self.shape) * DTYPES[NAMES[self.dtype]][1]
