"""The manifest beside token files: PREFIX.bin and PREFIX.idx, or numbered shards of either format.

It is written last, so it is what makes the pair exist, and it carries what the files themselves
cannot: which tokenizer made the ids, whether an EOS ends each document, sizes and checksums.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NotRequired, TypedDict

from megatron_lt2.atomic import sha256_file

if TYPE_CHECKING:
    from megatron_lt2.data.tokenizer import Tokenizer

FORMAT = "megatron"
FORMATS = (FORMAT, "webdataset")
VERSION = 1


class TokenizerFacts(TypedDict):
    """The tokenizer that made the ids."""

    path: str
    sha256: str
    vocab_size: int
    eos_id: int
    eos_token: str
    bos_id: int | None


class FileFacts(TypedDict):
    """Size in bytes and checksum of one token file."""

    bytes: int
    sha256: str


class InputFacts(TypedDict):
    """One text file that went in, and what came of it."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str
    """Of what was read; empty where pieces of a file were merged, see `pieces`."""
    documents: int
    skipped_empty: int
    notes: NotRequired[dict[str, int]]
    """How much was left out, changed or unusual, by kind; see data_prep/records.py."""
    span: NotRequired[list[int]]
    """First and last byte + 1 of what was read, where that is a piece of the file."""
    pieces: NotRequired[list["PieceFacts"]]
    """What it was merged of."""


class PieceFacts(TypedDict):
    """A piece of a text file, which one of many jobs read."""

    span: list[int]
    sha256: str


class ShardFacts(TypedDict):
    """One of the numbered shards of an output, in their order."""

    name: str
    """Of its files, without folder and suffix."""
    documents: int
    tokens: int


class Options(TypedDict):
    """What else was asked for, beside tokenizer, text key and EOS."""

    prepend_bos: bool
    id_key: str | None
    metadata: bool
    min_chars: int
    max_chars: int | None
    shard_bytes: int | None
    on_error: str
    part: list[int]


class Manifest(TypedDict):
    """Contents of PREFIX.manifest.json."""

    format: str
    version: int
    dtype: str
    documents: int
    tokens: int
    append_eod: bool
    text_key: NotRequired[str]
    options: NotRequired[Options]
    shards: NotRequired[list[ShardFacts]]
    """Absent for a single pair that has the name of the prefix."""
    tokenizer: TokenizerFacts
    files: dict[str, FileFacts]
    inputs: list[InputFacts]
    command: list[str]
    lt2_version: str


def manifest_path(prefix: str | os.PathLike[str]) -> Path:
    """Where the manifest of PREFIX lies."""
    return Path(f"{os.fspath(prefix)}.manifest.json")


def data_paths(prefix: str | os.PathLike[str]) -> tuple[Path, Path]:
    """(PREFIX.bin, PREFIX.idx)."""
    return Path(f"{os.fspath(prefix)}.bin"), Path(f"{os.fspath(prefix)}.idx")


def tokenizer_facts(tokenizer: "Tokenizer") -> TokenizerFacts:
    """What a manifest says about a tokenizer."""
    return {
        "path": tokenizer.path,
        "sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "eos_token": tokenizer.eos_token,
        "bos_id": tokenizer.bos_id,
    }


