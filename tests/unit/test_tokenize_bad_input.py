"""Bad input: one line that names file and line, exit code 2, nothing left under a final name."""

import gzip
import json

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from tiny_text import (
    TEXTS,
    files_below,
    jsonl_bytes,
    write_jsonl,
    write_tokenizer,
    write_word_tokenizer,
)

from data_prep import readers
from data_prep.tokenize import main

GOOD = jsonl_bytes(TEXTS * 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(inputs, tokenizer, output, workers=1, more=()):
    return main(
        ["--input", *map(str, inputs), "--tokenizer", str(tokenizer), "--output", str(output)]
        + ["--workers", str(workers), *more]
    )


def assert_one_line(capsys, start, words=""):
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {start}"), captured.err
    assert words in captured.err
    assert captured.err.count("\n") == 1 and captured.err.endswith("\n")
    assert captured.out == ""


def json_line(value):
    return json.dumps(value).encode() + b"\n"


def parquet_bytes(columns):
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.table(columns), sink)
    return sink.getvalue().to_pybytes()


def undecodable_column():
    """A string column whose second row is not UTF-8, as some writers let through."""
    offsets = pyarrow.py_buffer((0).to_bytes(4, "little") + b"\1\0\0\0\3\0\0\0")
    return pyarrow.Array.from_buffers(
        pyarrow.string(), 2, [None, offsets, pyarrow.py_buffer(b"a\xff\xfe")]
    )


GZIP, ZSTD = gzip.compress(GOOD), zstandard.compress(GOOD)
PARQUET = parquet_bytes({"text": [f"row {number} " * 9 for number in range(99)]})

