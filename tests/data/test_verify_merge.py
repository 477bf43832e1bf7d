"""verify finds every kind of damage; merge writes the bytes of one process; inspect shows it."""

import io
import json
import shutil
import tarfile

import numpy as np
import pytest

from data_prep import inspect, merge, verify
from data_prep.build import tokenize_files
from data_prep.indexed_shard import HEADER
from megatron_lt2.atomic import sha256_file
from megatron_lt2.data.manifest import manifest_path, read_manifest
from tests.unit.tiny_text import TEXTS, request, write_jsonl, write_tokenizer

LAYOUTS = {
    "pair": {},
    "pairs": {"shard_bytes": 900, "metadata": True},
    "tars": {"format": "webdataset", "shard_bytes": 60_000},
    "tars with metadata": {"format": "webdataset", "shard_bytes": 80_000, "metadata": True},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return [
        write_jsonl(folder / f"{n}.jsonl", [f"{n} {text}" for text in TEXTS * (1 + n % 3)] + [""])
        for n in range(5)
    ]


def contents(folder, stem):
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.name.startswith(stem) and path.is_file() and "manifest" not in path.name
    }


@pytest.mark.parametrize("layout", LAYOUTS)
def test_merged_slices_are_the_whole(sources, tokenizer, tmp_path, layout, capsys):
    options = LAYOUTS[layout]
    tokenize_files(request(sources, tokenizer, tmp_path / "whole" / "out", **options))
    (tmp_path / "parts").mkdir()
    for number in range(3):
        prefix = tmp_path / "parts" / f"{number:04d}"
        tokenize_files(request(sources, tokenizer, prefix, part=(number, 3), **options))
        assert verify.main([str(prefix)]) == 0
    out = tmp_path / "merged" / "out"
    assert merge.main(["--output", str(out), "--parts", str(tmp_path / "parts")]) == 0
    assert contents(out.parent, "out") == contents(tmp_path / "whole", "out")
    assert verify.main([str(out)]) == 0
    merged, whole = read_manifest(out, checksums=True), read_manifest(tmp_path / "whole" / "out")
    assert {**merged, "command": 0} == {**whole, "command": 0}
    if "format" in options:
        keys = keys_of(tmp_path / "parts")
        assert len(keys) == len(set(keys)) and keys[0].startswith("0000_")


def keys_of(folder):
    """Keys of all samples of all tars, parts included."""
    names = []
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as archive:
            names += archive.getnames()
    return list(dict.fromkeys(name.split(".")[0] for name in names)) + [
        name for name in names if names.count(name) > 1
    ]


def test_the_last_slice_may_not_be_missing(sources, tokenizer, tmp_path, capsys):
    for number in range(2):
        prefix = tmp_path / "parts" / f"{number:04d}"
        tokenize_files(request(sources, tokenizer, prefix, part=(number, 3)))
    words = ["--output", str(tmp_path / "out"), "--parts", str(tmp_path / "parts")]
    assert merge.main(words) == 2
    assert "part 0002 is missing (2 of 3 are there)" in capsys.readouterr().err
    tokenize_files(
        request(sources, tokenizer, tmp_path / "parts/0002", part=(2, 3), append_eod=False)
    )
    assert merge.main(words) == 2
    assert "its append_eod is not that of" in capsys.readouterr().err


@pytest.mark.parametrize("layout", ["pairs", "tars"])
def test_shards_are_bounded(sources, tokenizer, tmp_path, layout):
    options = LAYOUTS[layout]
    tokenize_files(request(sources, tokenizer, tmp_path / "out", **options))
    manifest = read_manifest(tmp_path / "out")
    sizes = [
        facts["bytes"] for name, facts in manifest["files"].items() if name.endswith(("bin", "tar"))
    ]
    assert len(sizes) >= 2 and max(sizes) <= options["shard_bytes"]
    assert sum(shard["tokens"] for shard in manifest["shards"]) == manifest["tokens"]
    big = tmp_path / "big"
    tokenize_files(request(sources, tokenizer, big, **{**options, "shard_bytes": 1}))
    assert len(read_manifest(big)["shards"]) == manifest["documents"]


