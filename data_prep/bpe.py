"""Train a byte-level byte-pair-encoding tokenizer (Sennrich et al. 2016; bytes as in GPT-2).

All 256 bytes are in the vocabulary, so any text can be encoded and decoded without loss. Text is
cut into words by GPT-2's pattern before merges are counted. Training is deterministic: `tokenizers`
breaks ties between pairs by their ids.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_prep.inputs import InputError, Source, find_inputs
from data_prep.readers import Fields, read_batches
from data_prep.records import document_texts
from megatron_lt2.atomic import sha256_file, write_json_atomic, write_text_atomic
from megatron_lt2.data.tokenizer import tokenizer_config

if TYPE_CHECKING:
    import tokenizers

EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"
SMALLEST_VOCABULARY = 256 + 2
"""Every byte and the two special tokens."""

RECORD = "training.json"
"""Written last: it says what the tokenizer beside it was trained on."""


def train_bpe(texts: Iterator[str], vocab_size: int) -> "tokenizers.Tokenizer":
    """Train on documents; id 0 is `EOS_TOKEN`, id 1 is `PAD_TOKEN`.

    The vocabulary comes out smaller than asked when the text has too few distinct pairs.

    Raises:
        ValueError: `vocab_size` leaves no room for all bytes and the special tokens.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"--vocab-size: {vocab_size} is less than {SMALLEST_VOCABULARY} "
            "(256 bytes and 2 special tokens)"
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _texts(sources: list[Source], text_key: str) -> Iterator[str]:
    """Every text of every file.

    Raises:
        InputError: a file is broken, or there is no text at all.
    """
    empty = True
    fields = Fields(text_key)
    for batch in read_batches(sources, fields):
        for _, text in document_texts(batch, fields):
            empty = empty and not text.strip()
            yield text
    if empty:
        raise InputError(f"{sources[0].path}: no text to train on")


def train_files(
    inputs: list[str], output: str, *, vocab_size: int, text_key: str, overwrite: bool
) -> None:
    """Train on files and write a tokenizer folder, unless it is there and up to date.

    Raises:
        ValueError: bad input, or the folder holds another tokenizer and `overwrite` is off.
    """
    sources = find_inputs(inputs)
    folder = Path(os.path.abspath(os.path.expanduser(output)))
    request = {
        "vocab_size": vocab_size,
        "text_key": text_key,
        "inputs": [
            {"bytes": source.size, "sha256": sha256_file(source.path)} for source in sources
        ],
    }
    main = folder / "tokenizer.json"
    if main.exists() and not overwrite:
        if _recorded(folder) != {**request, "sha256": sha256_file(main)}:
            raise ValueError(
                f"{main}: exists and was trained on something else; choose another --output or "
                "pass --overwrite"
            )
        print(f"up to date: {main}")
        return

    tokenizer = train_bpe(_texts(sources, text_key), vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RECORD).unlink(missing_ok=True)
    write_json_atomic(
        folder / "tokenizer_config.json", tokenizer_config(EOS_TOKEN, pad_token=PAD_TOKEN)
    )
    write_text_atomic(main, tokenizer.to_str(pretty=True))
    write_json_atomic(folder / RECORD, {**request, "sha256": sha256_file(main)})
    size = tokenizer.get_vocab_size(with_added_tokens=True)
    few = "" if size == vocab_size else " (the text has no more pairs to merge than that gives)"
    print(f"wrote {main}: {size} tokens{few}")


def _recorded(folder: Path) -> Any:
    """What the folder's tokenizer was trained on; None if nothing says so."""
    try:
        return json.loads((folder / RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