CASES = [
    # name, contents, what follows the file name, words of the message
    ("half_line.jsonl", GOOD + b'{"text": "half a l', ":281: ", "ends in the middle of this line"),
    ("half_line.jsonl.gz", gzip.compress(GOOD + b'{"te'), ":281: ", "ends in the middle"),
    ("broken.jsonl", GOOD + b"{'text': 1}\n" + GOOD, ":281: ", "not valid JSON"),
    ("utf8.jsonl", GOOD + b'{"text": "\xff"}\n', ":281: ", "invalid UTF-8 at byte 11"),
    ("utf8.txt", b"good\n\nab\xc3(\n", ":3: ", "invalid UTF-8 at byte 3"),
    ("cut_utf8.txt", "good\nab\u00e9".encode()[:-1], ":2: ", "invalid UTF-8 at byte 3"),
    ("array.jsonl", b"[1]\n", ":1: ", "a list instead of a JSON object"),
    ("string.jsonl", GOOD + b'"text"\n', ":281: ", "a str instead of a JSON object"),
    ("key.jsonl", b"\n" + json_line({"body": "x"}), ":2: ", "no field 'text' (it has body)"),
    ("number.jsonl", json_line({"text": 3}), ":1: ", "field 'text' holds int, not text"),
    ("pair.jsonl", b'{"text": "\\ud83d"}\n', ":1: ", "half a surrogate pair"),
    ("deep.jsonl", b"[" * 200_000 + b"\n", ":1: ", "not valid JSON"),
    ("cut.jsonl.gz", GZIP[: len(GZIP) // 2], ": ", "gzip file is cut off"),
    ("end.jsonl.gz", GZIP[:-1], ": ", "gzip file is cut off"),
    ("nothing.jsonl.gz", b"", ": ", "gzip file is cut off"),
    ("plain.jsonl.gz", GOOD, ": ", "broken gzip file"),
    ("sum.jsonl.gz", GZIP[:-8] + b"\0" * 8, ": ", "broken gzip file"),
    ("more.jsonl.gz", GZIP + b"more", ": ", "broken gzip file"),
    ("cut.jsonl.zst", ZSTD[: len(ZSTD) // 2], ": ", "zstd file is cut off"),
    ("end.jsonl.zst", ZSTD[:-1], ": ", "zstd file is cut off"),
    ("nothing.jsonl.zst", b"", ": ", "zstd file is cut off"),
    ("plain.jsonl.zst", GOOD, ": ", "broken zstd file"),
    ("cut.parquet", PARQUET[: len(PARQUET) // 2], ": ", "broken parquet file"),
    ("head.parquet", PARQUET[:-1], ": ", "broken parquet file"),
    ("nothing.parquet", b"", ": ", "broken parquet file"),
    ("column.parquet", parquet_bytes({"body": ["x"]}), ": ", "no column 'text' (it has body)"),
    ("kind.parquet", parquet_bytes({"text": [1]}), ": ", "column 'text' holds int64"),
    ("utf8.parquet", parquet_bytes({"text": undecodable_column()}), ":2: ", "invalid UTF-8"),
    ("page.parquet", PARQUET[:20] + b"\xff" * 60 + PARQUET[80:], ": ", "broken parquet file"),
    ("nothing.jsonl", b"", ": ", "no documents"),
    ("blank.jsonl", b"\n \n", ": ", "no documents"),
    ("empty.jsonl", json_line({"text": " "}) + json_line({"text": None}), ": ", "2 were empty"),
    ("empty.txt", b" \n", ": ", "1 were empty"),
    ("data.csv", b"text\nx\n", ": ", "unknown kind of file"),
    ("data.parquet.gz", b"", ": ", "unknown kind of file"),
]


@pytest.mark.parametrize(("name", "data", "place", "words"), CASES, ids=[c[0] for c in CASES])
def test_content(folder, tmp_path, capsys, name, data, place, words):
    path = tmp_path / name
    path.write_bytes(data)
    (tmp_path / "out").mkdir()
    assert run([path], folder, tmp_path / "out" / "train") == 2
    assert_one_line(capsys, f"{path}{place}", words)
    assert files_below(tmp_path / "out") == set()


def test_first_fault_in_input_order_is_reported_by_workers_too(
    folder, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(readers, "BATCH_RECORDS", 5)
    source = tmp_path / "a.jsonl.gz"
    # The bad line sits before the cut, which the reading process meets while workers are busy.
    source.write_bytes(gzip.compress(GOOD + b"{}\n" + GOOD)[:-20])
    for workers in (1, 2):
        assert run([source], folder, tmp_path / "train", workers) == 2
        assert_one_line(capsys, f"{source}:281: ", "no field 'text' (it has no fields)")
    assert files_below(tmp_path) == {"a.jsonl.gz"}


def test_missing_files_and_folders(folder, tmp_path, capsys):
    output = tmp_path / "out"
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    missing = tmp_path / "no.jsonl"
    assert run([good, missing], folder, output) == 2
    assert_one_line(capsys, f"{missing}: ", "No such file")
    assert run([tmp_path / "*.gz"], folder, output) == 2
    assert_one_line(capsys, f"{tmp_path / '*.gz'}: no file matches")
    assert run([tmp_path], folder, output) == 2
    assert_one_line(capsys, f"{tmp_path}: is a folder")
    assert run([good, tmp_path / "g*.jsonl"], folder, output) == 2
    assert_one_line(capsys, f"{good}: given twice")
    assert files_below(tmp_path) == {"good.jsonl"}


def test_tokenizers_that_will_not_do(tmp_path, capsys):
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    missing = tmp_path / "nowhere"
    assert run([good], missing, tmp_path / "out") == 2
    assert_one_line(capsys, f"{missing}: no such tokenizer")
    without = write_word_tokenizer(tmp_path / "without.json", {"a": 0, "b": 1})
    assert run([good], without, tmp_path / "out", workers=2) == 2
    assert_one_line(capsys, f"{without}: no EOS token")
    assert files_below(tmp_path) == {"good.jsonl", "without.json"}


def test_outputs_that_cannot_be(folder, tmp_path, capsys):
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    assert run([good], folder, f"{tmp_path}/") == 2
    assert_one_line(capsys, "--output: ", "is a folder; give a prefix")
    assert run([good], folder, good / "out") == 2
    assert_one_line(capsys, str(good))
    assert run([good], folder, tmp_path / "out", workers=0) == 2
    assert_one_line(capsys, "--workers: 0")
    assert files_below(tmp_path) == {"good.jsonl"}


def test_full_disk_leaves_nothing(folder, tmp_path, capsys, monkeypatch):
    def full(self, data, lengths, metadata):
        raise OSError(28, "No space left on device", str(tmp_path / "out.bin.partial"))

    monkeypatch.setattr("data_prep.indexed_shard.IndexedShard.add", full)
    good = write_jsonl(tmp_path / "good.jsonl", TEXTS)
    assert run([good], folder, tmp_path / "out") == 2
    assert_one_line(capsys, f"{tmp_path / 'out.bin.partial'}: No space left on device")
    assert files_below(tmp_path) == {"good.jsonl"}


def test_id_outside_the_vocabulary_names_the_document(folder, tmp_path, capsys, monkeypatch):
    from megatron_lt2.data.tokenizer import Tokenizer

    def encode(self, texts):
        return [[7, self.vocab_size] if "x" in text else [7] for text in texts]

    monkeypatch.setattr(Tokenizer, "encode_batch", encode)
    source = write_jsonl(tmp_path / "in.jsonl", ["a", "b", "x"])
    assert run([source], folder, tmp_path / "out") == 2
    assert_one_line(capsys, f"{source}:3: token id 350 is outside the vocabulary of 350")
    assert files_below(tmp_path) == {"in.jsonl"}
