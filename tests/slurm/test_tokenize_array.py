"""launchers/tokenize.sh as a job array: parts, the merge that waits for them, the same bytes."""

import pytest

from data_prep.build import tokenize_files
from megatron_lt2.data.manifest import data_paths, manifest_path
from tests.slurm.cluster import ROOT, Cluster
from tests.unit.tiny_text import request, write_jsonl, write_tokenizer


@pytest.mark.slow
def test_an_array_writes_what_one_process_writes(cluster: Cluster, tmp_path) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 300)
    sources = [
        write_jsonl(tmp_path / f"{i}.jsonl", [f"text {i} {j} words" for j in range(20 * (i + 1))])
        for i in range(5)
    ]
    tokenize_files(request(sources, tokenizer, tmp_path / "whole"))
    out = tmp_path / "an output"
    array = cluster.submit(
        *(ROOT / "launchers/tokenize.sh", out, "--tokenizer", tokenizer, "--workers", 1),
        *("--input", tmp_path / "[0-9].jsonl"),
        **{"cwd": tmp_path, "flags": ("--array=4-6",), "LT2_ROOT": ROOT},
    )
    for element in (4, 5, 6):
        assert cluster.wait(f"{array}_{element}").JobState == "COMPLETED", cluster.report()
    cluster.until(manifest_path(out).exists, 60, "the merge")
    for ours, theirs in zip(data_paths(out), data_paths(tmp_path / "whole"), strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
