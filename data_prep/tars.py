"""WebDataset tars as input: members that share a name up to its first dot are one sample."""

import tarfile
from collections.abc import Iterator

from data_prep.inputs import InputError, Source
from data_prep.readers import Batch, Batches, Fields

END = bytes(1024)
"""The two empty blocks that close a tar."""


class _Stream:
    """What tarfile reads from; remembers how it ended."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces
        self._ready = b""
        self.tail = b""

    def read(self, size: int) -> bytes:
        """Up to `size` bytes."""
        while not self._ready:
            piece = next(self._pieces, None)
            if piece is None:
                return b""
            self._ready = piece
        data, self._ready = self._ready[:size], self._ready[size:]
        self.tail = (self.tail + data)[-len(END) :]
        return data


def split_name(path: str) -> tuple[str, str]:
    """("dir/name", "ext.en.sion") of a member's path."""
    folder, slash, base = path.rpartition("/")
    stem, _, extension = base.partition(".")
    return folder + slash + stem, extension


def tar_batches(
    source: Source, index: int, pieces: Iterator[bytes], fields: Fields
) -> Iterator[Batch]:
    """One record a sample: its .txt as it is, else its .json.

    Raises:
        InputError: the tar is broken, cut off, holds a sample twice in a row's reach, or a sample
            has no text.
    """
    stream = _Stream(pieces)
    out = Batches(source, index, "json", ids=True)
    key: str | None = None
    members: dict[str, bytes] = {}
    count = 0

    def sample() -> Iterator[Batch]:
        nonlocal count
        if key is None:
            return
        count += 1
        kind = "plain" if "txt" in members else "json"
        if not members.keys() & {"txt", "json"}:
            raise InputError(
                f"{source.path}:{count}: sample {key!r} has neither .txt nor .json "
                f"(it has {', '.join(sorted(members)[:8])})",
                "missing_key",
            )
        if kind != out.kind:
            yield from out.flush()
            out.kind = out.batch.kind = kind
        yield from out.add(members["txt" if kind == "plain" else "json"], key)

    try:
        with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
            for member in archive:
                if not member.isfile():
                    continue
                name, extension = split_name(member.name)
                if name != key:
                    yield from sample()
                    key, members = name, {}
                if extension in members:
                    raise InputError(f"{source.path}: {member.name} comes twice in a row")
                reader = archive.extractfile(member)
                data = b"" if reader is None else reader.read()
                if len(data) != member.size:
                    raise InputError(f"{source.path}: tar file is cut off in {member.name}")
                members[extension] = data
                archive.members = []  # or a stream of millions would keep them all
            yield from sample()
        while stream.read(1 << 16):
            pass
    except tarfile.TarError as error:
        raise InputError(f"{source.path}: broken tar file: {error}") from None
    if stream.tail != END:
        raise InputError(f"{source.path}: tar file is cut off")
    yield from out.flush()
