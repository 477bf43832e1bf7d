"""kill -9 at any moment and the same command again: the same bytes, finished slices not redone."""

import json
import os
import random
import resource
import shutil
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from data_prep import readers
from data_prep.build import tokenize_files
from data_prep.encoding import Encoder
from data_prep.journal import journal_path
from data_prep.tokenize import main
from tests.data.killed import contents, in_child, killed_at
from tests.unit.tiny_text import TEXTS, request, write_jsonl, write_tokenizer

LAYOUTS = {
    "one pair": {},
    "numbered pairs with metadata": {"shard_bytes": 700, "metadata": True},
    "tars": {"format": "webdataset", "shard_bytes": 40_000},
    "tars with metadata": {"format": "webdataset", "shard_bytes": 60_000, "metadata": True},
}


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(readers, "BATCH_RECORDS", 4)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def sources(tmp_path):
    return [
        write_jsonl(tmp_path / f"{name}.jsonl", [f"{name} {n} {text}" for text in TEXTS] + [""])
        for n, name in enumerate("abcdef")
    ]


def asked(sources, tokenizer, folder, **more):
    folder.mkdir(exist_ok=True)
    options = {"slice_bytes": 500, **more}
    return request(sources, tokenizer, folder / "out", **options)


@pytest.fixture
def encoded(monkeypatch):
    """Counts the batches that are tokenized."""
    count = [0]
    call = Encoder.__call__

    def counting(self, batch):
        count[0] += 1
        return call(self, batch)

    monkeypatch.setattr(Encoder, "__call__", counting)
    return count


@pytest.mark.parametrize("layout", LAYOUTS)
def test_killed_at_random_moments(sources, tokenizer, tmp_path, encoded, layout):
    wanted = asked(sources, tokenizer, tmp_path / "whole", **LAYOUTS[layout])
    tokenize_files(wanted)
    expected, all_batches = contents(tmp_path / "whole"), encoded[0]
    pick = random.Random(layout)
    moment, resumed, deaths = 0, 0, 0
    while True:
        moment += pick.randint(2, 12)
        folder = tmp_path / f"killed{moment}"
        again = replace(wanted, output=str(asked(sources, tokenizer, folder).output))
        if not killed_at(moment, again):
            break
        deaths += 1
        # A second death on the way, then an end.
        killed_at(pick.randint(1, 9), again)
        slices = 0
        if journal_path(again.output).exists():
            slices = journal_path(again.output).read_bytes().count(b"\n") - 1
        encoded[0] = 0
        tokenize_files(again)
        assert contents(folder) == expected, moment
        if slices > 0:
            resumed += 1
            assert encoded[0] < all_batches
    assert deaths > 3 and resumed > 1
    assert contents(folder) == expected


def test_finished_slices_are_not_redone(sources, tokenizer, tmp_path, encoded, capsys):
    """Almost at the end: only what came after the last slice is tokenized."""
    wanted = asked(sources, tokenizer, tmp_path / "out", slice_bytes=1)
    moment = 1
    while killed_at(moment, wanted) and not (tmp_path / "out" / "out.idx").exists():
        moment += 1
        if journal_path(wanted.output).read_bytes().count(b"\n") >= 11:
            break
    encoded[0] = 0
    tokenize_files(wanted)
    assert encoded[0] <= 3
    assert "going on after" in capsys.readouterr().out
    assert not journal_path(wanted.output).exists()


def interrupted(sources, tokenizer, folder, slices=4, **more):
    """A folder with so many finished slices, and the request."""
    wanted = asked(sources, tokenizer, folder, slice_bytes=1, **more)
    moment = 8
    while killed_at(moment, wanted):
        if journal_path(wanted.output).read_bytes().count(b"\n") > slices:
            return wanted
        moment += 1
    raise AssertionError("it came to its end")


def test_other_settings_and_changed_inputs_begin_where_they_must(
    sources, tokenizer, tmp_path, encoded
):
    fresh = asked(sources, tokenizer, tmp_path / "fresh", append_eod=False)
    tokenize_files(fresh)
    wanted = interrupted(sources, tokenizer, tmp_path / "a")
    encoded[0] = 0
    tokenize_files(replace(wanted, append_eod=False))
    assert encoded[0] == 12  # everything
    assert (tmp_path / "a/out.bin").read_bytes() == (tmp_path / "fresh/out.bin").read_bytes()

    wanted = interrupted(sources, tokenizer, tmp_path / "b", slices=6)
    write_jsonl(sources[1], ["other text"] * 9)
    encoded[0] = 0
    tokenize_files(wanted)
    assert 0 < encoded[0] < 13  # the slices of the first file are kept
    tokenize_files(asked(sources, tokenizer, tmp_path / "c"))
    assert (tmp_path / "b/out.bin").read_bytes() == (tmp_path / "c/out.bin").read_bytes()


def test_files_that_changed_meanwhile_are_not_trusted(sources, tokenizer, tmp_path, capsys):
    wanted = interrupted(sources, tokenizer, tmp_path / "a")
    data = tmp_path / "a" / "out.bin.partial"
    damaged = bytearray(data.read_bytes())
    damaged[0] ^= 1
    data.write_bytes(damaged)
    tokenize_files(wanted)
    assert "changed since it was written; beginning anew" in capsys.readouterr().err
    tokenize_files(asked(sources, tokenizer, tmp_path / "c"))
    assert (tmp_path / "a/out.bin").read_bytes() == (tmp_path / "c/out.bin").read_bytes()


