"""The standard library as documents: modules with their docstrings, and pydoc's help topics.

Left out: installed packages, tests, idlelib, tables of character sets (numbers, not text) and the
file of build settings, which names folders of the machine. Documents are ordered by a hash of their
name: a split at any point then has modules and topics of every kind on both sides, and the order
needs no random generator.
"""

import hashlib
import json
import os
import platform
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from megatron_lt2.atomic import sha256_file, write_bytes_atomic

FILE_NAME = "corpus.jsonl"

SKIPPED_FOLDERS = frozenset(
    ["site-packages", "dist-packages", "test", "tests", "idle_test", "idlelib", "encodings"]
    + ["__pycache__", "pydoc_data"]
)


def _modules(library: Path) -> Iterator[tuple[str, str]]:
    """(name, source) of each module; the few that are not text in any known encoding are left."""
    for folder, folders, files in os.walk(library):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS)
        for name in sorted(files):
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            path = Path(folder, name)
            try:
                with tokenize.open(path) as stream:
                    text = stream.read()
            except (SyntaxError, UnicodeDecodeError):
                continue
            yield path.relative_to(library).as_posix(), text


def _topics() -> Iterator[tuple[str, str]]:
    """(name, text) of each of pydoc's help topics; none where a Python comes without them."""
    try:
        from pydoc_data.topics import topics
    except ImportError:
        return
    for name, text in topics.items():
        yield f"topic:{name}", text


def documents() -> list[tuple[str, str]]:
    """(source, text) of every non-empty document, in corpus order.

    Raises:
        ValueError: the standard library is not there as source files.
    """
    library = Path(sysconfig.get_path("stdlib"))
    found = [*_modules(library), *_topics()]
    if not any(name.endswith(".py") for name, _ in found):
        raise ValueError(f"{library}: this Python carries no source of its standard library")
    found = [(name, text) for name, text in found if text.strip()]
    return sorted(found, key=lambda item: hashlib.sha256(item[0].encode()).digest())


def write_corpus(output: str, *, max_bytes: int) -> Path:
    """Write `output`/corpus.jsonl, with the documents that fit into `max_bytes`; the file.

    A file that already has these very bytes is left alone, so that what was built from it stays
    up to date.

    Raises:
        ValueError: no document fits `max_bytes`, or there is no source to read.
    """
    lines: list[bytes] = []
    size = 0
    everything = documents()
    for source, text in everything:
        line = json.dumps({"text": text, "source": source}, ensure_ascii=False) + "\n"
        try:
            data = line.encode("utf-8")
        except UnicodeEncodeError:  # a lone surrogate in a source file
            continue
        if size + len(data) > max_bytes:
            continue
        lines.append(data)
        size += len(data)
    if not lines:
        raise ValueError(f"--max-mb: {max_bytes / 1e6} leaves no room for a document")
    folder = Path(os.path.abspath(os.path.expanduser(output)))
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE_NAME
    data = b"".join(lines)
    unchanged = path.exists() and sha256_file(path) == hashlib.sha256(data).hexdigest()
    if not unchanged:
        write_bytes_atomic(path, data)
    print(
        f"{'unchanged' if unchanged else 'wrote'} {path}: {len(lines)} of {len(everything)} "
        f"documents, {size / 1e6:.1f} MB, from the standard library of Python "
        f"{platform.python_version()}"
    )
    return path
