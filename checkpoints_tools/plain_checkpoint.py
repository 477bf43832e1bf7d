"""Reading a distributed checkpoint as plain tensors in one process, without GPU or model.

A checkpoint folder (megatron-core's torch_dist format) holds global tensors by name however many
ranks wrote them; torch's own reader puts one together from its shards at a time. Only tensors count
here: random states and other pickled objects in the folder are not even listed.
"""

import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class PlainCheckpoint(Mapping[str, "Tensor"]):
    """The tensors of an iteration folder, read from the disk when they are asked for.

    Raises:
        ValueError: the folder is no distributed checkpoint, or its table of contents cannot be
            read.
    """

    def __init__(self, folder: Path) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        class Reader(FileSystemReader):
            """Reads the table of contents once instead of once a tensor."""

            contents: Any = None

            def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
                if self.contents is None:
                    self.contents = super().read_metadata(*args, **kwargs)
                return self.contents

        self.folder = folder
        self._reader = Reader(folder)
        try:
            entries = self._reader.read_metadata().state_dict_metadata
        except OSError as error:
            raise ValueError(f"{folder}: no distributed checkpoint ({error.strerror})") from None
        except Exception as error:  # a damaged pickle raises nearly anything
            raise ValueError(f"{folder}/.metadata: cannot be read ({error})") from None
        self._entries = {
            name: entry
            for name, entry in entries.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> "Tensor":
        import torch
        from torch.distributed.checkpoint import load

        entry = self._entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*load in a single process")
                load({name: tensor}, storage_reader=self._reader, no_dist=True)
        except Exception as error:  # the reader wraps what happens to each file
            reason = " ".join(str(error).split())
            raise ValueError(f"{self.folder}: cannot read {name} ({reason[:300]})") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


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
