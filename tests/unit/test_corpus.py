"""The corpus of the standard library."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.corpus import main

TOOL = Path(__file__).parents[2] / "data_prep" / "corpus.py"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    assert main(["--output", str(folder)]) == 0
    return folder / "corpus.jsonl"


@pytest.fixture(scope="module")
def records(corpus):
    return [json.loads(line) for line in corpus.read_bytes().splitlines()]


def test_size_fields_and_sources(corpus, records):
    assert 3e6 < corpus.stat().st_size <= 12e6
    assert all(set(record) == {"text", "source"} and record["text"].strip() for record in records)
    sources = [record["source"] for record in records]
    assert len(set(sources)) == len(sources)
    assert {"json/decoder.py", "tokenize.py", "topic:assert"} <= set(sources)
    folders = {part for source in sources for part in source.split("/")[:-1]}
    assert not folders & {"site-packages", "test", "tests", "idlelib", "encodings"}
    assert not any("_sysconfigdata" in source for source in sources)


def test_a_module_is_its_source(records):
    by_source = {record["source"]: record["text"] for record in records}
    assert by_source["json/decoder.py"] == Path(json.decoder.__file__).read_text()


def test_topics_and_modules_are_mixed_to_the_end(records):
    tail = [record["source"] for record in records[-len(records) // 5 :]]
    assert any(source.startswith("topic:") for source in tail)
    assert any(source.endswith(".py") for source in tail)


def test_another_process_run_by_path_writes_the_same_bytes(corpus, tmp_path):
    # From inside the folder whose tokenize.py must not hide the standard module that is used here.
    done = subprocess.run(
        [sys.executable, TOOL.name, "--output", str(tmp_path)],
        cwd=TOOL.parent,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    digests = [
        hashlib.sha256(path.read_bytes()).digest() for path in (corpus, tmp_path / "corpus.jsonl")
    ]
    assert digests[0] == digests[1]


def test_run_again_leaves_the_file_alone(tmp_path, capsys):
    arguments = ["--output", str(tmp_path), "--max-mb", "0.05"]
    assert main(arguments) == 0
    path = tmp_path / "corpus.jsonl"
    assert 0 < path.stat().st_size <= 50_000
    before = path.stat().st_mtime_ns
    assert main(arguments) == 0
    assert "unchanged" in capsys.readouterr().out
    assert path.stat().st_mtime_ns == before


def test_no_room(tmp_path, capsys):
    assert main(["--output", str(tmp_path / "new"), "--max-mb", "0.000001"]) == 2
    assert capsys.readouterr().err.startswith("error: --max-mb")
    assert not (tmp_path / "new").exists()
