"""Small texts and tokenizers for the tests of data preparation."""

import json
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from data_prep.bpe import EOS_TOKEN, PAD_TOKEN, train_bpe
from data_prep.build import Request
from megatron_lt2.data.tokenizer import tokenizer_config

TEXTS = [
    "The first document of a small corpus.",
    "def add(first, second):\n    return first + second\n",
    "Gr\u00fc\u00dfe aus K\u00f6ln, caf\u00e9, \u5317\u4eac, \U0001f600.",
    "x",
    "A longer document, so that lengths differ: " + "the corpus of the first document " * 9,
    "Tabs\tand  spaces \n\n at odd places.  ",
    "1234567890 and 0.5",
]


def write_tokenizer(folder: Path, vocab_size: int = 350) -> Path:
    """A byte-level BPE of a few merges as a tokenizer folder; EOS is token 0."""
    folder.mkdir(parents=True, exist_ok=True)
    train_bpe(iter(TEXTS * 2), vocab_size).save(str(folder / "tokenizer.json"))
    config = tokenizer_config(EOS_TOKEN, pad_token=PAD_TOKEN)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_word_tokenizer(path: Path, words: dict[str, int], eos: str | None = None) -> Path:
    """A tokenizer.json of whole words with the given ids; `eos` becomes a special token."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token=next(iter(words))))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if eos is not None:
        tokenizer.add_special_tokens([eos])
    tokenizer.save(str(path))
    return path


def write_jsonl(path: Path, texts: list[str]) -> Path:
    """One {"text": ...} a line."""
    path.write_bytes(jsonl_bytes(texts))
    return path


def jsonl_bytes(texts: list[str]) -> bytes:
    """One {"text": ...} a line."""
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def request(inputs: list[Path], tokenizer: Path, output: Path, **options) -> Request:
    """What `tokenize_files` takes, with the command line's defaults and one worker."""
    values = {"text_key": "text", "append_eod": True, "workers": 1, "overwrite": False}
    return Request(
        inputs=[str(path) for path in inputs],
        tokenizer=str(tokenizer),
        output=str(output),
        command=["test"],
        **{**values, **options},
    )


def files_below(folder: Path) -> set[str]:
    """Names of all files in a folder."""
    return {path.name for path in folder.iterdir() if path.is_file()}
