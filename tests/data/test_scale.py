"""Many documents, many files, one very long document: memory stays where it is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_prep.tokenize import main
from megatron_lt2.data.manifest import read_manifest
from tests.unit.tiny_text import write_jsonl, write_tokenizer

TOOL = Path(__file__).parents[2] / "data_prep" / "tokenize.py"
MOST_FOR_A_LONG_DOCUMENT = 1.5 * (1 << 30)

MEASURE = """\
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak_bytes(command):
    """Largest resident size of a command or one of its processes."""
    python = [sys.executable, "-c", MEASURE, sys.executable]
    done = subprocess.run([*python, *command], check=True, capture_output=True, text=True)
    return int(done.stdout)


def test_a_thousand_files(tmp_path):
    folder = write_tokenizer(tmp_path / "tok")
    (tmp_path / "in").mkdir()
    for number in range(1000):
        write_jsonl(tmp_path / "in" / f"{number:04d}.jsonl", [f"file {number}"])
    words = ["--input", str(tmp_path / "in" / "*.jsonl"), "--tokenizer", str(folder)]
    words += ["--output", str(tmp_path / "out"), "--workers", "1", "--slice-mb", "0.001"]
    assert main(words) == 0
    manifest = read_manifest(tmp_path / "out", checksums=True)
    assert len(manifest["inputs"]) == manifest["documents"] == 1000


@pytest.mark.slow
def test_memory_is_flat_for_both_formats(tmp_path):
    """1e5 and 1e6 documents differ by less than 30 MB in the largest process."""
    folder = write_tokenizer(tmp_path / "tok")
    for form in ("megatron", "webdataset"):
        peaks = []
        for count in (100_000, 1_000_000):
            source = tmp_path / f"{count}.jsonl"
            with open(source, "w") as stream:
                stream.writelines(f'{{"text": "document {n}"}}\n' for n in range(count))
            command = ["--input", source, "--tokenizer", folder, "--output", tmp_path / form]
            more = ["--workers", "2", "--overwrite", "--format", form]
            peaks.append(peak_bytes([str(TOOL), *map(str, command), *more]))
        assert peaks[1] - peaks[0] < 30e6, peaks


@pytest.mark.slow
def test_one_document_of_100_megabytes(tmp_path):
    folder = write_tokenizer(tmp_path / "tok")
    text = " ".join(f"word{i % 9973} and more" for i in range(5_300_000))[:100_000_000]
    source = tmp_path / "in.jsonl"
    source.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "x"}) + "\n")
    command = ["--input", source, "--tokenizer", folder, "--output", tmp_path / "out"]
    peak = peak_bytes([str(TOOL), *map(str, command), "--workers", "2"])
    assert peak < MOST_FOR_A_LONG_DOCUMENT
    assert read_manifest(tmp_path / "out")["documents"] == 2
    done = subprocess.run(
        [sys.executable, TOOL.with_name("verify.py"), tmp_path / "out"], capture_output=True
    )
    assert done.returncode == 0
