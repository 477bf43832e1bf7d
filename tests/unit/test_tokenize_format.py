"""The token files: what megatron-core's builder writes, from every kind of input, in order."""

import gzip
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import zstandard
from tiny_text import TEXTS, jsonl_bytes, request, write_jsonl, write_tokenizer
from tiny_text import write_word_tokenizer as write_words

from data_prep import readers
from data_prep.build import tokenize_files
from data_prep.indexed_shard import HEADER, IndexedShard
from data_prep.inputs import InputError
from data_prep.tokenize import main
from megatron_lt2.data.manifest import read_manifest
from megatron_lt2.data.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def core():
    """megatron-core's own reader and builder."""
    from megatron.core.datasets import indexed_dataset

    return indexed_dataset


def documents_of(core, prefix):
    """Every document, as megatron-core reads it."""
    dataset = core.IndexedDataset(str(prefix))
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))
    return [dataset[index].tolist() for index in range(len(dataset))]


def assert_built_like_core(core, prefix, documents, dtype, folder):
    builder = core.IndexedDatasetBuilder(str(folder / "core.bin"), dtype=dtype)
    for document in documents:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(folder / "core.idx"))
    for suffix in ("bin", "idx"):
        ours = prefix.with_name(f"{prefix.name}.{suffix}").read_bytes()
        assert ours == (folder / f"core.{suffix}").read_bytes()


@pytest.mark.parametrize("append_eod", [True, False])
def test_same_bytes_as_megatron_core(core, folder, tokenizer, tmp_path, append_eod):
    texts = ["", " \n", *TEXTS[:3], "", *TEXTS[3:], "\t"]
    source = write_jsonl(tmp_path / "in.jsonl", texts)
    prefix = tmp_path / "out"
    flag = "--append-eod" if append_eod else "--no-append-eod"
    arguments = ["--input", source, "--tokenizer", folder, "--output", prefix, "--workers", 1, flag]
    assert main([str(argument) for argument in arguments]) == 0

    eod = [tokenizer.eos_id] if append_eod else []
    expected = [ids + eod for ids in tokenizer.encode_batch(TEXTS)]
    assert documents_of(core, prefix) == expected
    assert_built_like_core(core, prefix, expected, np.uint16, tmp_path)
    manifest = read_manifest(prefix, checksums=True)
    assert manifest["tokens"] == sum(map(len, expected))
    assert manifest["inputs"][0]["skipped_empty"] == 4
    assert manifest["append_eod"] is append_eod


@pytest.mark.parametrize(
    ("largest", "dtype"), [(65_535, np.uint16), (65_536, np.int32), (128_255, np.int32)]
)
def test_width_follows_the_largest_possible_id(core, tmp_path, largest, dtype):
    words = {"small": 0, "</s>": 1, "edge": 65_534, "large": largest}
    tokenizer = write_words(tmp_path / "words.json", words, eos="</s>")
    source = write_jsonl(tmp_path / "in.jsonl", ["small edge", "large small large"])
    prefix = tmp_path / "out"
    tokenize_files(request([source], tokenizer, prefix))
    expected = [[0, 65_534, 1], [largest, 0, largest, 1]]
    assert documents_of(core, prefix) == expected
    assert_built_like_core(core, prefix, expected, dtype, tmp_path)
    assert read_manifest(prefix)["dtype"] == np.dtype(dtype).name


def test_places_beyond_32_bits(tmp_path):
    """Documents whose bytes would begin far behind what an int32 holds; the bytes are not made."""
    lengths = np.array([2**31 - 1, 5, 2**31 - 1, 2**31 - 1, 1], np.int64)
    for dtype in ("uint16", "int32"):
        shard = IndexedShard(tmp_path / dtype, dtype)
        shard.add(b"", lengths, None)
        shard.finish()
        data = (tmp_path / f"{dtype}.idx.partial").read_bytes()[HEADER.size :]
        assert np.frombuffer(data, "<i4", 5).tolist() == lengths.tolist()
        expected = [0, *np.cumsum(lengths * np.dtype(dtype).itemsize)[:-1].tolist()]
        assert np.frombuffer(data, "<i8", 5, 20).tolist() == expected
        assert expected[-1] > 2**33


