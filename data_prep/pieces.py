"""Long documents cut where the tokenizer cuts anyway, so that memory follows a piece.

`tokenizers` needs about 120 bytes for each character of the text it is given. A text is therefore
encoded in pieces where the ids of the pieces, one after the other, are those of the whole. A cut is
taken between an ASCII letter and a space or newline, on two conditions.

The tokenizer is of a kind that works from left to right on what lies before it: a pre-tokenizer
that splits by a regular expression without lookbehind (or by words), a normalizer that changes
characters by themselves, no added token with whitespace in it. A match that ends at the letter ends
there with or without the text behind, because a run of letters ends at whitespace whatever follows,
and the search goes on from the whitespace without looking back.

And around each single cut the tokenizer itself says so: of the `WINDOW` characters on both sides,
taken as one text, a word of the pre-tokenizer begins at the cut, and the ids are those of the two
sides.
"""

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

PIECE = 1 << 17
"""Characters after which a cut is looked for."""
WINDOW = 128
MOST_WHOLE = 4_000_000
"""Characters that are encoded in one go where there is no boundary; about half a GB."""

_CANDIDATE = re.compile(r"[A-Za-z](?=[ \n])")
_LOOKBEHIND = re.compile(r"\(\?<[=!]")
_SPLITTERS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer"}
_HARMLESS = {"Digits", "Punctuation", "CharDelimiterSplit", "UnicodeScripts"}
_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt"}


class NoBoundary(ValueError):
    """A text is too long to be encoded whole, and cannot be cut; the message says why."""


class Cutter:
    """Cuts texts for one tokenizer."""

    def __init__(self, backend: "tokenizers.Tokenizer") -> None:
        self._backend = backend
        self._reason: str | None = None
        """Why this tokenizer's texts cannot be cut; "" if they can; None: not looked at yet."""

    def pieces(self, text: str) -> list[str]:
        """The text in pieces; itself if it is short.

        Raises:
            NoBoundary: a piece would have more than `MOST_WHOLE` characters.
        """
        if len(text) <= 2 * PIECE:
            return [text]
        reason = self.reason()
        if reason:
            if len(text) > MOST_WHOLE:
                raise NoBoundary(f"{len(text)} characters, and {reason}")
            return [text]
        pieces, start = [], 0
        while len(text) - start > 2 * PIECE:
            cut = self._next_cut(text, start)
            if cut is None:
                break
            pieces.append(text[start:cut])
            start = cut
        pieces.append(text[start:])
        longest = max(map(len, pieces))
        if longest > MOST_WHOLE:
            raise NoBoundary(f"{longest} characters without a boundary of words")
        return pieces

    def _next_cut(self, text: str, start: int) -> int | None:
        for found in _CANDIDATE.finditer(text, start + PIECE):
            if self._holds(text, found.end()):
                return found.end()
        return None

    def _holds(self, text: str, cut: int) -> bool:
        left, right = text[max(0, cut - WINDOW) : cut], text[cut : cut + WINDOW]
        plain, first = left + right, len(left)
        normalizer = self._backend.normalizer
        if normalizer is not None:
            plain = normalizer.normalize_str(left + right)
            first = len(normalizer.normalize_str(left))
            if normalizer.normalize_str(left) + normalizer.normalize_str(right) != plain:
                return False
        words = self._backend.pre_tokenizer.pre_tokenize_str(plain)
        if not any(start in (first, first + 1) for _, (start, _) in words):
            return False
        both, one, other = (
            encoding.ids
            for encoding in self._backend.encode_batch_fast(
                [left + right, left, right], add_special_tokens=False
            )
        )
        return both == one + other

    def reason(self) -> str:
        """Why texts of this tokenizer cannot be cut; empty if they can."""
        if self._reason is None:
            self._reason = _why_not(json.loads(self._backend.to_str()))
        return self._reason


def _parts(value: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """The parts of a Sequence, or the one thing there is."""
    if value is None:
        return []
    if value["type"] == "Sequence":
        return [part for item in value[inside] for part in _parts(item, inside)]
    return [value]


def _why_not(tokenizer: dict[str, Any]) -> str:
    for token in tokenizer.get("added_tokens", []):
        if any(character.isspace() for character in token["content"]):
            return f"the added token {token['content']!r} holds whitespace"
    for part in _parts(tokenizer.get("normalizer"), "normalizers"):
        pattern = (part.get("pattern") or {}).get("String", "")
        by_character = part["type"] == "Replace" and len(pattern) == 1
        if part["type"] not in _NORMALIZERS and not by_character:
            return f"its normalizer {part['type']} may depend on where a text begins"
    splits = False
    for part in _parts(tokenizer.get("pre_tokenizer"), "pretokenizers"):
        kind = part["type"]
        if kind == "ByteLevel":
            splits = splits or part.get("use_regex", True)
        elif kind == "Split":
            if _LOOKBEHIND.search(part["pattern"].get("Regex", "")):
                return "its pre-tokenizer looks back"
            splits = True
        elif kind == "Metaspace":
            splits = splits or part.get("split", True)
        elif kind in _SPLITTERS:
            splits = True
        elif kind not in _HARMLESS:
            return f"its pre-tokenizer {kind} is not known to cut at words"
    return "" if splits else "its pre-tokenizer does not cut at words"