def parse_manifest(path: Path) -> Manifest:
    """Read a manifest file by itself, without looking at the files it describes.

    Raises:
        ValueError: one line that starts with the file: missing, not JSON, another format or
            version, or a field is absent.
    """
    try:
        value: Any = json.loads(path.read_bytes().decode("utf-8"))
    except FileNotFoundError:
        raise ValueError(
            f"{path}: no such manifest; data_prep/tokenize.py writes it with the token files"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from None
    if not isinstance(value, dict) or value.get("format") not in FORMATS:
        known = " or ".join(f'"{name}"' for name in FORMATS)
        raise ValueError(f'{path}: not a manifest of token files ("format" is not {known})')
    if value.get("version") != VERSION:
        raise ValueError(
            f"{path}: version {value.get('version')!r}, this code reads version {VERSION}"
        )
    missing = sorted(Manifest.__required_keys__ - value.keys())
    if missing:
        raise ValueError(f"{path}: lacks {', '.join(missing)}")
    lacking = sorted(TokenizerFacts.__required_keys__ - value["tokenizer"].keys())
    if lacking:
        raise ValueError(f"{path}: its tokenizer entry lacks {', '.join(lacking)}")
    return value  # type: ignore[return-value]


def read_manifest(prefix: str | os.PathLike[str], *, checksums: bool = False) -> Manifest:
    """Read PREFIX.manifest.json and check the token files beside it.

    Args:
        prefix: path without suffix.
        checksums: also read both files and compare their SHA-256 (slow for large data).

    Raises:
        ValueError: one line that starts with the file at fault: no manifest, a file is missing,
            its size (or checksum) is not what the manifest says.
    """
    path = manifest_path(prefix)
    manifest = parse_manifest(path)
    for data_path, facts in token_files(prefix, manifest).items():
        if not data_path.is_file():
            raise ValueError(f"{data_path}: missing, though {path.name} describes it")
        size = data_path.stat().st_size
        if size != facts["bytes"]:
            raise ValueError(
                f"{data_path}: has {size} bytes, {path.name} says {facts['bytes']}; "
                "tokenize again with --overwrite"
            )
        if checksums and sha256_file(data_path) != facts["sha256"]:
            raise ValueError(f"{data_path}: checksum differs from the one in {path.name}")
    return manifest


def token_files(prefix: str | os.PathLike[str], manifest: Manifest) -> dict[Path, FileFacts]:
    """Every file that a manifest describes, where it lies now.

    Raises:
        ValueError: the manifest does not describe PREFIX.bin or .idx of a single pair.
    """
    path = manifest_path(prefix)
    if "shards" in manifest:
        return {path.with_name(name): facts for name, facts in manifest["files"].items()}
    suffixes = {suffix for name in manifest["files"] if (suffix := _suffix(name))}
    paths = [*data_paths(prefix)]
    paths += [Path(f"{os.fspath(prefix)}{suffix}") for suffix in sorted(suffixes)]
    return {data_path: _facts_of(manifest, data_path, path) for data_path in paths}


def _suffix(name: str) -> str:
    """The suffix of a file that not every pair has."""
    return ".docs.jsonl" if name.endswith(".docs.jsonl") else ""


class Shard(NamedTuple):
    """One shard of an output and where it lies."""

    stem: str
    """Path of its files without suffix."""
    documents: int
    tokens: int


def shards_of(prefix: str | os.PathLike[str], manifest: Manifest) -> list[Shard]:
    """The shards of an output in their order; a single pair is one shard."""
    if "shards" not in manifest:
        return [Shard(os.fspath(prefix), manifest["documents"], manifest["tokens"])]
    folder = manifest_path(prefix).parent
    return [
        Shard(str(folder / facts["name"]), facts["documents"], facts["tokens"])
        for facts in manifest["shards"]
    ]


def _facts_of(manifest: Manifest, data_path: Path, path: Path) -> FileFacts:
    """The entry of a token file; a pair that was renamed together keeps its old names inside."""
    files = manifest["files"]
    if data_path.name in files:
        return files[data_path.name]
    same_suffix = [facts for name, facts in files.items() if name.endswith(data_path.suffix)]
    if len(same_suffix) != 1:
        raise ValueError(f"{path}: says nothing about {data_path.name}")
    return same_suffix[0]


def check_same_tokenizer(
    prefixes: Iterable[str | os.PathLike[str]], tokenizer: "Tokenizer"
) -> list[Manifest]:
    """Check that every token file was made with `tokenizer`; returns their manifests.

    Raises:
        ValueError: one line that names the manifest of the first file that was not.
    """
    manifests = []
    for prefix in prefixes:
        manifest = read_manifest(prefix)
        facts = manifest["tokenizer"]
        if facts["sha256"] != tokenizer.sha256:
            raise ValueError(
                f"{manifest_path(prefix)}: these tokens were made with another tokenizer "
                f"({facts['path']}, sha256 {facts['sha256'][:12]}) than {tokenizer.path} "
                f"(sha256 {tokenizer.sha256[:12]}); tokenize again or name that tokenizer"
            )
        if facts["eos_id"] != tokenizer.eos_id:
            raise ValueError(
                f"{manifest_path(prefix)}: its documents end with token {facts['eos_id']} "
                f"({facts['eos_token']}), but the EOS of {tokenizer.path} is {tokenizer.eos_id} "
                f"({tokenizer.eos_token})"
            )
        manifests.append(manifest)
    return manifests
