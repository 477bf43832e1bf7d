"""Reading manifests: the token files must be the ones described, and of the right tokenizer."""

import json

import pytest
from tiny_text import TEXTS, request, write_jsonl, write_tokenizer

from data_prep.build import tokenize_files
from megatron_lt2.atomic import sha256_file
from megatron_lt2.data.manifest import check_same_tokenizer, manifest_path, read_manifest
from megatron_lt2.data.tokenizer import load_tokenizer


@pytest.fixture
def made(tmp_path):
    """(prefix, tokenizer folder) of token files made of `TEXTS`."""
    folder = write_tokenizer(tmp_path / "tok")
    source = write_jsonl(tmp_path / "in.jsonl", [*TEXTS, " "])
    prefix = tmp_path / "train"
    tokenize_files(request([source], folder, prefix))
    return prefix, folder


def test_contents(made, tmp_path):
    prefix, folder = made
    manifest = read_manifest(prefix, checksums=True)
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode_batch(TEXTS)
    assert manifest["documents"] == len(TEXTS)
    assert manifest["tokens"] == sum(map(len, ids)) + len(TEXTS)
    assert (manifest["format"], manifest["version"], manifest["dtype"]) == ("megatron", 1, "uint16")
    assert manifest["append_eod"] is True
    assert manifest["tokenizer"] == {
        "path": str(folder),
        "sha256": sha256_file(folder / "tokenizer.json"),
        "vocab_size": 350,
        "eos_id": 0,
        "eos_token": "<|endoftext|>",
        "bos_id": None,
    }
    for suffix in ("bin", "idx"):
        path = tmp_path / f"train.{suffix}"
        expected = {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        assert manifest["files"][path.name] == expected
    [source] = manifest["inputs"]
    path = tmp_path / "in.jsonl"
    assert source == {
        "path": str(path),
        "bytes": path.stat().st_size,
        "mtime_ns": path.stat().st_mtime_ns,
        "sha256": sha256_file(path),
        "documents": len(TEXTS),
        "skipped_empty": 1,
        "notes": {"empty": 1},
    }


def test_renamed_pair_is_still_read(made, tmp_path):
    prefix, _ = made
    for suffix in ("bin", "idx", "manifest.json"):
        (tmp_path / f"train.{suffix}").rename(tmp_path / f"other.{suffix}")
    assert read_manifest(tmp_path / "other")["documents"] == len(TEXTS)
    with pytest.raises(ValueError, match="no such manifest"):
        read_manifest(prefix)


@pytest.mark.parametrize("suffix", ["bin", "idx"])
def test_cut_grown_changed_or_missing_file_is_named(made, suffix):
    prefix, _ = made
    path = prefix.with_name(f"train.{suffix}")
    data = path.read_bytes()
    for wrong in (data[:-1], data + b"\0"):
        path.write_bytes(wrong)
        with pytest.raises(ValueError, match=rf"train\.{suffix}: has {len(wrong)} bytes"):
            read_manifest(prefix)
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    read_manifest(prefix)
    with pytest.raises(ValueError, match=rf"train\.{suffix}: checksum differs"):
        read_manifest(prefix, checksums=True)
    path.unlink()
    with pytest.raises(ValueError, match=rf"train\.{suffix}: missing"):
        read_manifest(prefix)


def change(field, value):
    def edit(manifest):
        manifest[field] = value

    return edit


def drop(field):
    def edit(manifest):
        del manifest[field]

    return edit


def drop_eos(manifest):
    del manifest["tokenizer"]["eos_id"]


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (change("format", "other"), "not a manifest of token files"),
        (change("version", 2), "version 2, this code reads version 1"),
        (drop("tokens"), "lacks tokens"),
        (drop_eos, "tokenizer entry lacks eos_id"),
        (change("files", {}), r"says nothing about train\.bin"),
    ],
)
def test_wrong_manifest_is_named(made, edit, words):
    prefix, _ = made
    path = manifest_path(prefix)
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=rf"train\.manifest\.json: .*{words}"):
        read_manifest(prefix)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff"])
def test_broken_manifest_is_named(made, content):
    prefix, _ = made
    manifest_path(prefix).write_bytes(content)
    with pytest.raises(ValueError, match=r"train\.manifest\.json: not "):
        read_manifest(prefix)


def test_same_tokenizer_is_told_by_content(made, tmp_path):
    prefix, folder = made
    moved = folder.rename(tmp_path / "moved")
    [manifest] = check_same_tokenizer([prefix], load_tokenizer(moved))
    assert manifest["documents"] == len(TEXTS)

    other = load_tokenizer(write_tokenizer(tmp_path / "other", vocab_size=340))
    with pytest.raises(ValueError, match=r"train\.manifest\.json: .*another tokenizer"):
        check_same_tokenizer([prefix], other)

    (moved / "tokenizer_config.json").write_text('{"eos_token": "<|pad|>"}')
    with pytest.raises(ValueError, match=r"train\.manifest\.json: its documents end with token 0"):
        check_same_tokenizer([prefix], load_tokenizer(moved))
