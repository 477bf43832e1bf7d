"""Ids of texts, by `tokenizers` or by a faster package that gives the same ids.

`fastokens` reads the same tokenizer.json. Its ids are compared with those of `tokenizers`: at the
start of every worker for texts made to be difficult and for the first documents, and for one
document in `SPOT` after that.
"""

import importlib.util
from array import array
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from megatron_lt2.data.tokenizer import Tokenizer

NAMES = ("tokenizers", "fastokens")
SPOT = 256
FIRST_CHARACTERS = 200_000

DIFFICULT = (
    "It's we'll THEY'RE don\u2019t\u00a0x",
    "a  b\t\tc \n\n d\r\n\r\n  e   ",
    "1234567 3.14 \u0661\u0662 \u00bd x\u00b2",
    "Gr\u00fc\u00dfe e\u0301 \u5317\u4eac\u5e02 \u0e44\u0e17\u0e22",
    "\U0001f469\u200d\U0001f4bb \u200b",
    "def f(x):\n\treturn x**2  # !!!\n",
    "\x00\x01\x7f\ufffd\ufeff" + "ab" * 300,
)


class Encode(Protocol):
    """Ids of all texts one behind the other, uint32, and how many each has, int64."""

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]: ...


class EncoderDiffers(ValueError):
    """The faster package gives other ids; the message names the text."""


def by_tokenizers(tokenizer: Tokenizer) -> Encode:
    """Ids by `tokenizers`."""

    def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        lists = tokenizer.encode_batch(texts)
        counts = np.fromiter(map(len, lists), np.int64, len(lists))
        flat = np.empty(int(counts.sum()), np.uint32)
        start = 0
        for ids in lists:  # an array takes a list in a quarter of the time that numpy needs
            flat[start : start + len(ids)] = np.frombuffer(array("I", ids), np.uint32)
            start += len(ids)
        return flat, counts

    return encode


class _Checked:
    """Ids by the faster package, some of them compared."""

    def __init__(self, tokenizer: Tokenizer, backend: Any) -> None:
        self._backend, self._slow = backend, by_tokenizers(tokenizer)
        self._eos = tokenizer.eos_token
        self._first = FIRST_CHARACTERS
        self._seen = 0
        texts = [*DIFFICULT, f"end{self._eos} {self._eos}begin"]
        self._compare(texts, *self._fast(texts))

    def _fast(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        ids, offsets = self._backend.encode_batch_flat(texts)
        counts = np.diff(np.frombuffer(offsets, "<u8").astype(np.int64))
        return np.frombuffer(ids, "<u4"), counts

    def _compare(self, texts: list[str], flat: np.ndarray, counts: np.ndarray) -> None:
        ids, expected = self._slow(texts)
        if np.array_equal(counts, expected) and np.array_equal(ids, flat):
            return
        for text in texts:
            ours, theirs = self._fast([text])[0], self._slow([text])[0]
            if not np.array_equal(ours, theirs):
                raise EncoderDiffers(
                    f"--encoder fastokens: gives other ids than tokenizers for {text[:60]!r}; "
                    "use --encoder tokenizers"
                )

    def __call__(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        flat, counts = self._fast(texts)
        ends = np.cumsum(counts)
        for number, text in enumerate(texts):
            if self._first > 0 or (self._seen + number) % SPOT == 0:
                self._first -= len(text)
                stop = int(ends[number])
                start = stop - int(counts[number])
                self._compare([text], flat[start:stop], counts[number : number + 1])
        self._seen += len(texts)
        return flat, counts


def check_available(name: str) -> None:
    """Refuse early what cannot be used.

    Raises:
        ValueError: the package is missing.
    """
    if name != NAMES[0] and importlib.util.find_spec(name) is None:
        raise ValueError(f"--encoder {name}: the package is missing: pip install {name}")


def make_encoder(name: str, tokenizer: Tokenizer) -> Encode:
    """How texts become ids.

    Raises:
        ValueError: the package cannot read this tokenizer.
        EncoderDiffers: its ids are others.
    """
    if name == "tokenizers":
        return by_tokenizers(tokenizer)
    import fastokens

    load: Callable[[str], Any] = fastokens.Tokenizer.from_file
    try:
        backend = load(str(tokenizer.files[0]))
    except Exception as error:  # the package raises what its parser raises
        reason = " ".join(str(error).split())
        raise ValueError(
            f"--encoder fastokens: cannot read {tokenizer.files[0]}: {reason}; use --encoder "
            "tokenizers"
        ) from None
    return _Checked(tokenizer, backend)