@pytest.fixture
def made(request, sources, tokenizer, tmp_path):
    return make(sources, tokenizer, tmp_path, request.param)


def make(sources, tokenizer, folder, layout):
    prefix = folder / "out"
    tokenize_files(request(sources, tokenizer, prefix, **LAYOUTS[layout]))
    return prefix


def refresh(prefix):
    """Make the manifest agree with sizes and checksums, so that only the walk can find a fault."""
    manifest = json.loads(manifest_path(prefix).read_text())
    for name in manifest["files"]:
        path = prefix.with_name(name)
        manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
    manifest_path(prefix).write_text(json.dumps(manifest))


def edit(path, place, data):
    whole = bytearray(path.read_bytes())
    whole[place : place + len(data)] = data
    path.write_bytes(whole)


def u16(*values):
    return np.array(values, "<u2").tobytes()


def i64(value):
    return np.array([value], "<i8").tobytes()


def swap_ends(path):
    """Exchange the last tokens of the first two documents' places: sizes stay, the EOS moves."""
    data = np.frombuffer(path.read_bytes(), "<u2").copy()
    place = int(np.flatnonzero(data == 0)[0])
    data[place], data[place - 1] = data[place - 1], data[place]
    path.write_bytes(data.tobytes())


PAIR_FAULTS = {
    "one byte short": ("bin", lambda p, n: p.write_bytes(p.read_bytes()[:-1]), "ends at byte"),
    "extra bytes": ("bin", lambda p, n: p.write_bytes(p.read_bytes() + b"ab"), "2 bytes behind"),
    "id too large": ("bin", lambda p, n: edit(p, 0, u16(350)), "document 0: id 350 is outside"),
    "EOS missing": ("bin", lambda p, n: swap_ends(p), "document 0: does not end with EOS"),
    "index cut": ("idx", lambda p, n: p.write_bytes(p.read_bytes()[:-8]), "not those of"),
    "wrong header": ("idx", lambda p, n: edit(p, 0, b"X"), "its header says"),
    "pointer overflow": (
        "idx",
        lambda p, n: edit(p, HEADER.size + 4 * n + 8, i64(1 << 40)),
        "document 1 begins at byte 1099511627776",
    ),
    "length overflow": (
        "idx",
        lambda p, n: edit(p, HEADER.size + 4 * (n - 1), np.array([1 << 30], "<i4").tobytes()),
        "inside document",
    ),
    "negative length": (
        "idx",
        lambda p, n: edit(p, HEADER.size, np.array([-1], "<i4").tobytes()),
        "negative length",
    ),
    "documents": (
        "idx",
        lambda p, n: edit(p, HEADER.size + 12 * n + 8, i64(5)),
        "is not 0, 1, 2",
    ),
}


@pytest.mark.parametrize("fault", PAIR_FAULTS)
def test_damaged_pairs(sources, tokenizer, tmp_path, capsys, fault):
    prefix = make(sources, tokenizer, tmp_path, "pair")
    assert verify.main([str(prefix)]) == 0
    suffix, damage, words = PAIR_FAULTS[fault]
    path = tmp_path / f"out.{suffix}"
    damage(path, read_manifest(prefix)["documents"])
    assert verify.main([str(prefix), "--no-checksums"]) == 1 or suffix == "bin"
    assert verify.main([str(prefix)]) == 1
    capsys.readouterr()
    refresh(prefix)
    assert verify.main([str(prefix)]) == 1
    assert words in capsys.readouterr().err


def rewrite_tar(path, change):
    """Write a tar anew with its list of (name, data) changed, and its index as it was."""
    with tarfile.open(path) as archive:
        members = [(m.name, archive.extractfile(m).read()) for m in archive]
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in change(members):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))


def same_sizes_swapped(members):
    """Two arrays of equal size exchanged, names and all: the index still fits."""
    arrays = [i for i, (name, _) in enumerate(members) if name.endswith("npy")]
    for a in arrays:
        for b in arrays:
            if a < b and len(members[a][1]) == len(members[b][1]):
                members[a], members[b] = members[b], members[a]
                return members
    raise AssertionError("no two of a size")


