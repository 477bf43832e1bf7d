"""tokenize.py run by path, where its own name would hide the standard module `tokenize`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import TEXTS, files_below, jsonl_bytes, request, write_jsonl, write_tokenizer

from data_prep.build import tokenize_files

ROOT = Path(__file__).parents[2]
TOOLS = ("tokenize.py", "corpus.py", "train_tokenizer.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def run(command, cwd, *options):
    """Run Python without any module path of the test run itself."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    return subprocess.run(
        [sys.executable, *options, *map(str, command)],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def ways(tmp_path):
    """(first arguments, current folder) of every way to start the tool."""
    return [
        ([ROOT / "data_prep" / "tokenize.py"], tmp_path),
        (["data_prep/tokenize.py"], ROOT),
        (["tokenize.py"], ROOT / "data_prep"),
        (["-m", "data_prep.tokenize"], ROOT),
    ]


@pytest.mark.parametrize("way", range(4))
def test_two_workers(folder, tmp_path, way):
    start, cwd = ways(tmp_path)[way]
    source = write_jsonl(tmp_path / "in.jsonl", TEXTS * 200)
    options = ["--input", source, "--tokenizer", folder, "--output", tmp_path / "by_path"]
    done = run([*start, *options, "--workers", 2], cwd)
    assert (done.returncode, done.stderr) == (0, "")
    assert "1400 documents" in done.stdout
    tokenize_files(request([source], folder, tmp_path / "here"))
    for suffix in ("bin", "idx"):
        here, by_path = (tmp_path / f"{name}.{suffix}" for name in ("here", "by_path"))
        assert here.read_bytes() == by_path.read_bytes()


@pytest.mark.parametrize(("way", "workers"), [(0, 1), (0, 2), (1, 2), (2, 2), (3, 2)])
def test_failing_input_is_one_line(folder, tmp_path, way, workers):
    start, cwd = ways(tmp_path)[way]
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl_bytes(TEXTS) + b'{"text": "cut')
    options = ["--input", source, "--tokenizer", folder, "--output", tmp_path / "out"]
    done = run([*start, *options, "--workers", workers], cwd)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {source}:8: not valid JSON")
    assert done.stderr.count("\n") == 1
    assert files_below(tmp_path) == {"in.jsonl"}


@pytest.mark.parametrize("tool", TOOLS)
def test_standard_module_is_found_and_tracebacks_work(tool):
    # Run as a script by runpy, as the interpreter does, and then use what was hidden before.
    program = (
        "import sys, runpy\n"
        f"sys.path[0] = {str(ROOT / 'data_prep')!r}\n"
        f"try: runpy.run_path({str(ROOT / 'data_prep' / tool)!r}, run_name='__main__')\n"
        "except SystemExit as done: assert done.code == 0\n"
        "import tokenize, inspect, textwrap\n"
        "assert tokenize.open and 'data_prep' not in tokenize.__file__\n"
        "assert 'def dedent' in inspect.getsource(textwrap.dedent)\n"
        "raise RuntimeError('shown as usual')\n"
    )
    arguments = ["-c", program, "--help"]
    done = run(arguments, ROOT / "data_prep")
    assert done.stderr.endswith("RuntimeError: shown as usual\n"), done.stderr


@pytest.mark.parametrize("tool", TOOLS)
def test_help_teaches_and_imports_nothing_heavy(tool):
    done = run([ROOT / "data_prep" / tool, "--help"], ROOT, "-X", "importtime")
    assert done.returncode == 0
    assert f"python data_prep/{tool} --" in done.stdout
    imported = {line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines()}
    assert "argparse" in imported
    heavy = {"numpy", "tokenizers", "pyarrow", "torch", "transformers", "tqdm"}
    assert not {name.split(".")[0] for name in imported} & heavy
