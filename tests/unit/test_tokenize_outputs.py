"""Output appears whole or not at all: reuse, refusal, and runs that are killed."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
from tiny_text import TEXTS, files_below, jsonl_bytes, request, write_jsonl, write_tokenizer

from data_prep import output as output_module
from data_prep.build import tokenize_files
from data_prep.journal import Journal
from data_prep.tokenize import main
from megatron_lt2.data.manifest import read_manifest

TOOL = Path(__file__).parents[2] / "data_prep" / "tokenize.py"
FINAL = {"train.bin", "train.idx", "train.manifest.json"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", TEXTS)


@pytest.fixture
def output(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "train"


def arguments(source, folder, output, *more):
    paths = ["--input", source, "--tokenizer", folder, "--output", output, "--workers", 1]
    return [str(argument) for argument in (*paths, *more)]


def contents(output):
    return {path.name: path.read_bytes() for path in output.parent.iterdir()}


def test_run_again_is_up_to_date(source, folder, output, capsys, monkeypatch):
    assert main(arguments(source, folder, output)) == 0
    before = contents(output)
    monkeypatch.setattr("data_prep.build._build", None)  # calling it would fail
    assert main(arguments(source, folder, output)) == 0
    # The same bytes under a new time are the same input.
    os.utime(source, ns=(1, 1))
    assert main(arguments(source, folder, output)) == 0
    assert capsys.readouterr().out.count("up to date") == 2
    assert contents(output) == before and set(before) == FINAL


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("text", "another version of"),
        ("path", "other input files"),
        ("eod", "the opposite of --append-eod"),
        ("key", "--text-key text"),
        ("tokenizer", "another tokenizer"),
    ],
)
def test_other_request_is_refused_unless_told(
    source, folder, output, tmp_path, capsys, change, words
):
    assert main(arguments(source, folder, output)) == 0
    before = contents(output)
    changed = arguments(source, folder, output)
    records = "".join(json.dumps({"text": text, "body": text}) + "\n" for text in TEXTS)
    if change == "text":
        write_jsonl(source, ["A" + TEXTS[0][1:], *TEXTS[1:]])  # of the same length
    elif change == "path":
        other = tmp_path / "other.jsonl"
        other.write_text(records)
        changed = arguments(other, folder, output)
    elif change == "eod":
        changed.append("--no-append-eod")
    elif change == "key":
        source.write_text(records)
        changed += ["--text-key", "body"]
    else:
        changed = arguments(source, write_tokenizer(tmp_path / "tok", 340), output)
    assert main(changed) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and words in message and "--overwrite" in message
    assert contents(output) == before
    assert main([*changed, "--overwrite"]) == 0
    assert contents(output) != before
    assert set(contents(output)) == FINAL
    read_manifest(output, checksums=True)


def test_damaged_or_foreign_output_is_refused(source, folder, output, capsys):
    output.with_name("train.bin").write_bytes(b"from elsewhere")
    assert main(arguments(source, folder, output)) == 2
    assert "exists without a manifest" in capsys.readouterr().err
    assert main(arguments(source, folder, output, "--overwrite")) == 0
    data = output.with_name("train.bin").read_bytes()
    output.with_name("train.bin").write_bytes(data[:-1])
    assert main(arguments(source, folder, output)) == 2
    message = capsys.readouterr().err
    assert f"train.bin: has {len(data) - 1} bytes" in message and "--overwrite" in message
    assert main(arguments(source, folder, output, "--overwrite")) == 0
    assert output.with_name("train.bin").read_bytes() == data


def test_failing_overwrite_keeps_the_old_output(source, folder, output):
    assert main(arguments(source, folder, output)) == 0
    before = contents(output)
    source.write_bytes(jsonl_bytes(TEXTS) + b'{"te')
    assert main(arguments(source, folder, output, "--overwrite")) == 2
    assert contents(output) == before


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("renames", [0, 1, 2])
def test_killed_between_renames_is_finished_by_the_next_run(
    source, folder, output, capsys, monkeypatch, renames, replacing
):
    if replacing:
        tokenize_files(request([source], folder, output))
        source.write_bytes(jsonl_bytes(TEXTS[1:]))
    rename = os.replace

    class Killed(BaseException):
        pass

    done: list[tuple] = []

    def replace(*paths):
        if len(done) == renames:
            raise Killed
        done.append(paths)
        rename(*paths)

    with monkeypatch.context() as patch:
        patch.setattr(output_module.os, "replace", replace)
        with pytest.raises(Killed):
            tokenize_files(request([source], folder, output, overwrite=replacing))
    assert not output.with_name("train.manifest.json").exists()
    capsys.readouterr()

    tokenize_files(request([source], folder, output))
    printed = capsys.readouterr().out
    assert "finished the renames" in printed and "up to date" in printed
    recovered = contents(output)
    assert set(recovered) == FINAL
    assert read_manifest(output, checksums=True)["documents"] == len(TEXTS) - replacing
    tokenize_files(request([source], folder, output, overwrite=True))
    assert contents(output)["train.bin"] == recovered["train.bin"]


def test_two_runs_do_not_write_one_output(source, folder, output, capsys):
    journal = Journal(output)
    assert main(arguments(source, folder, output)) == 2
    assert "another run is writing this output" in capsys.readouterr().err
    assert files_below(output.parent) == {"train.progress.partial"}
    journal.close(remove=True)
    assert main(arguments(source, folder, output)) == 0


@pytest.mark.parametrize(
    ("number", "workers", "code"),
    [
        (signal.SIGKILL, 1, -signal.SIGKILL),
        (signal.SIGKILL, 2, -signal.SIGKILL),
        (signal.SIGINT, 2, 130),
        (signal.SIGTERM, 1, 143),
        (signal.SIGTERM, 2, 143),
    ],
)
def test_signal_in_the_middle(folder, output, tmp_path, number, workers, code):
    # A pipe as input shows for certain that the tool is in the middle: once 4 MB went through, it
    # has taken batches and wants more. Opened both ways, our end never blocks on opening or breaks.
    source = tmp_path / "in.jsonl"
    os.mkfifo(source)
    pipe = os.open(source, os.O_RDWR)
    command = arguments(source, folder, output, "--workers", workers)
    line = jsonl_bytes(TEXTS)
    with subprocess.Popen(
        [sys.executable, str(TOOL), *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        feeder = threading.Thread(target=write_all, args=(pipe, line * (4_000_000 // len(line))))
        feeder.start()
        feeder.join(timeout=60)
        assert not feeder.is_alive() and process.poll() is None
        assert "train.bin.partial" in files_below(output.parent)
        process.send_signal(number)
        os.set_blocking(pipe, False)
        while process.poll() is None:
            # Input goes on, so that a read which began just before the signal ends as well.
            with suppress(BlockingIOError):
                os.write(pipe, line)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.05)
        _, errors = process.communicate()
    os.close(pipe)
    assert process.returncode == code, errors
    assert "Traceback" not in errors
    assert not files_below(output.parent) & FINAL
    if number != signal.SIGKILL:
        assert files_below(output.parent) == set()

    source.unlink()
    write_jsonl(source, TEXTS)
    assert main(arguments(source, folder, output)) == 0
    assert files_below(output.parent) == FINAL
    assert read_manifest(output, checksums=True)["documents"] == len(TEXTS)


def write_all(descriptor, data):
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]