TAR_FAULTS = {
    "members apart": (lambda m: [m[0], m[2], m[1], *m[3:]], "side by side"),
    "sample incomplete": (lambda m: [m[0], *m[2:]], "side by side"),
    "key twice": (lambda m: [m[0], m[1], (m[0][0], m[2][1]), (m[1][0], m[3][1]), *m[4:]], ""),
    "order": (same_sizes_swapped, "side by side"),
    "last sample gone": (lambda m: m[:-2], "documents and"),
}


@pytest.mark.parametrize("fault", TAR_FAULTS)
def test_damaged_tars(sources, tokenizer, tmp_path, capsys, fault):
    prefix = make(sources, tokenizer, tmp_path, "tars with metadata")
    change, words = TAR_FAULTS[fault]
    rewrite_tar(tmp_path / "out-00000.tar", change)
    assert verify.main([str(prefix)]) == 1
    refresh(prefix)
    capsys.readouterr()
    assert verify.main([str(prefix)]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("cut", [1, 600, 1024, 5000])
def test_cut_tars(sources, tokenizer, tmp_path, capsys, cut):
    prefix = make(sources, tokenizer, tmp_path, "tars")
    path = tmp_path / "out-00001.tar"
    path.write_bytes(path.read_bytes()[:-cut])
    refresh(prefix)
    assert verify.main([str(prefix)]) == 1
    assert f"error: {path}: " in capsys.readouterr().err


def test_keys_twice_in_different_shards(sources, tokenizer, tmp_path, capsys):
    prefix = make(sources, tokenizer, tmp_path, "tars")
    for suffix in ("tar", "tar.idx"):
        shutil.copy(tmp_path / f"out-00000.{suffix}", tmp_path / f"out-00001.{suffix}")
    manifest = json.loads(manifest_path(prefix).read_text())
    manifest["shards"][1] = {**manifest["shards"][0], "name": "out-00001"}
    manifest_path(prefix).write_text(json.dumps(manifest))
    refresh(prefix)
    assert verify.main([str(prefix)]) == 1
    assert "the key 000000000000 is out of order or comes twice" in capsys.readouterr().err


def test_manifest_counts_and_missing_files(sources, tokenizer, tmp_path, capsys):
    prefix = make(sources, tokenizer, tmp_path, "pairs")
    manifest = json.loads(manifest_path(prefix).read_text())
    manifest["documents"] += 1
    manifest_path(prefix).write_text(json.dumps(manifest))
    assert verify.main([str(prefix)]) == 1
    assert "its shards have" in capsys.readouterr().err
    sidecar = tmp_path / "out-00000.docs.jsonl"
    lines = sidecar.read_bytes().split(b"\n")
    sidecar.write_bytes(b"\n".join([lines[1], lines[0], *lines[2:]]))
    refresh(prefix)
    assert verify.main([str(prefix)]) == 1
    assert f"{sidecar}:1: says" in capsys.readouterr().err
    sidecar.unlink()
    assert verify.main([str(prefix)]) == 1
    assert f"{sidecar}: missing" in capsys.readouterr().err
    assert verify.main([str(tmp_path / "nothing")]) == 2


@pytest.mark.parametrize("layout", ["pair", "tars"])
def test_inspect_shows_sources_lengths_and_documents(sources, tokenizer, tmp_path, capsys, layout):
    prefix = make(sources, tokenizer, tmp_path, layout)
    picture = tmp_path / "lengths.png"
    words = [str(prefix), "--first", "7", "--documents", "2", "--plot", str(picture)]
    assert inspect.main(words) == 0
    printed = capsys.readouterr().out
    manifest = read_manifest(prefix)
    assert f"{manifest['documents']:,} documents, {manifest['tokens']:,} tokens" in printed
    assert "----- document 7: " in printed and f"1 {TEXTS[0]}<|endoftext|>" in printed
    assert all(str(source) in printed for source in sources)
    rows = [line.split() for line in printed.splitlines() if line.endswith(".jsonl")]
    assert sum(int(row[0].replace(",", "")) for row in rows) == manifest["tokens"]
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert inspect.main([str(prefix), "--first", "999"]) == 2
    assert "not 999" in capsys.readouterr().err
    assert inspect.main([str(prefix), "--pieces", "--documents", "1"]) == 0
    assert "|<|endoftext|>" in capsys.readouterr().out
