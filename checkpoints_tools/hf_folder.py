"""Writing a Hugging Face folder: weights in shards, a temporary name first."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lt2.atomic import fsync_directory, fsync_file

if TYPE_CHECKING:
    from torch import Tensor

MAX_SHARD_BYTES = 4 * 1000**3


@contextmanager
def new_folder(target: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends without an error.

    Raises:
        ValueError: `target` exists and is not empty, and overwriting was not asked for or it is not
            an exported model.
    """
    target = target.absolute()
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ValueError(f"{target}: already exists; name another folder or add --overwrite")
        if not _is_export(target):
            raise ValueError(f"{target}: holds no exported LT2 model, so it is not overwritten")
    elif target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.parent / f".{target.name}.{os.getpid()}.partial"
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.iterdir():
            fsync_file(path)
        fsync_directory(temporary)
        _swap(temporary, target)
        fsync_directory(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _is_export(folder: Path) -> bool:
    try:
        return json.loads((folder / "config.json").read_text())["model_type"] == "lt2"
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _swap(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = target.parent / f".{target.name}.{os.getpid()}.old"
    target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old)


class SafetensorsWriter:
    """Collects tensors; writes a file when the next one would make it larger than `max_bytes`.

    One file is called model.safetensors; several are numbered and come with an index.
    """

    def __init__(self, folder: Path, max_bytes: int = MAX_SHARD_BYTES) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self.files: list[list[str]] = []
        self.total_bytes = 0
        self.parameters = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0

    def add(self, name: str, tensor: "Tensor") -> None:
        """Keep one tensor for the current file."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self.max_bytes:
            self._flush()
        self._pending[name] = tensor
        self._pending_bytes += size
        self.total_bytes += size
        self.parameters += tensor.numel()

    def close(self) -> None:
        """Write what is left, give the files their names, and write the index."""
        if self._pending:
            self._flush()
        count = len(self.files)
        weight_map = {}
        for number, names in enumerate(self.files, start=1):
            final = "model.safetensors"
            if count > 1:
                final = f"model-{number:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        if count > 1:
            index = {
                "metadata": {
                    "total_size": self.total_bytes,
                    "total_parameters": self.parameters,
                },
                "weight_map": weight_map,
            }
            text = json.dumps(index, indent=2) + "\n"
            (self.folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        self.files.append(list(self._pending))
        part = self._part(len(self.files))
        try:
            save_file(self._pending, part, metadata={"format": "pt"})
        except SafetensorError as error:  # a full disk, most often
            raise OSError(f"{part}: cannot be written ({error})") from None
        mask = os.umask(0)
        os.umask(mask)
        part.chmod(0o666 & ~mask)  # safetensors gives its files to the owner alone
        self._pending, self._pending_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self.folder / f"model-part-{number:05d}.safetensors"
