"""Walk through a tar of token arrays."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep.shard_reader import has_metadata, tar_index
from data_prep.tars import split_name
from data_prep.walk_rules import Ids, Keys
from megatron_lt2.data.manifest import Manifest, Shard


def walk_tar(shard: Shard, manifest: Manifest, keys: Keys) -> Iterator[str]:
    """Faults of a tar."""
    path = Path(f"{shard.stem}.tar")
    index = tar_index(shard.stem)
    if len(index) != shard.documents:
        yield f"{path}.idx: has {len(index)} documents, the manifest says {shard.documents}"
        return
    wanted = ["npy", "json"] if has_metadata(manifest) else ["npy"]
    check, dtype = Ids(manifest), np.dtype(manifest["dtype"]).newbyteorder("<")
    number, tokens, key, have = -1, 0, None, list(wanted)
    try:
        with tarfile.open(path, "r:") as archive:
            for member in archive:
                archive.members = []  # type: ignore[attr-defined]  # or it would keep millions
                name, extension = split_name(member.name)
                if name != key:
                    if have != wanted:
                        yield f"{path}: sample {key} {_apart(have, wanted)}"
                    if keys.repeats(name):
                        yield f"{path}: the key {name} is out of order or comes twice"
                    key, have = name, []
                have.append(extension)
                reader = archive.extractfile(member)
                data = b"" if reader is None else reader.read()
                if len(data) != member.size:
                    yield f"{path}: cut off in {member.name}"
                    return
                if extension == "npy":
                    number += 1
                    ids = np.frombuffer(data, dtype, offset=_head(data))
                    place = member.offset_data + _head(data)
                    if number >= len(index) or [place, len(ids)] != index[number].tolist():
                        yield f"{path}.idx: document {number} is not where the index says"
                        return
                    fault = check.fault(ids.astype(np.int64), number, np.array([len(ids)]))
                    if fault:
                        yield f"{path}: {fault}"
                    tokens += len(ids)
                elif extension == "json" and json.loads(data)["tokens"] != index[number, 1]:
                    yield f"{path}: {member.name} says another number of tokens"
            if have != wanted:
                yield f"{path}: sample {key} {_apart(have, wanted)}"
    except (tarfile.TarError, ValueError, KeyError) as error:
        yield f"{path}: broken: {error}"
        return
    with path.open("rb") as stream:
        stream.seek(-1024, 2)
        if stream.read() != bytes(1024) or stream.tell() % 512:
            yield f"{path}: has no end of archive"
    if number + 1 != shard.documents or tokens != shard.tokens:
        yield (
            f"{path}: has {number + 1} documents and {tokens} tokens, the manifest says "
            f"{shard.documents} and {shard.tokens}"
        )


def _apart(have: list[str], wanted: list[str]) -> str:
    return f"has {' and '.join(have) or 'nothing'}, not {' and '.join(wanted)} side by side"


def _head(data: bytes) -> int:
    """Length of the head of a .npy file.

    Raises:
        ValueError: it is none.
    """
    if data[:8] != b"\x93NUMPY\x01\x00":
        raise ValueError("a member is no .npy file")
    return 10 + int.from_bytes(data[8:10], "little")
