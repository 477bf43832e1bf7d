"""What is wrong with an output, found by walking through every document of it."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from data_prep.indexed_shard import DTYPE_CODES, HEADER, INDEX_MAGIC, INDEX_VERSION
from data_prep.shard_reader import has_metadata
from data_prep.walk_rules import Ids, Keys
from data_prep.walk_tar import walk_tar
from megatron_lt2.atomic import sha256_file
from megatron_lt2.data.manifest import (
    Manifest,
    Shard,
    manifest_path,
    parse_manifest,
    shards_of,
    token_files,
)

MOST = 20
"""Faults that are reported of one output."""
PIECE_TOKENS = 1 << 22


def faults_of(prefix: str, *, checksums: bool = True) -> tuple[list[str], Manifest]:
    """The first faults of an output, each starting with the file, and its manifest.

    Raises:
        ValueError: there is no manifest, or it cannot be read.
    """
    manifest = parse_manifest(manifest_path(prefix))
    return list(islice(_faults(prefix, manifest, checksums), MOST)), manifest


def _faults(prefix: str, manifest: Manifest, checksums: bool) -> Iterator[str]:
    missing = False
    for path, facts in token_files(prefix, manifest).items():
        if not path.is_file():
            missing = True
            yield f"{path}: missing, though {manifest_path(prefix).name} describes it"
            continue
        size = path.stat().st_size
        if size != facts["bytes"]:
            yield f"{path}: has {size} bytes, the manifest says {facts['bytes']}"
        elif checksums and sha256_file(path) != facts["sha256"]:
            yield f"{path}: its checksum is not that of the manifest"
    if missing:
        return
    yield from _count_faults(prefix, manifest)
    walk = _walk_indexed if manifest["format"] == "megatron" else walk_tar
    keys = Keys()
    for shard in shards_of(prefix, manifest):
        yield from walk(shard, manifest, keys)


def _count_faults(prefix: str, manifest: Manifest) -> Iterator[str]:
    path, shards = manifest_path(prefix), shards_of(prefix, manifest)
    for name, total in (
        ("documents", sum(shard.documents for shard in shards)),
        ("tokens", sum(shard.tokens for shard in shards)),
    ):
        if manifest[name] != total:  # type: ignore[literal-required]
            yield f"{path}: says {manifest[name]} {name}, its shards have {total}"  # type: ignore[literal-required]
    of_inputs = sum(entry["documents"] for entry in manifest["inputs"])
    if of_inputs != manifest["documents"]:
        yield f"{path}: says {manifest['documents']} documents, its inputs gave {of_inputs}"


def _walk_indexed(shard: Shard, manifest: Manifest, keys: Keys) -> Iterator[str]:
    """Faults of a pair."""
    index, data = Path(f"{shard.stem}.idx"), Path(f"{shard.stem}.bin")
    count, dtype = shard.documents, np.dtype(manifest["dtype"]).newbyteorder("<")
    size = data.stat().st_size
    with index.open("rb") as stream:
        raw = stream.read(HEADER.size)
        header = HEADER.unpack(raw) if len(raw) == HEADER.size else None
        expected = (
            *(INDEX_MAGIC, INDEX_VERSION, DTYPE_CODES[manifest["dtype"]]),
            *(count, count + 1),
        )
        if header != expected:
            yield f"{index}: its header says {header}, not {expected}"
            return
        if index.stat().st_size != HEADER.size + 4 * count + 8 * count + 8 * (count + 1):
            yield f"{index}: has {index.stat().st_size} bytes, not those of {count} documents"
            return
    lengths = np.memmap(index, "<i4", "r", HEADER.size, (count,)) if count else np.empty(0, "<i4")
    empty = np.empty(0, "<i8")
    offsets = np.memmap(index, "<i8", "r", HEADER.size + 4 * count, (count,)) if count else empty
    borders = np.memmap(index, "<i8", "r", HEADER.size + 12 * count, (count + 1,))
    tokens, begins, check, number = 0, 0, Ids(manifest), 0
    with data.open("rb") as stream:
        while number < count:
            stop = min(count, number + (1 << 16))
            some = np.asarray(lengths[number:stop], dtype=np.int64)
            if (some < 0).any():
                yield f"{index}: document {number + int((some < 0).argmax())} has a negative length"
                return
            # As many documents as fit into a piece, and at least one.
            fitting = int(np.searchsorted(np.cumsum(some), PIECE_TOKENS, side="right"))
            stop = number + max(1, min(fitting, len(some)))
            some = some[: stop - number]
            starts = begins + np.concatenate(([0], np.cumsum(some[:-1]))) * dtype.itemsize
            wrong = starts != offsets[number:stop]
            if wrong.any():
                document = number + int(wrong.argmax())
                yield (
                    f"{index}: document {document} begins at byte {offsets[document]}, "
                    f"not at {starts[document - number]}"
                )
                return
            if (borders[number:stop] != np.arange(number, stop)).any():
                yield f"{index}: the list of documents is not 0, 1, 2, ... near {number}"
            ends = starts + some * dtype.itemsize
            if ends[-1] > size:
                document = number + int((ends > size).argmax())
                yield f"{data}: ends at byte {size}, inside document {document}"
                return
            ids = np.frombuffer(stream.read(int(some.sum()) * dtype.itemsize), dtype)
            fault = check.fault(ids.astype(np.int64), number, some)
            if fault:
                yield f"{data}: {fault}"
            tokens += int(some.sum())
            begins, number = int(ends[-1]), stop
    if borders[count] != count:
        yield f"{index}: the list of documents ends with {borders[count]}, not {count}"
    if begins != size:
        yield f"{data}: has {size - begins} bytes behind the last document"
    if tokens != shard.tokens:
        yield f"{data}: has {tokens} tokens, the manifest says {shard.tokens}"
    if has_metadata(manifest):
        yield from _sidecar_faults(Path(f"{shard.stem}.docs.jsonl"), lengths)


def _sidecar_faults(path: Path, lengths: np.ndarray) -> Iterator[str]:
    number = 0
    with path.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                said = json.loads(line)["tokens"]
            except (ValueError, KeyError, TypeError):
                yield f"{path}:{number}: is not what describes a document"
                return
            if number > len(lengths) or said != lengths[number - 1]:
                yield f"{path}:{number}: says {said} tokens, the index does not"
                return
    if number != len(lengths):
        yield f"{path}: describes {number} documents, there are {len(lengths)}"
