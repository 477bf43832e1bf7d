"""Training the byte-level BPE."""

import json

import pytest
from tiny_text import TEXTS, files_below, write_jsonl

from data_prep.train_tokenizer import main
from megatron_lt2.data.tokenizer import load_tokenizer


@pytest.fixture
def corpus(tmp_path):
    return write_jsonl(tmp_path / "corpus.jsonl", TEXTS)


def train(corpus, folder, *more):
    return main(
        ["--input", str(corpus), "--output", str(folder), "--vocab-size", "333", *map(str, more)]
    )


def test_result_loads_and_round_trips_any_bytes(corpus, tmp_path):
    assert train(corpus, tmp_path / "tok") == 0
    assert files_below(tmp_path / "tok") == {
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    tokenizer = load_tokenizer(tmp_path / "tok")
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (333, 0)
    assert tokenizer.backend.token_to_id("<|pad|>") == 1
    unseen = "never seen: \u0000 \u05d0 \U0001f9ea \r\n\t zzz"
    [ids] = tokenizer.encode_batch([unseen])
    assert tokenizer.decode(ids) == unseen
    assert len(tokenizer.encode_batch(["document"])[0]) < len("document")  # merges were learned


def test_same_input_same_bytes(corpus, tmp_path, monkeypatch):
    assert train(corpus, tmp_path / "one") == 0
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    assert train(corpus, tmp_path / "two") == 0
    one, two = (tmp_path / name / "tokenizer.json" for name in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()


def test_up_to_date_refused_and_overwritten(corpus, tmp_path, capsys):
    folder = tmp_path / "tok"
    assert train(corpus, folder) == 0
    first = (folder / "tokenizer.json").read_bytes()
    assert train(corpus, folder) == 0
    assert "up to date" in capsys.readouterr().out
    write_jsonl(corpus, ["other words " * 9])
    assert train(corpus, folder) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (folder / "tokenizer.json").read_bytes() == first
    assert train(corpus, folder, "--overwrite") == 0
    assert (folder / "tokenizer.json").read_bytes() != first


def test_little_text_gives_fewer_tokens_and_says_so(tmp_path, capsys):
    corpus = write_jsonl(tmp_path / "few.jsonl", ["ab"])
    assert train(corpus, tmp_path / "tok") == 0
    assert "no more pairs" in capsys.readouterr().out
    assert load_tokenizer(tmp_path / "tok").vocab_size == 259


@pytest.mark.parametrize(
    ("content", "more", "words"),
    [
        (b'{"text": " "}\n', [], "few.jsonl: no text to train on"),
        (b"", [], "few.jsonl: no text to train on"),
        (b'{"text": "a"}\n{"te', [], "few.jsonl:2: not valid JSON"),
        (b'{"text": "a"}\n', ["--vocab-size", "200"], "--vocab-size: 200 is less than 258"),
    ],
)
def test_bad_input(tmp_path, capsys, content, more, words):
    corpus = tmp_path / "few.jsonl"
    corpus.write_bytes(content)
    assert train(corpus, tmp_path / "tok", *more) == 2
    message = capsys.readouterr().err
    assert message.startswith("error: ") and words in message and message.count("\n") == 1
    assert not (tmp_path / "tok").exists()


def test_config_names_the_special_tokens(corpus, tmp_path):
    assert train(corpus, tmp_path / "tok") == 0
    config = json.loads((tmp_path / "tok" / "tokenizer_config.json").read_text())
    assert config["eos_token"] == "<|endoftext|>" and config["pad_token"] == "<|pad|>"
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"