def test_full_disk_keeps_finished_slices(sources, tokenizer, tmp_path):
    """A limit on the size of files stands for a disk that fills up."""
    wanted = asked(sources, tokenizer, tmp_path / "a", slice_bytes=1)
    whole = asked(sources, tokenizer, tmp_path / "whole")
    tokenize_files(whole)
    size = (tmp_path / "whole/out.bin").stat().st_size

    def work() -> int:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size * 2 // 3, size * 2 // 3))
        words = ["--input", *wanted.inputs, "--tokenizer", wanted.tokenizer]
        words += ["--output", wanted.output, "--workers", "1", "--slice-mb", "0.000001"]
        return main(words)

    assert in_child(work) == 2
    left = set(contents(tmp_path / "a"))
    assert left == {"out.bin.partial", "out.idx.partial", "out.progress.partial"}
    tokenize_files(wanted)
    for suffix in ("bin", "idx"):
        whole_bytes = (tmp_path / f"whole/out.{suffix}").read_bytes()
        assert (tmp_path / f"a/out.{suffix}").read_bytes() == whole_bytes


def mounted(folder: Path, size: int) -> bool:
    """Put a file system of `size` bytes over a folder, for this process alone; whether it may."""
    if os.getuid() == 0:
        os.unshare(os.CLONE_NEWNS)
    else:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    steps = (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
    )
    return all(subprocess.run(step).returncode == 0 for step in steps)


MAY_NOT_MOUNT = 77


@pytest.mark.parametrize("layout", ["one pair", "tars"])
def test_a_disk_that_fills_up(tmp_path, tokenizer, layout):
    """A real one: what it ends on need not be a write. Then there is room, and it goes on."""
    texts = [f"{n} {text}" for n in range(300) for text in TEXTS]
    source = write_jsonl(tmp_path / "large.jsonl", texts)
    options = {"format": "webdataset"} if layout == "tars" else {}
    tokenize_files(asked([source], tokenizer, tmp_path / "whole", slice_bytes=20_000, **options))
    size = sum(path.stat().st_size for path in (tmp_path / "whole").iterdir())
    small, copied = tmp_path / "small", tmp_path / "copied"
    small.mkdir()
    words = ["--input", str(source), "--tokenizer", str(tokenizer), "--workers", "1"]
    words += ["--output", str(small / "out"), "--slice-mb", "0.02"]
    words += ["--format", options.get("format", "megatron")]

    def work() -> int:
        try:
            if not mounted(small, size // 2):
                return MAY_NOT_MOUNT
        except (AttributeError, OSError):
            return MAY_NOT_MOUNT
        first = main(words)
        left = {path.name.rpartition(".")[2] for path in small.iterdir()}
        if (first, left) != (2, {"partial"}):
            return 70
        slices = len(journal_path(small / "out").read_bytes().splitlines()) - 1
        if slices < 1:
            return 71
        again = ["mount", "-o", f"remount,size={3 * size}", str(small)]
        if subprocess.run(again).returncode:
            return MAY_NOT_MOUNT
        code = main(words)
        shutil.copytree(small, copied)
        return code

    code = in_child(work)
    if code == MAY_NOT_MOUNT:
        pytest.skip("this user may not mount a file system")
    assert code == 0
    for path in (tmp_path / "whole").iterdir():
        if "manifest" not in path.name:
            assert (copied / path.name).read_bytes() == path.read_bytes(), path.name
    assert {path.name for path in copied.iterdir()} == set(os.listdir(tmp_path / "whole"))


def test_a_folder_that_cannot_be_written(tokenizer):
    folder = Path(tempfile.mkdtemp())
    try:
        folder.chmod(0o755)
        shutil.copytree(tokenizer, folder / "tok")
        source = write_jsonl(folder / "in.jsonl", TEXTS)
        output = folder / "out"
        output.mkdir()
        output.chmod(0o555)

        def work() -> int:
            if os.getuid() == 0:
                os.setuid(65534)
            words = ["--input", str(source), "--tokenizer", str(folder / "tok")]
            return main([*words, "--output", str(output / "train"), "--workers", "1"])

        assert in_child(work) == 2
        assert list(output.iterdir()) == []
    finally:
        shutil.rmtree(folder)


def test_journal_lines_say_what_is_durable(sources, tokenizer, tmp_path):
    wanted = interrupted(sources, tokenizer, tmp_path / "a", shard_bytes=700)
    lines = [json.loads(x) for x in journal_path(wanted.output).read_bytes().split(b"\n")[:-1]]
    assert [entry[0] for entry in lines[0]["inputs"]] == wanted.inputs
    for line in lines[1:]:
        shards = sum(len(other["output"]["shards"]) for other in lines[1 : lines.index(line) + 1])
        main_file = tmp_path / "a" / f"out-{shards:05d}.bin.partial"
        assert main_file.stat().st_size >= line["output"]["sizes"][".bin"]
