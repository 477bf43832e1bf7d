"""Parts of a tokenizing job array, merged, are what one process writes."""

import gzip
import json
from dataclasses import replace

import pytest

from data_prep.build import tokenize_files
from data_prep.cutting import part_of
from data_prep.inputs import InputError, find_inputs
from data_prep.merge import main, merge, part_prefixes
from megatron_lt2.data.manifest import data_paths, read_manifest
from tests.unit.tiny_text import request, write_jsonl, write_tokenizer


@pytest.fixture
def files(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 300)
    sources = [
        write_jsonl(tmp_path / f"{i}.jsonl", [f"text {i} {j} " * (1 + i % 3) for j in range(5 * i)])
        for i in range(1, 7)
    ]
    return tokenizer, sources


def in_parts(tmp_path, tokenizer, sources, count, **changes):
    (tmp_path / "out.parts").mkdir()
    for index in range(count):
        asked = request(sources, tokenizer, tmp_path / "out.parts" / f"{index:04d}")
        tokenize_files(replace(asked, part=(index, count), **changes))


def test_merged_parts_are_the_whole(files, tmp_path):
    tokenizer, sources = files
    tokenize_files(request(sources, tokenizer, tmp_path / "whole"))
    in_parts(tmp_path, tokenizer, sources, 4)
    out = str(tmp_path / "out")
    assert main(["--output", out, "--parts", out + ".parts"]) == 0
    for ours, theirs in zip(data_paths(out), data_paths(tmp_path / "whole"), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    merged, whole = read_manifest(out, checksums=True), read_manifest(tmp_path / "whole")
    for name in ("tokens", "documents", "tokenizer", "dtype"):
        assert merged[name] == whole[name]
    for ours, theirs in zip(merged["inputs"], whole["inputs"], strict=True):
        pieces = ours.pop("pieces", None)
        assert ours == (theirs if pieces is None else {**theirs, "sha256": ""})
    assert any("pieces" in entry for entry in read_manifest(out)["inputs"])
    # And the command without slices finds its work done.
    tokenize_files(request(sources, tokenizer, out))


@pytest.mark.parametrize("count", range(1, 30))
def test_parts_are_all_lines_in_their_order(files, count):
    """Whatever is cut: no byte twice, none left out, no part without a line."""
    sources = find_inputs(map(str, files[1]))
    parts = [part_of(sources, (index, count)) for index in range(count)]
    read = b""
    for part in parts:
        data = b""
        for source in part:
            begin, end = source.span or (0, source.size)
            with open(source.path, "rb") as stream:
                data += stream.read()[begin:end]
        assert data and data.endswith(b"\n")
        read += data
    assert read == b"".join(path.read_bytes() for path in files[1])
    largest = max(sum(source.to_read for source in part) for part in parts)
    assert count == 1 or largest <= 2 * len(read) / count + 100


def test_files_that_are_small_or_no_lines_stay_whole(files, tmp_path):
    names = [str(path) for path in files[1]]
    spans = [source.span for i in range(6) for source in part_of(find_inputs(names), (i, 6))]
    assert spans[:3] == [None] * 3 and None not in spans[3:]
    packed = tmp_path / "large.jsonl.gz"
    packed.write_bytes(gzip.compress(files[1][5].read_bytes()))
    array = tmp_path / "array.json"
    array.write_text(json.dumps([{"text": "a b c"}] * 900))
    text = tmp_path / "book.txt"
    text.write_text("some words\n" * 900)
    for path in (packed, array, text):
        with pytest.raises(InputError, match="1 input files, which make 1 pieces"):
            part_of(find_inputs([str(path)]), (0, 2))
    with pytest.raises(InputError, match="at most so many slices"):
        part_of(find_inputs(names), (0, 1000))


LINE_KINDS = {
    "no newline at the end": b'{"text": "one"}\n{"text": "two"}\n{"text": "three"}',
    "a byte order mark, blank lines": b'\xef\xbb\xbf{"text": "one"}\n\n\n{"text": "two"}\n\n',
    "windows lines": b'{"text": "one"}\r\n{"text": "two"}\r\n{"text": "three"}\r\n',
    "one line longer than a share": b'{"text": "a"}\n{"text": "'
    + b"long " * 99
    + b'"}\n{"text": "z"}',
    "a mark that is no mark": '{"text": "one"}\n\ufeff{"text": "2"}\n{"text": "two"}\n'.encode(),
}


@pytest.mark.parametrize("kind", LINE_KINDS)
@pytest.mark.parametrize("count", [2, 3])
def test_one_file_in_slices_is_the_whole(files, tmp_path, kind, count):
    source = tmp_path / "one.jsonl"
    source.write_bytes(LINE_KINDS[kind])
    tokenizer = files[0]
    faults = {"on_error": "skip", "metadata": True}
    tokenize_files(replace(request([source], tokenizer, tmp_path / "whole"), **faults))
    try:
        in_parts(tmp_path, tokenizer, [source], count, **faults)
    except ValueError as error:  # fewer lines with text than slices are asked for
        assert "at most so many slices" in str(error) or "no documents" in str(error)
        assert count == 3
        return
    out = str(tmp_path / "out")
    assert main(["--output", out, "--parts", out + ".parts"]) == 0
    for suffix in (".bin", ".idx", ".docs.jsonl"):
        assert (tmp_path / f"out{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()
    merged, whole = read_manifest(out)["inputs"], read_manifest(tmp_path / "whole")["inputs"]
    assert merged[0]["notes"] == whole[0]["notes"] and "span" not in merged[0]


def test_a_fault_in_a_later_slice_names_the_line_of_the_file(files, tmp_path):
    source = write_jsonl(tmp_path / "one.jsonl", ["some words"] * 100)
    lines = source.read_bytes().splitlines(keepends=True)
    lines[79] = b"{broken\n"
    source.write_bytes(b"".join(lines))
    asked = request([source], files[0], tmp_path / "late")
    tokenize_files(replace(asked, part=(0, 2)))
    with pytest.raises(InputError, match=r"one\.jsonl:80: not valid JSON"):
        tokenize_files(replace(asked, output=str(tmp_path / "other"), part=(1, 2)))


def test_a_file_that_grows_between_two_slices_is_refused(files, tmp_path, capsys):
    source = write_jsonl(tmp_path / "one.jsonl", ["some words"] * 100)
    asked = request([source], files[0], tmp_path / "0000")
    tokenize_files(replace(asked, part=(0, 2)))
    with open(source, "a") as stream:
        stream.write('{"text": "more"}\n')
    tokenize_files(replace(asked, output=str(tmp_path / "0001"), part=(1, 2)))
    parts = [str(tmp_path / name) for name in ("0000", "0001")]
    assert main(["--output", str(tmp_path / "out"), "--parts", *parts]) == 2
    assert "tokenize its slices again" in capsys.readouterr().err
    assert not list(tmp_path.glob("out*"))


def test_a_file_that_grows_while_a_slice_of_it_is_read_is_refused(files, tmp_path, monkeypatch):
    source = write_jsonl(tmp_path / "one.jsonl", ["some words"] * 100)

    def grown(sources, part):
        taken = part_of(sources, part)
        with open(source, "a") as stream:
            stream.write('{"text": "more"}\n')
        return taken

    monkeypatch.setattr("data_prep.build.part_of", grown)
    asked = replace(request([source], files[0], tmp_path / "out"), part=(0, 2))
    with pytest.raises(InputError, match="changed while it was read"):
        tokenize_files(asked)


def test_a_slice_goes_on_where_it_was(files, tmp_path, monkeypatch):
    """A run that dies in the second half of a file keeps its finished slices of it."""
    from data_prep import readers

    monkeypatch.setattr(readers, "BATCH_RECORDS", 7)
    source = write_jsonl(tmp_path / "one.jsonl", [f"some words {i}" for i in range(300)])
    asked = replace(request([source], files[0], tmp_path / "whole"), part=(1, 2), slice_bytes=200)
    tokenize_files(asked)
    asked = replace(asked, output=str(tmp_path / "cut"))
    add, calls = readers.Batches.add, []

    def dies(self, *arguments):
        calls.append(1)
        if len(calls) == 100:
            raise KeyboardInterrupt
        return add(self, *arguments)

    monkeypatch.setattr(readers.Batches, "add", dies)
    with pytest.raises(KeyboardInterrupt):
        tokenize_files(asked)
    assert (tmp_path / "cut.progress.partial").exists()
    monkeypatch.setattr(readers.Batches, "add", add)
    tokenize_files(asked)
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"cut{suffix}").read_bytes() == (
            tmp_path / f"whole{suffix}"
        ).read_bytes()


def test_a_missing_part_is_named(files, tmp_path, capsys):
    in_parts(tmp_path, *files, 3)
    for path in (tmp_path / "out.parts").glob("0001.*"):
        path.unlink()
    out = str(tmp_path / "out")
    assert main(["--output", out, "--parts", out + ".parts"]) == 2
    assert "part 0001 is missing" in capsys.readouterr().err


def test_a_damaged_part_is_refused(files, tmp_path):
    in_parts(tmp_path, *files, 2)
    victim = tmp_path / "out.parts" / "0001.bin"
    data = bytearray(victim.read_bytes())
    data[0] ^= 1
    victim.write_bytes(data)
    with pytest.raises(ValueError, match="0001.bin"):
        merge(str(tmp_path / "out"), part_prefixes(str(tmp_path / "out.parts")), [])
    assert not (tmp_path / "out.bin").exists()
