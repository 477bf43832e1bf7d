"""Conversion copies bytes from file to file: they are the right ones, and failures are named."""

import errno
import os
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from checkpoints_tools import byte_copy
from checkpoints_tools.byte_copy import ByteCopier, meta, runs_of
from checkpoints_tools.convert import main
from checkpoints_tools.mappings.base import AddAxis, CutRows, SplitGroups, SplitRows, TensorMapping
from checkpoints_tools.plain_checkpoint import PlainCheckpoint, find_checkpoint
from checkpoints_tools.safetensors_files import SafetensorsFolder
from tests.hf_folders import assert_same_bytes, folder_tensors, llama_folder

VIEWS = {
    "whole": lambda t: t,
    "rows": lambda t: t[2:5],
    "columns": lambda t: t[:, 3:7],
    "interleaved": lambda t: t.unflatten(0, (4, 3))[:, 1:],
    "every other element": lambda t: t[:, ::2],
    "transposed": lambda t: t.t(),
    "another axis": lambda t: t.unsqueeze(1),
    "a scalar": lambda t: t[3, 4],
    "nothing": lambda t: t[:0],
    "one column": lambda t: t[:, 5:6],
}


@pytest.mark.parametrize("case", VIEWS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_runs_are_where_the_elements_lie(case, dtype):
    whole = torch.arange(12 * 10).view(12, 10).to(getattr(torch, dtype))
    data = b"head!" + whole.view(torch.uint8).numpy().tobytes()
    runs = runs_of(VIEWS[case](meta(whole.shape, dtype)), begin=5)
    found = b"".join(data[start : start + count] for start, count in runs)
    assert found == VIEWS[case](whole).contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    # As few as there are: neighbours are one.
    assert all(a + n != b for (a, n), (b, _) in zip(runs, runs[1:], strict=False))


@pytest.mark.parametrize(
    "mapping, count",
    [
        (TensorMapping("a", ("b",), (6, 4)), [1]),
        (CutRows("a", ("b",), (61, 4)), [1]),
        (SplitRows("a", ("b", "c"), (6, 4), rows=(2, 4)), [1, 1]),
        (AddAxis("a", ("b",), (6, 4)), [1]),
        (SplitGroups("a", ("b", "c"), (6, 4), groups=2, rows_per_group=(2, 1)), [2, 2]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_every_kind_of_mapping_is_a_few_runs(mapping, count):
    places = mapping.places(meta(mapping.written_shape(), "float32"))
    assert [len(runs_of(place)) for place in places] == count


@pytest.mark.parametrize("most", [7, 10**6], ids=["a few bytes at a time", "all at once"])
def test_copying_runs_to_runs(tmp_path, monkeypatch, most):
    """More than one block, no run like another, and a system that takes less than it is given."""
    monkeypatch.setattr(byte_copy, "BLOCK", 64)
    pwrite = os.pwrite
    monkeypatch.setattr(byte_copy.os, "pwrite", lambda fd, data, at: pwrite(fd, data[:most], at))
    data = os.urandom(1000)
    (tmp_path / "a").write_bytes(data)
    runs, places = [(500, 300), (3, 100), (900, 0)], [(10, 150), (400, 249), (200, 1)]
    with open(tmp_path / "b", "w+b", buffering=0) as target:
        target.write(b"beginning")
        ByteCopier().copy(tmp_path / "a", runs, target, places)
        assert target.tell() == 9
    expected = bytearray(649)
    source = data[500:800] + data[3:103]
    expected[:9], expected[10:160] = b"beginning", source[:150]
    expected[400:649], expected[200:201] = source[150:399], source[399:]
    assert (tmp_path / "b").read_bytes() == expected


def convert(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


@pytest.fixture
def pair(tmp_path, capsys):
    """A Hugging Face folder in two files and the run that was made of it."""
    folder = llama_folder(tmp_path / "hf", dtype=torch.bfloat16, shards=2)
    assert convert("import", "--source", folder, "--output", tmp_path / "run") == 0
    capsys.readouterr()
    return folder, tmp_path / "run"


COMMANDS = {
    "import": lambda folder, run: ("import", "--source", folder),
    "export": lambda folder, run: ("export", "--checkpoint", run),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_tensors_are_not_read(pair, tmp_path, monkeypatch, command):
    def refuse(*_):
        raise AssertionError("a tensor was read")

    monkeypatch.setattr(SafetensorsFolder, "fill", refuse)
    monkeypatch.setattr(PlainCheckpoint, "read", refuse)
    assert convert(*COMMANDS[command](*pair), "--output", tmp_path / "out") == 0
    if command == "export":
        assert_same_bytes(folder_tensors(tmp_path / "out"), folder_tensors(pair[0]))


def fails(pair, tmp_path, capsys, command):
    before = {path.name for path in tmp_path.iterdir()}
    assert convert(*COMMANDS[command](*pair), "--output", tmp_path / "out") == 2
    error = capsys.readouterr().err
    message = error[error.index("error: ") :]
    assert message.count("\n") == 1 and "Traceback" not in error
    assert {path.name for path in tmp_path.iterdir()} == before
    return message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_file_that_is_cut_while_it_is_copied(pair, tmp_path, capsys, monkeypatch, command):
    """In the middle of a tensor: what was read so far is not taken for the whole."""
    monkeypatch.setattr(byte_copy, "BLOCK", 64)
    preadv, calls, cut = os.preadv, [], []

    def read(descriptor, buffers, offset):
        calls.append(offset)
        if len(calls) == 30:
            cut.append(os.readlink(f"/proc/self/fd/{descriptor}"))
            os.truncate(cut[0], offset + 5)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(byte_copy.os, "preadv", read)
    message = fails(pair, tmp_path, capsys, command)
    assert cut[0] in message and "bytes too early" in message


@pytest.mark.parametrize("command", COMMANDS)
def test_a_disk_that_is_full_in_the_middle_of_a_tensor(
    pair, tmp_path, capsys, monkeypatch, command
):
    pwrite, calls = os.pwrite, []

    def write(*arguments):
        calls.append(1)
        if len(calls) == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(*arguments)

    monkeypatch.setattr(byte_copy.os, "pwrite", write)
    assert "No space left" in fails(pair, tmp_path, capsys, command)


def test_a_file_that_cannot_be_read_is_named(pair, tmp_path, capsys, monkeypatch):
    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(byte_copy.os, "preadv", broken)
    message = fails(pair, tmp_path, capsys, "import")
    assert "Input/output error" in message and "model-00001-of-00002.safetensors" in message


def in_pieces(folder, whole, pieces):
    """A checkpoint of one tensor as megatron-core leaves it: a file with a record for each piece.

    pieces: tensors by their first element's position in `whole`.
    """
    folder.mkdir()
    places, chunks = {}, []
    with open(folder / "__0_0.distcp", "wb") as stream:
        for offsets, piece in pieces.items():
            start = stream.tell()
            torch.save(piece, stream)
            chunks.append(ChunkStorageMetadata(torch.Size(offsets), piece.shape))
            info = _StorageInfo("__0_0.distcp", start, stream.tell() - start)
            places[MetadataIndex("a", torch.Size(offsets))] = info
    entry = TensorStorageMetadata(TensorProperties(dtype=whole.dtype), whole.shape, chunks)
    (folder / ".metadata").write_bytes(pickle.dumps(Metadata({"a": entry}, storage_data=places)))
    return PlainCheckpoint(folder)


def bytes_at(found, count):
    path, start = found
    return path.read_bytes()[start : start + count]


def test_a_tensor_in_several_pieces_is_put_together(tmp_path):
    whole = torch.randn(6, 4)
    pieces = {(0, 0): whole[:3, :2], (0, 2): whole[:3, 2:], (3, 0): whole[3:]}
    checkpoint = in_pieces(tmp_path / "c", whole, {k: v.clone() for k, v in pieces.items()})
    assert checkpoint.in_file("a") is None
    assert torch.equal(checkpoint["a"], whole)
    assert torch.equal(checkpoint.read("a", layer=4), whole[4])


def test_where_a_tensor_in_one_piece_lies(tmp_path, monkeypatch):
    base = torch.randn(9, 4)
    cases = {"whole": base, "part of a storage": base[2:7], "transposed": base.t()}
    for name, whole in cases.items():
        checkpoint = in_pieces(tmp_path / name, whole, {(0, 0): whole})
        assert torch.equal(checkpoint["a"], whole), name
        if name == "transposed":
            assert checkpoint.in_file("a") is None
            continue
        expected = whole.contiguous().view(torch.uint8).numpy().tobytes()
        assert bytes_at(checkpoint.in_file("a"), len(expected)) == expected, name
    # What a machine of the other byte order wrote is left to torch, which swaps it.
    other = SimpleNamespace(byteorder="big")
    monkeypatch.setattr("checkpoints_tools.plain_checkpoint.sys", other)
    assert in_pieces(tmp_path / "other", base, {(0, 0): base}).in_file("a") is None


def test_a_piece_of_another_dtype_than_said_is_not_copied(tmp_path):
    whole = torch.randn(3, 4)
    assert in_pieces(tmp_path / "c", whole, {(0, 0): whole.half()}).in_file("a") is None


def test_torch_reads_what_was_filled_in(pair):
    """The record is a whole one of torch's: its own loader finds the bytes and the padding."""
    from torch.distributed.checkpoint import FileSystemReader, load

    folder, run = pair
    name = "embedding.word_embeddings.weight"
    state = {name: torch.full((64, 24), float("nan"), dtype=torch.bfloat16)}
    load(state, storage_reader=FileSystemReader(find_checkpoint(run)), no_dist=True)
    rows = folder_tensors(folder)["model.embed_tokens.weight"]
    assert torch.equal(state[name][:61], rows) and not state[name][61:].any()
