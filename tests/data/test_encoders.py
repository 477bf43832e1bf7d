"""A faster package for ids: offered, compared, refused where it differs."""

import importlib.util
import sys
import types

import numpy as np
import pytest
import tokenizers

from data_prep import encoders
from data_prep.tokenize import main
from tests.unit.tiny_text import TEXTS, write_jsonl, write_tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return write_tokenizer(tmp_path / "tok")


@pytest.fixture
def source(tmp_path):
    return write_jsonl(tmp_path / "in.jsonl", TEXTS * 30)


def run(source, tokenizer, output, *more):
    words = ["--input", source, "--tokenizer", tokenizer, "--output", output, "--workers", 1]
    return main([*map(str, words), *more])


def install(monkeypatch, change=lambda text, ids: ids):
    """Put a package in place that encodes with `tokenizers` and then changes the ids."""

    class Fast:
        def __init__(self, path):
            self.backend = tokenizers.Tokenizer.from_file(path)

        def encode_batch_flat(self, texts):
            lists = [
                change(text, self.backend.encode(text, add_special_tokens=False).ids)
                for text in texts
            ]
            ends = np.cumsum([0, *map(len, lists)])
            flat = np.array([i for ids in lists for i in ids], "<u4")
            return flat.tobytes(), ends.astype("<u8").tobytes()

    fake = types.ModuleType("fastokens")
    fake.Tokenizer = types.SimpleNamespace(from_file=Fast)
    fake.__spec__ = types.SimpleNamespace(name="fastokens")
    monkeypatch.setitem(sys.modules, "fastokens", fake)


def test_the_same_bytes(source, tokenizer, tmp_path, monkeypatch):
    install(monkeypatch)
    assert run(source, tokenizer, tmp_path / "slow") == 0
    assert run(source, tokenizer, tmp_path / "fast", "--encoder", "fastokens") == 0
    for suffix in ("bin", "idx"):
        slow, fast = (tmp_path / f"{name}.{suffix}" for name in ("slow", "fast"))
        assert slow.read_bytes() == fast.read_bytes()


@pytest.mark.parametrize(
    "change",
    [
        lambda text, ids: ids[:-1] if "\u0301" in text else ids,  # found in the difficult texts
        lambda text, ids: [7, *ids[1:]] if "odd places" in text else ids,  # in the first documents
    ],
)
def test_other_ids_are_refused(source, tokenizer, tmp_path, capsys, monkeypatch, change):
    install(monkeypatch, change)
    assert run(source, tokenizer, tmp_path / "out", "--encoder", "fastokens") == 2
    assert "gives other ids than tokenizers for" in capsys.readouterr().err
    assert not (tmp_path / "out.bin").exists()


def test_later_documents_are_compared_now_and_then(
    source, tokenizer, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(encoders, "FIRST_CHARACTERS", 0)
    monkeypatch.setattr(encoders, "SPOT", 8)
    install(monkeypatch, lambda text, ids: [7, *ids[1:]] if "odd places" in text else ids)
    assert run(source, tokenizer, tmp_path / "out", "--encoder", "fastokens") == 2
    assert "gives other ids than tokenizers for 'Tabs" in capsys.readouterr().err


def test_a_missing_package_is_named_before_any_work(source, tokenizer, tmp_path, capsys):
    if importlib.util.find_spec("fastokens"):
        pytest.skip("the package is here")
    assert run(source, tokenizer, tmp_path / "out", "--encoder", "fastokens") == 2
    assert "pip install fastokens" in capsys.readouterr().err