def test_a_document_of_more_tokens_than_the_index_can_say(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.encoding.MAX_LENGTH", 20)
    source = write_jsonl(tmp_path / "in.jsonl", ["short", "long " * 40])
    with pytest.raises(InputError, match=r"in\.jsonl:2: a document of \d+ tokens"):
        tokenize_files(request([source], folder, tmp_path / "out"))


def test_index_made_in_pieces_is_the_same(core, folder, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.indexed_shard.INDEX_PIECE", 3)
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS)
    tokenize_files(request([source], folder, tmp_path / "out"))
    expected = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(TEXTS)]
    assert_built_like_core(core, tmp_path / "out", expected, np.uint16, tmp_path)


def write_every_kind(folder):
    """Inputs of all kinds and the texts in them, in order."""
    texts = [f"{name} {text}" for name in "abcdefgh" for text in TEXTS]
    part = [texts[start : start + len(TEXTS)] for start in range(0, len(texts), len(TEXTS))]
    lines = list(map(jsonl_bytes, part))
    whole = [f"whole file {number}\n\nwith lines\n" for number in range(3)]
    half = len(lines[2]) // 2
    zstd = zstandard.ZstdCompressor()
    contents = {
        "a.jsonl": lines[0].replace(b"\n", b"\r\n\n"),  # Windows line ends and blank lines
        "b.jsonl.gz": gzip.compress(lines[1]),
        "c.ndjson.gz": gzip.compress(lines[2][:half]) + gzip.compress(lines[2][half:]) + b"\0" * 9,
        "d.json.zst": zstd.compress(lines[3][:half]) + zstd.compress(lines[3][half:]),
        "e.json": b"\xef\xbb\xbf" + lines[4].rstrip(b"\n"),  # byte order mark, no last newline
        "f.txt": whole[0].encode(),
        "g.txt.gz": gzip.compress(whole[1].encode()),
        "h.txt.zst": zstd.compress(whole[2].encode()),
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    columns = {"i": pyarrow.string(), "j": pyarrow.large_string()}
    for number, (name, kind) in enumerate(columns.items()):
        column = pyarrow.array([*part[5 + number], None], kind)
        table = pyarrow.table({"id": range(len(column)), "text": column})
        pyarrow.parquet.write_table(table, folder / f"{name}.parquet", row_group_size=3)
    encoded = pyarrow.array(part[7]).dictionary_encode()
    pyarrow.parquet.write_table(pyarrow.table({"text": encoded}), folder / "k.parquet")
    names = [*contents, "i.parquet", "j.parquet", "k.parquet"]
    in_order = [*sum(part[:5], []), *whole, *sum(part[5:], [])]
    return [folder / name for name in names], in_order


@pytest.mark.parametrize("workers", [1, 3])
def test_every_kind_in_order_for_any_number_of_workers(
    core, folder, tokenizer, tmp_path, monkeypatch, workers
):
    monkeypatch.setattr(readers, "BATCH_RECORDS", 3)
    monkeypatch.setattr("data_prep.parquet.ROWS", 2)
    monkeypatch.setattr("data_prep.decompress.CHUNK_BYTES", 50)
    inputs, texts = write_every_kind(tmp_path)
    prefix = tmp_path / "out"
    tokenize_files(request(inputs, folder, prefix, workers=workers))
    expected = [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]
    assert documents_of(core, prefix) == expected
    manifest = read_manifest(prefix, checksums=True)
    assert [entry["path"] for entry in manifest["inputs"]] == list(map(str, inputs))
    assert sum(entry["documents"] for entry in manifest["inputs"]) == len(texts)
    assert sum(entry["skipped_empty"] for entry in manifest["inputs"]) == 2  # the nulls


def test_pattern_is_sorted_and_text_key_is_followed(core, folder, tokenizer, tmp_path):
    for name in ("b", "c", "a"):
        record = {"text": "not this", "body": f"file {name}"}
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(record) + "\n")
    tokenize_files(request([tmp_path / "[abc].jsonl"], folder, tmp_path / "out", text_key="body"))
    texts = [tokenizer.decode(ids[:-1]) for ids in documents_of(core, tmp_path / "out")]
    assert texts == ["file a", "file b", "file c"]


def test_eos_inside_a_text_is_reported(folder, tmp_path, capsys):
    source = write_jsonl(tmp_path / "in.jsonl", ["one", "two <|endoftext|> three"])
    tokenize_files(request([source], folder, tmp_path / "out"))
    assert "note: 1 documents contain <|endoftext|>" in capsys.readouterr().out
