"""Parts of a tokenizing job array, merged, are what one process writes."""

import pytest

from data_prep.build import part_of, tokenize_files
from data_prep.inputs import find_inputs
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


def in_parts(tmp_path, tokenizer, sources, count):
    from dataclasses import replace

    (tmp_path / "out.parts").mkdir()
    for index in range(count):
        asked = request(sources, tokenizer, tmp_path / "out.parts" / f"{index:04d}")
        tokenize_files(replace(asked, part=(index, count)))


def test_merged_parts_are_the_whole(files, tmp_path):
    tokenizer, sources = files
    tokenize_files(request(sources, tokenizer, tmp_path / "whole"))
    in_parts(tmp_path, tokenizer, sources, 4)
    out = str(tmp_path / "out")
    assert main(["--output", out, "--parts", out + ".parts"]) == 0
    for ours, theirs in zip(data_paths(out), data_paths(tmp_path / "whole"), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    merged, whole = read_manifest(out, checksums=True), read_manifest(tmp_path / "whole")
    for name in ("tokens", "documents", "tokenizer", "inputs", "dtype"):
        assert merged[name] == whole[name]


@pytest.mark.parametrize("count", range(1, 7))
def test_parts_are_all_files_in_their_order(files, count):
    sources = find_inputs(map(str, files[1]))
    parts = [part_of(sources, (index, count)) for index in range(count)]
    assert all(parts)
    assert [source for some in parts for source in some] == sources


def test_more_parts_than_files_are_refused(files):
    with pytest.raises(ValueError, match="there are 6 input files"):
        part_of(find_inputs(map(str, files[1])), (0, 7))


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
