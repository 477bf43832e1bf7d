"""All shards of one output, in either format, and how they get their names.

Everything is written to NAME.partial beside its target. `publish` renames the partial files, the
manifest last, so a manifest always describes complete files. A run that is killed between two
renames is finished by the next one: its manifest was already on disk.
"""

import json
import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.append_file import partial
from data_prep.indexed_shard import IndexedShard
from data_prep.tar_shard import TarShard
from megatron_lt2.atomic import fsync_directory
from megatron_lt2.data.manifest import (
    FileFacts,
    Manifest,
    ShardFacts,
    manifest_path,
    parse_manifest,
)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """What the shards are."""

    format: str
    """"megatron" or "webdataset"."""
    dtype: str
    shard_bytes: int | None = None
    """Bound of the main file of a shard; None: one shard, named by the prefix alone."""
    metadata: bool = False
    key_prefix: str = ""

    @property
    def numbered(self) -> bool:
        """Whether shards have a number in their names."""
        return self.shard_bytes is not None or self.format == "webdataset"


class Output:
    """Streams documents into shards.

    Args:
        prefix: path without suffix; its folder must exist.
        layout: of the shards.
        states: what `sync` returned at every finished slice of an earlier run.

    Raises:
        ValueError: the partial files are not those of `states`.
        OSError: they cannot be written.
    """

    def __init__(
        self, prefix: str | os.PathLike[str], layout: Layout, states: list[dict[str, Any]]
    ) -> None:
        self.prefix, self.layout = os.fspath(prefix), layout
        self.shards: list[ShardFacts] = [f for state in states for f in state["shards"]]
        self.files: dict[str, FileFacts] = {n: f for s in states for n, f in s["files"].items()}
        self.published = False
        """From here on everything is on the disk, and only names are missing."""
        self._told = len(self.shards)
        self._documents = sum(shard["documents"] for shard in self.shards)
        self._tokens = sum(shard["tokens"] for shard in self.shards)
        last = states[-1] if states else None
        self._remove(after=len(self.shards) if last else -1)
        for name, facts in self.files.items():
            path = partial(Path(self.prefix).with_name(name))
            if not path.exists() or path.stat().st_size != facts["bytes"]:
                raise ValueError(f"{path}: is not what the finished slices wrote")
        self._item = np.dtype(layout.dtype).itemsize
        self._shard_tokens = last["shard_tokens"] if last else 0
        self._shard = self._open(last["sizes"] if last else None)
        if last and self._shard.main.digest() != last["sha256"]:
            self.close()
            raise ValueError(f"{partial(self._shard.main.path)}: changed since it was written")

    @property
    def documents(self) -> int:
        """Documents so far."""
        return self._documents + self._shard.documents

    @property
    def tokens(self) -> int:
        """Tokens so far."""
        return self._tokens + self._shard_tokens

    def _open(self, keep: dict[str, int] | None) -> IndexedShard | TarShard:
        name = self.prefix
        if self.layout.numbered:
            name = f"{name}-{len(self.shards):05d}"
        if self.layout.format == "megatron":
            return IndexedShard(Path(name), self.layout.dtype, self.layout.metadata, keep)
        first, prefix = self._documents, self.layout.key_prefix
        return TarShard(Path(name), self.layout.dtype, first, prefix, keep)

    def add(self, data: bytes, lengths: list[int], metadata: list[bytes] | None) -> None:
        """Append documents.

        Args:
            data: the tokens of all of them, in the dtype of the layout.
            lengths: tokens of each.
            metadata: one line of JSON of each, without its end.
        """
        array = np.asarray(lengths, dtype=np.int64)
        ends = np.cumsum(array) * self._item
        assert not len(array) or ends[-1] == len(data)
        view, start = memoryview(data), 0
        while start < len(array):
            stop = self._fitting(array, metadata, start)
            if stop == start:
                self._roll()
                continue
            first = int(ends[start - 1]) if start else 0
            some = None if metadata is None else metadata[start:stop]
            self._shard.add(view[first : int(ends[stop - 1])], array[start:stop], some)
            self._shard_tokens += int(array[start:stop].sum())
            start = stop

    def _fitting(self, lengths: np.ndarray, metadata: list[bytes] | None, start: int) -> int:
        """How far documents from `start` on fit into the open shard; one does if it is empty."""
        if self.layout.shard_bytes is None:
            return len(lengths)
        room = self.layout.shard_bytes - self._shard.main.size - self._shard.TAIL
        some = None if metadata is None else metadata[start:]
        cost = np.cumsum(self._shard.cost(lengths[start:], some))
        stop = start + int(np.searchsorted(cost, room, side="right"))
        return max(stop, start + (self._shard.documents == 0))

    def _close_shard(self) -> None:
        name = self._shard.main.path.name.removesuffix(self._shard.SUFFIXES[0])
        self.files |= self._shard.finish()
        self.shards.append(
            {"name": name, "documents": self._shard.documents, "tokens": self._shard_tokens}
        )

    def _roll(self) -> None:
        self._close_shard()
        self._documents += self._shard.documents
        self._tokens += self._shard_tokens
        self._shard_tokens = 0
        self._shard = self._open(None)

    def sync(self) -> dict[str, Any]:
        """Bring everything to the disk; what a later run needs to go on from here."""
        closed, self._told = self.shards[self._told :], len(self.shards)
        names = {shard["name"] for shard in closed}
        sizes = self._shard.sync()
        fsync_directory(Path(self.prefix).absolute().parent)
        return {
            "shards": closed,
            "files": {n: f for n, f in self.files.items() if _stem(n) in names} if names else {},
            "sizes": sizes,
            "shard_tokens": self._shard_tokens,
            "sha256": self._shard.main.digest(),
        }

    def finish(self) -> None:
        """Finish the last shard; everything keeps its partial name."""
        self._close_shard()

    def close(self) -> None:
        """Close without a promise."""
        self._shard.close()

    def discard(self) -> None:
        """Remove every partial file."""
        self.close()
        self._remove(after=-1)

    def _remove(self, after: int) -> None:
        """Remove partial files of shards with a greater number; -1: all."""
        path = Path(self.prefix).absolute()
        pattern = re.compile(
            re.escape(path.name)
            + r"(?:-(\d{5,}))?\.(?:bin|idx|docs\.jsonl|tar|tar\.idx|manifest\.json)\.partial"
        )
        for file in list(path.parent.iterdir()):
            found = pattern.fullmatch(file.name)
            if found is None:
                continue
            number = int(found.group(1)) if found.group(1) else 0
            if number > after or (found.group(1) is None) == self.layout.numbered:
                with suppress(OSError):
                    file.unlink()

    def publish(self, manifest: Manifest) -> None:
        """Give the finished files their names, the manifest last."""
        path = manifest_path(self.prefix)
        stale = _stale_files(self.prefix, manifest)
        with open(partial(path), "w", encoding="utf-8") as stream:
            stream.write(json.dumps(manifest, indent=2, ensure_ascii=False) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        fsync_directory(path.absolute().parent)
        # From here on a kill is harmless: the next run finds everything it needs to go on.
        self.published = True
        path.unlink(missing_ok=True)
        for old in stale:
            old.unlink(missing_ok=True)
        _rename_all(self.prefix, manifest)


def _stem(name: str) -> str:
    """Name of the shard that a file belongs to."""
    for suffix in (".bin", ".docs.jsonl", ".tar.idx", ".tar", ".idx"):
        if name.endswith(suffix):
            return name.removesuffix(suffix)
    return name


def _stale_files(prefix: str, manifest: Manifest) -> list[Path]:
    """Files of an output that is replaced, which the new one does not have."""
    with suppress(ValueError):
        before = parse_manifest(manifest_path(prefix))
        folder = manifest_path(prefix).parent
        return [folder / name for name in before["files"] if name not in manifest["files"]]
    return []


def _rename_all(prefix: str, manifest: Manifest) -> None:
    folder = manifest_path(prefix).absolute().parent
    for path in (*(folder / name for name in manifest["files"]), manifest_path(prefix)):
        if path == manifest_path(prefix):
            fsync_directory(folder)  # the manifest must not come before what it describes
        # Absent: renamed before a kill, or by another run that is finishing the same output now.
        with suppress(FileNotFoundError):
            os.replace(partial(path), path)
    fsync_directory(folder)


def finish_interrupted_publish(prefix: str) -> bool:
    """Complete the renames of a run that was killed between them.

    Returns:
        True if there was such a run. What a run left that was killed earlier is not touched.
    """
    path = manifest_path(prefix)
    if path.exists() or not partial(path).exists():
        return False
    try:
        manifest = parse_manifest(partial(path))
    except ValueError:
        return False
    for name, facts in manifest["files"].items():
        data_path = path.with_name(name)
        newest = partial(data_path) if partial(data_path).exists() else data_path
        if not newest.exists() or newest.stat().st_size != facts["bytes"]:
            return False
    _rename_all(prefix, manifest)
    return True
