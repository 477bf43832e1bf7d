"""Reading a distributed checkpoint as plain tensors in one process, without GPU or model.

A checkpoint folder (megatron-core's torch_dist format) holds global tensors by name however many
ranks wrote them, each as one or several pieces. A tensor is put together when it is asked for.
Only tensors count here: random states and other pickled objects in the folder are not even listed.
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from checkpoints_tools.byte_copy import Record

if TYPE_CHECKING:
    from torch import Tensor


class PlainCheckpoint(Mapping[str, "Tensor"]):
    """The tensors of one checkpoint folder by name; each is read when it is asked for.

    Raises:
        ValueError: the folder holds no readable checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self.folder = folder
        try:
            self.metadata: Any = FileSystemReader(folder).read_metadata()
        except OSError as error:
            raise ValueError(f"{folder}: no distributed checkpoint ({error.strerror})") from None
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ValueError(f"{folder}/.metadata: cannot be read ({error})") from None
        self._entries = {
            name: entry
            for name, entry in self.metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> "Tensor":
        return self.read(name)

    def read(self, name: str, layer: int | None = None) -> "Tensor":
        """One tensor, or its part number `layer` along axis 0.

        Raises:
            ValueError: a file is missing or damaged, or pieces of the tensor are missing.
        """
        entry = self._entries[name]
        size, begin = list(entry.size), 0
        if layer is not None:
            size[0], begin = 1, layer
        try:
            tensor = self._assemble(name, entry, size, begin)
        except Exception as error:  # damaged files raise anything
            raise self._unreadable(name, error) from None
        return tensor if layer is None else tensor[0]

    def _assemble(self, name: str, entry: Any, size: list[int], begin: int) -> "Tensor":
        """Rows begin .. begin + size[0] of axis 0, from the pieces that have some of them."""
        import torch

        whole, filled = None, 0
        for chunk in entry.chunks:
            first = chunk.offsets[0] if size else 0
            count = chunk.sizes[0] if size else 1
            low, high = max(first, begin), min(first + count, begin + (size[0] if size else 1))
            if low >= high:
                continue
            piece = self._piece(name, chunk)
            if list(piece.shape) == size and low == begin:
                return piece
            if whole is None:
                whole = torch.empty(size, dtype=entry.properties.dtype)
            piece = piece[low - first : high - first]
            filled += piece.numel()
            place = [slice(low - begin, high - begin)]
            place += [
                slice(o, o + s) for o, s in zip(chunk.offsets[1:], chunk.sizes[1:], strict=True)
            ]
            whole[tuple(place)] = piece
        if whole is None or filled != whole.numel():
            raise ValueError("some of its pieces are missing")
        return whole

    def _piece(self, name: str, chunk: Any) -> "Tensor":
        info = self._info(name, chunk)
        with open(self.folder / info.relative_path, "rb") as stream:
            return _load(stream, info, chunk, "cpu")

    def _info(self, name: str, chunk: Any) -> Any:
        """Where a piece lies: file, offset, length."""
        from torch.distributed.checkpoint.metadata import MetadataIndex

        return self.metadata.storage_data[MetadataIndex(name, chunk.offsets)]

    def in_file(self, name: str) -> tuple[Path, int] | None:
        """The file that has a tensor's bytes one after another, and where they begin in it.

        None if they lie in several pieces, or in another order.

        Raises:
            ValueError: the file is missing or damaged.
        """
        entry = self._entries[name]
        if [tuple(chunk.sizes) for chunk in entry.chunks] != [tuple(entry.size)]:
            return None
        info = self._info(name, entry.chunks[0])
        path = self.folder / info.relative_path
        try:
            with open(path, "rb") as stream:
                place = _place(stream, info, entry)
        except Exception as error:  # damaged files raise anything
            raise self._unreadable(name, error) from None
        return None if place is None else (path, place)

    def _unreadable(self, name: str, error: Exception) -> ValueError:
        reason = " ".join(str(error).split()) or type(error).__name__
        return ValueError(f"{self.folder}: cannot read {name} ({reason[:300]})")

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        return tuple(self._entries[name].size)

    def dtype(self, name: str) -> str:
        """torch's name of a tensor's dtype."""
        return str(self._entries[name].properties.dtype).removeprefix("torch.")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _load(stream: Any, info: Any, chunk: Any, device: str) -> "Tensor":
    """One piece; on the meta device without its bytes."""
    import torch
    from torch.distributed.checkpoint.utils import _create_file_view

    view: Any = _create_file_view(stream, info.offset, info.length)
    piece = torch.load(view, map_location=device, weights_only=True)
    if tuple(piece.shape) != tuple(chunk.sizes):
        raise ValueError(f"a piece has shape {tuple(piece.shape)}, not {tuple(chunk.sizes)}")
    return piece


def _place(stream: Any, info: Any, entry: Any) -> int | None:
    """Where a whole tensor's bytes begin in the file of its only piece, as `in_file` says."""
    record = Record(stream, info.offset, info.length)
    if record.byteorder != sys.byteorder:
        return None
    piece = _load(stream, info, entry.chunks[0], "meta")
    if not piece.is_contiguous() or piece.dtype != entry.properties.dtype:
        return None
    return record.data + int(piece.storage_offset()) * piece.element_size()


def find_checkpoint(path: Path) -> Path:
    """The iteration folder meant by `path`: itself, or the newest complete one of a run.

    A run may be given by its folder or by its checkpoints folder.

    Incomplete checkpoints that are passed over are named on stderr.

    Raises:
        ValueError: nothing complete is there.
    """
    from megatron_lt2.training.checkpoint_files import complete_checkpoints, read_manifest

    if (path / ".metadata").is_file() or (path / "manifest.json").is_file():
        read_manifest(path)
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder")
    complete, incomplete = complete_checkpoints(folder)
    for reason in incomplete:
        print(f"warning: passed over: {reason}", file=sys.stderr)
    if not complete:
        raise ValueError(f"{folder}: no complete checkpoint in this folder")
    return complete[-1]
