"""Which files go in: names, glob patterns, lists of them, and data sets of the `datasets` package.

The kind of a file is decided by its suffix alone.
"""

import glob
import importlib.util
import os
from collections.abc import Iterable
from dataclasses import dataclass

JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst", ".xz")
SUFFIXES = (
    ".jsonl, .ndjson, .json (one object a line; a .json may also be one array), .txt, .tar "
    "(WebDataset), each also .gz, .zst or .xz, and .parquet"
)

HUB = "hf:"
"""How an input starts that the `datasets` package reads."""


class InputError(ValueError):
    """A fault in an input; the message starts with FILE: or FILE:LINE:.

    Args:
        message: one line.
        kind: under what it is counted where faults are skipped, as in `records.FAULTS`.
    """

    def __init__(self, message: str, kind: str = "broken_file") -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Source:
    """One input file and what is learned about it while it is read."""

    path: str
    kind: str
    """"json", "text", "parquet", "tar" or "hub"."""
    compression: str
    """"gz", "zst", "xz" or ""."""
    size: int
    mtime_ns: int
    bytes_read: int = 0
    sha256: str = ""
    """Known after the last batch; of a data set that is no file, over its records."""
    span: tuple[int, int] | None = None
    """First and last byte + 1 of the lines that are read; None: the whole file."""

    @property
    def to_read(self) -> int:
        """Bytes that are read."""
        return self.span[1] - self.span[0] if self.span else self.size


def find_inputs(patterns: Iterable[str]) -> list[Source]:
    """Files behind names, glob patterns and @LISTS, in the order given, each pattern sorted.

    Raises:
        InputError: nothing matches, a file is missing, unreadable, a folder, of an unknown kind,
            or named twice.
    """
    sources = [_describe(path) for pattern in _expanded(patterns) for path in _paths(pattern)]
    if not sources:
        raise InputError("--input: no file given")
    seen: set[str] = set()
    for source in sources:
        if source.path in seen:
            raise InputError(f"{source.path}: given twice")
        seen.add(source.path)
    return sources


def _expanded(patterns: Iterable[str]) -> Iterable[str]:
    """The patterns, with @LIST replaced by the lines of that file."""
    for pattern in patterns:
        if not pattern.startswith("@"):
            yield pattern
            continue
        name = os.path.expanduser(pattern[1:])
        try:
            with open(name, encoding="utf-8") as stream:
                lines = [line.strip() for line in stream]
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
            raise InputError(f"{name}: the list cannot be read: {reason}") from None
        names = [line for line in lines if line and not line.startswith("#")]
        if not names:
            raise InputError(f"{name}: the list names no file")
        yield from names


def _paths(pattern: str) -> list[str]:
    if pattern.startswith(HUB):
        return [pattern]
    expanded = os.path.expanduser(pattern)
    if not os.path.lexists(expanded) and glob.has_magic(expanded):
        matches = sorted(glob.glob(expanded, recursive=True))
        if not matches:
            raise InputError(f"{pattern}: no file matches")
        return [os.path.abspath(match) for match in matches]
    return [os.path.abspath(expanded)]


def _describe(path: str) -> Source:
    if path.startswith(HUB):
        if not path.removeprefix(HUB).split("@")[0]:
            raise InputError(f"{path}: names no data set; write hf:NAME or hf:NAME@SPLIT")
        _require(path, "datasets")
        return Source(path, "hub", "", 0, 0)
    if os.path.isdir(path):
        raise InputError(f"{path}: is a folder; name files or a pattern such as '{path}/*.jsonl'")
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from None
    kind, compression = _kind_of(path)
    if kind == "parquet":
        _require(path, "pyarrow")
    if compression == "zst":
        _require(path, "zstandard")
    return Source(path, kind, compression, status.st_size, status.st_mtime_ns)


def _kind_of(path: str) -> tuple[str, str]:
    base, compression = path, ""
    for suffix in COMPRESSED:
        if path.endswith(suffix):
            base, compression = path.removesuffix(suffix), suffix[1:]
    for kind, suffixes in {"json": JSON_LINES, "text": (".txt",), "tar": (".tar",)}.items():
        if base.endswith(suffixes):
            return kind, compression
    if base.endswith(".tgz"):
        return "tar", "gz"
    if base.endswith(".parquet") and not compression:
        return "parquet", ""
    raise InputError(f"{path}: unknown kind of file; known suffixes: {SUFFIXES}")


def _require(path: str, package: str) -> None:
    """Find out before any work that a reader's library is missing."""
    if importlib.util.find_spec(package) is None:
        raise InputError(f"{path}: reading it needs the package {package}: pip install {package}")
