"""Kinds of input, where text and name are, filters, and what happens to faulty text."""

import gzip
import io
import json
import lzma
import sys
import tarfile
import types

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from data_prep import decompress, readers
from data_prep.build import tokenize_files
from data_prep.overview import document
from data_prep.tokenize import main
from megatron_lt2.data.manifest import read_manifest
from megatron_lt2.data.tokenizer import load_tokenizer
from tests.unit.tiny_text import (
    TEXTS,
    jsonl_bytes,
    request,
    write_jsonl,
    write_tokenizer,
    write_word_tokenizer,
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def texts_of(prefix, tokenizer):
    """The text of every document without its EOS."""
    loaded, manifest = load_tokenizer(tokenizer), read_manifest(prefix)
    return [
        loaded.decode(document(str(prefix), manifest, number).tolist()[:-1])
        for number in range(manifest["documents"])
    ]


def tar_bytes(members):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return out.getvalue()


SAMPLES = [
    ("a/1.json", b'{"text": "from json", "k": 1}'),
    ("a/2.txt", b"from txt"),
    ("a/2.json", b'{"text": "not this"}'),
    ("b/1.cls", b"0"),
    ("b/1.seg.json", b"{}"),
    ("b/1.txt", b"third"),
]
IN_TAR = ["from json", "from txt", "third"]


def test_lists_arrays_archives_and_xz(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(decompress, "CHUNK_BYTES", 50)
    monkeypatch.setattr(readers, "BATCH_RECORDS", 2)
    half = len(jsonl_bytes(TEXTS)) // 2
    files = {
        "a.jsonl.xz": lzma.compress(jsonl_bytes(TEXTS)[:half])
        + lzma.compress(jsonl_bytes(TEXTS)[half:])
        + b"\0" * 8,
        "b.json": b'[\n {"text": "one"},\n {"text": "two"}\n]\n',
        "c.json.gz": gzip.compress(b'[{"text": "three"}]'),
        "d.tar": tar_bytes(SAMPLES),
        "e.tar.gz": gzip.compress(tar_bytes([("x.txt", b"e")])),
        "f.tar.zst": zstandard.compress(tar_bytes([("x.txt", b"f")])),
        "g.tgz": gzip.compress(tar_bytes([("x.txt", b"g")])),
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    lines = ["# a list", "", str(tmp_path / "a.*"), *(str(tmp_path / n) for n in list(files)[1:])]
    (tmp_path / "inputs.list").write_text("\n".join(lines) + "\n")
    for workers in (1, 3):
        asked = request([], tokenizer, tmp_path / f"out{workers}", workers=workers)
        asked.inputs.append(f"@{tmp_path / 'inputs.list'}")
        tokenize_files(asked)
        found = texts_of(asked.output, tokenizer)
        assert found == [*TEXTS, "one", "two", "three", *IN_TAR, "e", "f", "g"]


def test_dotted_keys_names_and_metadata(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text(
        '{"doc": {"body": "nested"}, "meta": {"id": 7}}\n{"doc.body": "plain"}\n'
    )
    table = pyarrow.table(
        {
            "doc": pyarrow.array([{"body": "row", "n": 1}, {"body": None, "n": 2}]),
            "meta": pyarrow.array([{"id": "r1"}, {"id": "r2"}]),
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    (tmp_path / "c.tar").write_bytes(tar_bytes([("s/1.json", b'{"doc": {"body": "sample"}}')]))
    inputs = [tmp_path / name for name in ("a.jsonl", "b.parquet", "c.tar")]
    options = {"text_key": "doc.body", "id_key": "meta.id", "metadata": True}
    tokenize_files(request(inputs, tokenizer, tmp_path / "out", **options))
    assert texts_of(tmp_path / "out", tokenizer) == ["nested", "plain", "row", "sample"]
    said = [json.loads(line) for line in (tmp_path / "out.docs.jsonl").read_text().splitlines()]
    assert [line["id"] for line in said] == ["7", None, "r1", None]
    assert [line["line"] for line in said] == [1, 2, 1, 1]
    assert [line["source"] for line in said] == [str(inputs[i]) for i in (0, 0, 1, 2)]


def test_names_of_tar_samples_are_kept(tokenizer, tmp_path):
    (tmp_path / "c.tar").write_bytes(tar_bytes(SAMPLES))
    tokenize_files(request([tmp_path / "c.tar"], tokenizer, tmp_path / "out", metadata=True))
    said = [json.loads(line) for line in (tmp_path / "out.docs.jsonl").read_text().splitlines()]
    assert [line["id"] for line in said] == ["a/1", "a/2", "b/1"]


def test_data_sets_of_the_hub(tokenizer, tmp_path, monkeypatch, capsys):
    words = ["--tokenizer", str(tokenizer), "--output", str(tmp_path / "out"), "--workers", "1"]
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["--input", "hf:some/name", *words]) == 2
    assert "needs the package datasets" in capsys.readouterr().err
    monkeypatch.undo()

    asked = []

    def load_dataset(name, *, split, streaming):
        asked.append((name, split, streaming))
        return iter([{"text": "row one"}, {"text": "row two"}])

    fake = types.ModuleType("datasets")
    fake.load_dataset, fake.__spec__ = load_dataset, types.SimpleNamespace(name="datasets")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert main(["--input", "hf:some/name@validation", *words]) == 0
    assert asked == [("some/name", "validation", True)]
    assert texts_of(tmp_path / "out", tokenizer) == ["row one", "row two"]
    assert main(["--input", "hf:some/name@validation", *words]) == 0
    assert "up to date" in capsys.readouterr().out


def test_filters(tokenizer, tmp_path):
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "abc", "abcdef", "", "abcdefghi"])
    tokenize_files(request([source], tokenizer, tmp_path / "out", min_chars=3, max_chars=6))
    assert texts_of(tmp_path / "out", tokenizer) == ["abc", "abcdef"]
    notes = read_manifest(tmp_path / "out")["inputs"][0]["notes"]
    assert notes == {"empty": 1, "short": 1, "long": 1}


def test_bos_and_tokenizers_without_it(tokenizer, tmp_path, capsys):
    folder = write_tokenizer(tmp_path / "tok")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["bos_token"] = "<|pad|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    source = write_jsonl(tmp_path / "in.jsonl", ["x", "y z"])
    tokenize_files(request([source], folder, tmp_path / "out", prepend_bos=True))
    manifest = read_manifest(tmp_path / "out")
    for number in range(2):
        ids = document(str(tmp_path / "out"), manifest, number).tolist()
        assert (ids[0], ids[-1]) == (1, 0) and 1 not in ids[1:] and 0 not in ids[:-1]
    words = ["--input", str(source), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "o")]
    assert main([*words, "--prepend-bos"]) == 2
    assert "--prepend-bos" in capsys.readouterr().err


GOOD = jsonl_bytes(["good one", "good two"])
FAULTS = {
    # kind: file name, contents
    "missing_key": ("a.jsonl", b'{"body": "x"}\n'),
    "wrong_type": ("a.jsonl", b'{"text": 3}\n'),
    "not_json": ("a.jsonl", b"{'text': 1}\n"),
    "invalid_utf8": ("a.jsonl", b'{"text": "\xff"}\n'),
    "surrogate": ("a.jsonl", b'{"text": "\\ud83d"}\n'),
    "cut_line": ("a.jsonl", b'{"text": "half'),
    "broken_file": ("a.jsonl.gz", None),
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", FAULTS)
def test_skipped_faults_are_counted_and_the_exit_code_says_so(
    tokenizer, tmp_path, capsys, kind, workers
):
    name, bad = FAULTS[kind]
    data = gzip.compress(GOOD * 900)[:-9] if bad is None else GOOD + bad
    (tmp_path / name).write_bytes(data)
    other = write_jsonl(tmp_path / "z.jsonl", ["last"])
    words = ["--input", str(tmp_path / name), str(other), "--tokenizer", str(tokenizer)]
    words += ["--output", str(tmp_path / "out"), "--workers", str(workers)]
    assert main(words) == 2
    assert not (tmp_path / "out.bin").exists()
    capsys.readouterr()
    assert main([*words, "--on-error", "skip"]) == 3
    printed = capsys.readouterr()
    assert f"skipped 1 faults: 1 {kind}" in printed.out
    assert printed.err.startswith(f"skipped: {tmp_path / name}") or kind == "broken_file"
    found = texts_of(tmp_path / "out", tokenizer)
    assert found[:2] == ["good one", "good two"] and found[-1] == "last"
    manifest = read_manifest(tmp_path / "out")
    assert manifest["inputs"][0]["notes"] == {kind: 1}
    assert manifest["inputs"][1]["notes"] == {}
    assert len(manifest["inputs"][0]["sha256"]) == 64
    # The same again is up to date and still says so.
    assert main([*words, "--on-error", "skip"]) == 3


BROKEN_TARS = {
    "cut in data": lambda data: data[:700],
    "cut at a header": lambda data: data[:2048],
    "no end": lambda data: data[: len(data.rstrip(b"\0")) // 512 * 512 + 512],
    "not a tar": lambda data: b"x" * 2048,
}


@pytest.mark.parametrize("fault", BROKEN_TARS)
def test_broken_tars(tokenizer, tmp_path, capsys, fault):
    path = tmp_path / "a.tar"
    path.write_bytes(BROKEN_TARS[fault](tar_bytes(SAMPLES)))
    words = ["--input", str(path), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "o")]
    assert main([*words, "--workers", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: ")


def test_samples_without_text_and_members_twice(tokenizer, tmp_path, capsys):
    path = tmp_path / "a.tar"
    words = ["--input", str(path), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "o")]
    path.write_bytes(tar_bytes([("1.txt", b"a"), ("2.cls", b"0")]))
    assert main([*words, "--workers", "1"]) == 2
    assert f"{path}:2: sample '2' has neither .txt nor .json" in capsys.readouterr().err
    path.write_bytes(tar_bytes([("1.txt", b"a"), ("1.txt", b"b")]))
    assert main([*words, "--workers", "1"]) == 2
    assert "1.txt comes twice" in capsys.readouterr().err


def test_nul_is_kept_and_marks_at_the_start_are_dropped(tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"\xef\xbb\xbf" + jsonl_bytes(["a\0b", "x"]))
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfmarked \xef\xbb\xbf inside")
    inputs = [tmp_path / "a.jsonl", tmp_path / "b.txt"]
    tokenize_files(request(inputs, tokenizer, tmp_path / "out"))
    found = texts_of(tmp_path / "out", tokenizer)
    assert found == ["a\0b", "x", "marked \ufeff inside"]
    notes = [entry["notes"] for entry in read_manifest(tmp_path / "out")["inputs"]]
    assert notes == [{"bom": 1, "nul": 1}, {"bom": 1}]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_empty_documents_anywhere(tokenizer, tmp_path, place):
    texts = ["one", "two"]
    for empty in ("", " \n"):
        texts.insert(place * (len(texts) // 2), empty)
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    tokenize_files(request([source], tokenizer, tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    assert (manifest["documents"], manifest["inputs"][0]["skipped_empty"]) == (2, 2)
    assert texts_of(tmp_path / "out", tokenizer) == ["one", "two"]


@pytest.mark.parametrize("places", [[0], [1], [2], [0, 1, 2]], ids=str)
@pytest.mark.parametrize("bad", ['{"body": "x"}', '{"text": null}', '{"text": 5}', "[]", "{"])
def test_records_without_text_anywhere(tokenizer, tmp_path, places, bad):
    """First, in the middle and last: the others stay, and every record is accounted for."""
    lines = ['{"text": "one"}', '{"text": "two"}']
    for place in places:
        lines.insert(place, bad)
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n")
    words = ["--input", str(tmp_path / "in.jsonl"), "--tokenizer", str(tokenizer), "--workers"]
    words += ["1", "--output", str(tmp_path / "out"), "--on-error", "skip"]
    assert main(words) == (0 if "null" in bad else 3)
    manifest = read_manifest(tmp_path / "out")
    assert sum(manifest["inputs"][0]["notes"].values()) == len(places)
    assert manifest["documents"] == 2
    assert texts_of(tmp_path / "out", tokenizer) == ["one", "two"]


def test_added_tokens_beyond_the_vocabulary_of_the_model(tmp_path):
    """Width and range follow the largest id, not the number of words."""
    path = write_word_tokenizer(tmp_path / "w.json", {"a": 0, "b": 65_534}, eos="</s>")
    loaded = load_tokenizer(path)
    backend = loaded.backend
    backend.add_special_tokens(["<extra>"])
    backend.save(str(path))
    loaded = load_tokenizer(path)
    source = write_jsonl(tmp_path / "in.jsonl", ["a b <extra> a"])
    tokenize_files(request([source], path, tmp_path / "out"))
    manifest = read_manifest(tmp_path / "out")
    largest = max(backend.get_vocab(with_added_tokens=True).values())
    assert manifest["tokenizer"]["vocab_size"] == largest + 1 == loaded.vocab_size
    ids = document(str(tmp_path / "out"), manifest, 0)
    assert ids.tolist() == [0, 65_534, backend.token_to_id("<extra>"), 0, loaded.eos_id]
    assert ids.dtype == np.dtype(manifest["dtype"])
