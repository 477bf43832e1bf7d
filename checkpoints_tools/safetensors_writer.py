"""safetensors files, written tensor by tensor.

The library's own writer wants all tensors of a file at once. Here the header is written first, from
what is going to come, and every tensor at its place when it comes.
"""

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.byte_copy import ByteCopier, Run
from checkpoints_tools.safetensors_files import DTYPES, INDEX, NAMES, SINGLE, Spec, bytes_of
from checkpoints_tools.write_behind import WriteBehind

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 4 * 1000**3


class SafetensorsWriter:
    """Writes tensors to the disk as they come; what will come must be known before.

    One file is called model.safetensors; several are numbered and come with an index. A file is
    closed when the next tensor would make it larger than `max_bytes`.

    Args:
        folder: where the files go.
        specs: what will be added, in this order.
        max_bytes: of a file.
    """

    def __init__(
        self, folder: Path, specs: Mapping[str, Spec], max_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        self.folder, self.specs = folder, specs
        self.files = _plan(specs, max_bytes)
        self.total_bytes = sum(spec.nbytes for spec in specs.values())
        self.parameters = sum(math.prod(spec.shape) for spec in specs.values())
        self._waiting = [
            (number, name) for number, names in enumerate(self.files) for name in names
        ]
        self._waiting.reverse()
        self._copier = ByteCopier()
        self._stream: Any = None
        self._behind: Any = None
        self._open = -1
        self._places: dict[str, int] = {}

    def add(self, name: str, tensor: "Tensor") -> None:
        """Write the next tensor.

        Raises:
            OSError: the disk is full or the folder cannot be written.
        """
        made = Spec(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        assert made == self.specs[name], f"{name} {made}, planned: {self.specs[name]}"
        self._stream_of(name).seek(self._places[name])
        _write(self._stream, bytes_of(tensor.contiguous()))
        self._behind.wrote(self.specs[name].nbytes)

    def add_bytes(self, name: str, path: Path, runs: Sequence[Run]) -> None:
        """Write the next tensor, whose bytes lie in `runs` of the file `path`.

        Raises:
            OSError: `path` ends too early, the disk is full or the folder cannot be written.
        """
        stream, size = self._stream_of(name), self.specs[name].nbytes
        self._copier.copy(path, runs, stream, [(self._places[name], size)])
        self._behind.wrote(size)

    def _stream_of(self, name: str) -> Any:
        """The file that the next tensor goes to."""
        number, expected = self._waiting.pop()
        assert name == expected, f"{name}, planned: {expected}"
        if number != self._open:
            self._start(number)
        return self._stream

    def close(self) -> None:
        """End the last file and write the index."""
        assert not self._waiting, f"not written: {self._waiting[-1][1]}"
        self.end_file()
        if len(self.files) > 1:
            index = {
                "metadata": {"total_size": self.total_bytes, "total_parameters": self.parameters},
                "weight_map": {
                    name: self._name(number)
                    for number, names in enumerate(self.files)
                    for name in names
                },
            }
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / INDEX).write_text(text, encoding="utf-8")

    def end_file(self) -> None:
        """Close the file that is being written."""
        if self._stream is not None:
            stream, self._stream = self._stream, None
            with stream:
                self._behind.finish()

    def _name(self, number: int) -> str:
        count = len(self.files)
        return SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"

    def _start(self, number: int) -> None:
        self.end_file()
        self._open = number
        header, self._places = _header({name: self.specs[name] for name in self.files[number]})
        self._stream = open(self.folder / self._name(number), "wb", buffering=0)  # noqa: SIM115
        self._behind = WriteBehind(self._stream)
        _write(self._stream, header)


def _write(stream: Any, data: Any) -> None:
    view = memoryview(data)
    while view:
        view = view[stream.write(view) :]


def _plan(specs: Mapping[str, Spec], max_bytes: int) -> list[list[str]]:
    files: list[list[str]] = []
    size = 0
    for name, spec in specs.items():
        if not files or size + spec.nbytes > max_bytes:
            files.append([])
            size = 0
        files[-1].append(name)
        size += spec.nbytes
    return files


def _header(specs: Mapping[str, Spec]) -> tuple[bytes, dict[str, int]]:
    """The beginning of a file, and the place of each tensor in it.

    Wide elements come first, so that each tensor begins at a multiple of its element's size: what
    reads a file in place needs that.
    """
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name in sorted(specs, key=lambda name: -DTYPES[NAMES[specs[name].dtype]][1]):
        spec = specs[name]
        entries[name] = {
            "dtype": NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [place, place + spec.nbytes],
        }
        place += spec.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    places = {name: begin + entries[name]["data_offsets"][0] for name in specs}
    return struct.pack("<Q", len(text)) + text, places
