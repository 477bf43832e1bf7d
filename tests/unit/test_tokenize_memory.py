"""Memory while tokenizing does not grow with the number of documents, but for their lengths."""

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_text import write_tokenizer

TOOL = Path(__file__).parents[2] / "data_prep" / "tokenize.py"

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


@pytest.mark.slow
def test_peak_is_flat_in_the_number_of_documents(tmp_path):
    folder = write_tokenizer(tmp_path / "tok")
    peaks = []
    counts = (100_000, 1_000_000)
    for count in counts:
        source = tmp_path / f"{count}.jsonl"
        with open(source, "w") as stream:
            stream.writelines(f'{{"text": "document {number}"}}\n' for number in range(count))
        command = [TOOL, "--input", source, "--tokenizer", folder, "--output", tmp_path / "out"]
        peaks.append(peak_bytes([*map(str, command), "--workers", "2", "--overwrite"]))
    # Four bytes a document for its length, twice while the array grows, and some slack.
    assert peaks[1] - peaks[0] < 16 * (counts[1] - counts[0])
