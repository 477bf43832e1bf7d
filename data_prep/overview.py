"""Token files for the eye: counts, lengths, tokens of each source, documents as text."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.indexed_shard import shard_lengths
from data_prep.shard_reader import tar_index
from megatron_lt2.data.manifest import Manifest, Shard, read_manifest, shards_of
from megatron_lt2.data.tokenizer import load_tokenizer

BAR = 40
"""Characters of the longest bar."""
MOST_SOURCES = 30


def lengths_of(prefix: str, manifest: Manifest) -> np.ndarray:
    """Tokens of each document, int64 [documents]."""
    found = [_lengths(shard, manifest) for shard in shards_of(prefix, manifest)]
    return np.concatenate(found) if found else np.empty(0, np.int64)


def _lengths(shard: Shard, manifest: Manifest) -> np.ndarray:
    if manifest["format"] == "megatron":
        return shard_lengths(shard.stem, shard.documents).astype(np.int64)
    return tar_index(shard.stem)[:, 1]


def tokens_of_sources(manifest: Manifest, lengths: np.ndarray) -> list[tuple[str, int, int]]:
    """(input, documents, tokens) of each; documents keep the order of the inputs."""
    counts = [entry["documents"] for entry in manifest["inputs"]]
    ends = np.concatenate(([0], np.cumsum(lengths)))
    borders = np.concatenate(([0], np.cumsum(counts)))
    return [
        (entry["path"], stop - start, int(ends[stop] - ends[start]))
        for entry, (start, stop) in zip(manifest["inputs"], pairwise(borders.tolist()), strict=True)
    ]


def histogram(lengths: np.ndarray) -> list[tuple[int, int, int, int]]:
    """(from, below, documents, tokens) by powers of two."""
    rows = []
    exponents = np.frexp(lengths)[1] - 1
    for exponent in range(int(exponents.min()), int(exponents.max()) + 1):
        chosen = lengths[exponents == exponent]
        rows.append((1 << exponent, 2 << exponent, len(chosen), int(chosen.sum())))
    return rows


def report(prefix: str) -> None:
    """Print counts, sources and the histogram."""
    manifest = read_manifest(prefix)
    lengths = lengths_of(prefix, manifest)
    tokenizer = manifest["tokenizer"]
    print(
        f"{prefix}: {manifest['format']}, {manifest['documents']:,} documents, "
        f"{manifest['tokens']:,} tokens as {manifest['dtype']} in "
        f"{len(shards_of(prefix, manifest))} shards\n"
        f"tokenizer {tokenizer['path']} ({tokenizer['vocab_size']:,} ids), EOS "
        f"{tokenizer['eos_token']} {'behind each' if manifest['append_eod'] else 'not written'}\n"
        f"lengths: least {lengths.min():,}, median {int(np.median(lengths)):,}, mean "
        f"{lengths.mean():,.0f}, most {lengths.max():,} tokens"
    )
    sources = tokens_of_sources(manifest, lengths)
    print(f"\n{'tokens':>15} {'share':>6} {'documents':>11}  source")
    for path, documents, tokens in sources[:MOST_SOURCES]:
        print(f"{tokens:15,} {tokens / manifest['tokens']:6.1%} {documents:11,}  {path}")
    if len(sources) > MOST_SOURCES:
        print(f"{'':15} {'':6} {'':11}  and {len(sources) - MOST_SOURCES} more")
    print(f"\n{'tokens':>20} {'documents':>11} {'of all tokens':>13}")
    rows = histogram(lengths)
    most = max(row[2] for row in rows)
    for low, high, documents, tokens in rows:
        bar = "#" * -(-BAR * documents // most)
        span = f"{low:,} to {high - 1:,}"
        print(f"{span:>20} {documents:11,} {tokens / manifest['tokens']:13.1%}  {bar}")
    for kind, count in _notes(manifest).items():
        print(f"{kind}: {count}")


def _notes(manifest: Manifest) -> dict[str, int]:
    total: dict[str, int] = {}
    for entry in manifest["inputs"]:
        for kind, count in entry.get("notes", {}).items():
            total[kind] = total.get(kind, 0) + count
    return total


def document(prefix: str, manifest: Manifest, number: int) -> np.ndarray:
    """The ids of one document.

    Raises:
        ValueError: there is no such document.
    """
    if not 0 <= number < manifest["documents"]:
        raise ValueError(
            f"--first: {prefix} has documents 0 to {manifest['documents'] - 1}, not {number}"
        )
    dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
    for shard in shards_of(prefix, manifest):
        if number >= shard.documents:
            number -= shard.documents
            continue
        lengths = _lengths(shard, manifest)
        if manifest["format"] == "megatron":
            start, file = int(lengths[:number].sum()) * dtype.itemsize, f"{shard.stem}.bin"
        else:
            start, file = int(tar_index(shard.stem)[number, 0]), f"{shard.stem}.tar"
        return np.fromfile(file, dtype, count=int(lengths[number]), offset=start)
    raise AssertionError("counts were checked")


def show(
    prefix: str,
    *,
    tokenizer: str | None,
    first: int,
    count: int,
    characters: int,
    pieces: bool,
) -> None:
    """Print documents as text, with their borders."""
    if count < 1:
        return
    manifest = read_manifest(prefix)
    loaded = load_tokenizer(tokenizer or manifest["tokenizer"]["path"])
    if loaded.sha256 != manifest["tokenizer"]["sha256"]:
        raise ValueError(f"{loaded.path}: is not the tokenizer that made {prefix}")
    for number in range(first, min(first + count, manifest["documents"]) if first >= 0 else 1):
        ids = document(prefix, manifest, number).tolist()
        print(f"\n----- document {number}: {len(ids)} tokens -----")
        if pieces:
            text = "|".join(loaded.decode([token]) for token in ids[:characters])
        else:
            text = loaded.decode(ids[: 8 * characters])
        print(text if len(text) <= characters else f"{text[:characters]} [...]")
    if first >= manifest["documents"] or first < 0:
        document(prefix, manifest, first)


def draw(prefix: str, file: str) -> None:
    """A figure: documents and tokens by length, and tokens of each source.

    Raises:
        ValueError: matplotlib is missing.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError:
        raise ValueError("--plot needs the package matplotlib: pip install matplotlib") from None
    manifest = read_manifest(prefix)
    lengths = lengths_of(prefix, manifest)
    sources = sorted(tokens_of_sources(manifest, lengths), key=lambda row: -row[2])[:12]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
    rows = histogram(lengths)
    _bars(left, rows)
    right.barh([_short(path) for path, _, _ in sources], [row[2] for row in sources])
    right.invert_yaxis()
    right.set_xlabel("tokens")
    right.set_title("largest sources")
    figure.suptitle(
        f"{Path(prefix).name}: {manifest['documents']:,} documents, {manifest['tokens']:,} tokens"
    )
    figure.savefig(file, dpi=120)
    plt.close(figure)
    print(f"wrote {file}")


def _bars(axes: Any, rows: list[tuple[int, int, int, int]]) -> None:
    places = np.arange(len(rows))
    documents, tokens = (np.array([row[i] for row in rows], float) for i in (2, 3))
    axes.bar(places - 0.2, documents / documents.sum(), 0.4, label="documents")
    axes.bar(places + 0.2, tokens / tokens.sum(), 0.4, label="tokens")
    axes.set_xticks(places, [f"{row[0]:,}" for row in rows], rotation=60)
    axes.set_xlabel("tokens of a document, from")
    axes.set_ylabel("share")
    axes.set_title("lengths")
    axes.legend()


def _short(path: str) -> str:
    return Path(path).name[-32:]
