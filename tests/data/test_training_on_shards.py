"""Runs on tars, stopped in the middle of an epoch and resumed: the same losses bit for bit."""

import json

import pytest

from data_prep.build import tokenize_files
from tests.e2e.conftest import _documents
from tests.e2e.runs import call, command, write_config
from tests.unit.tiny_text import request, write_jsonl, write_tokenizer


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = {
        line["step"]: (line["loss"], line["grad_norm"]) for line in lines if "grad_norm" in line
    }
    return {step: found[step] for step in sorted(found)}


@pytest.mark.slow
def test_half_and_half_is_the_whole(tmp_path):
    tokenizer = write_tokenizer(tmp_path / "tokenizer", 300)
    source = write_jsonl(tmp_path / "text.jsonl", _documents(60))
    tokenize_files(
        request([source], tokenizer, tmp_path / "web", format="webdataset", shard_bytes=30_000)
    )
    config = write_config(tmp_path / "config.yaml", tmp_path / "web")
    common = ("--config", config, "--data.format", "webdataset", "--data.shuffle_buffer", 7)
    for name, more in {
        "whole": [],
        "halves": ["--training.stop_step", 5, "--data.num_workers", 2],
    }.items():
        call(command(*common, "--run_dir", tmp_path / name, *more), timeout=500).expect(
            0 if name == "whole" else 75
        )
    call(command(*common, "--run_dir", tmp_path / "halves"), timeout=500).expect(0)
    assert losses(tmp_path / "halves") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 12
