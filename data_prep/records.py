"""From an undecoded record to the text of one document, with faults named as FILE:LINE.

What happens to text that is not as expected; the manifest counts each kind (`notes` of an input):

Left out without being a fault: `empty` (nothing but whitespace, or null), `short` and `long` (the
filters --min-chars and --max-chars).
Kept: `nul` (documents with a NUL character), `eos_inside` (documents whose own text has the EOS).
Changed: `bom` (a byte order mark at the start of a file is dropped).
Faults, which stop the tool or are skipped: see `FAULTS`.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from data_prep.inputs import InputError
from data_prep.readers import Batch, Fields

FAULTS = {
    "invalid_utf8": "bytes that are not UTF-8",
    "not_json": "a line that is not JSON",
    "cut_line": "a last line without an end that is not JSON",
    "wrong_type": "a record that is no object, or a text that is no string",
    "missing_key": "a record without the field of the text",
    "surrogate": "half a surrogate pair",
    "no_boundaries": "a document too long for a tokenizer that needs it whole",
    "broken_file": "a file that breaks off or cannot be decoded; what came before it is kept",
}


@dataclass(frozen=True)
class Document:
    """One document before tokenizing."""

    line: int
    """As its batch counts; `Batch.line` makes it that of the file."""
    text: str
    name: str = ""


def documents(batch: Batch, fields: Fields) -> Iterator[Document | InputError]:
    """Each document of a batch, or what is wrong with it, in order.

    A null text counts as an empty document, and blank lines between JSON records are no documents.
    """
    last = len(batch.records) - 1
    for offset, record in enumerate(batch.records):
        line = batch.first_line + offset
        name = batch.ids[offset] if batch.ids is not None else ""
        try:
            if record is None:
                yield Document(line, "", name)
                continue
            text = _decode(batch, line, record)
            # The undecoded record may be large; nothing needs it any more.
            batch.records[offset] = record = None
            if batch.kind == "json":
                if not text.strip():
                    continue
                cut = batch.unfinished and offset == last
                value = _object(batch, line, text, cut)
                del text
                text = _text(batch, line, value, fields.text_key)
                if fields.id_key is not None:
                    name = _name(value, fields.id_key)
                del value
        except InputError as fault:
            yield fault
            continue
        yield Document(line, text, name)


def document_texts(batch: Batch, fields: Fields) -> Iterator[tuple[int, str]]:
    """(line, text) of each document.

    Raises:
        InputError: the first fault; the message starts with FILE:LINE:.
    """
    for item in documents(batch, fields):
        if isinstance(item, InputError):
            raise item
        yield batch.line(item.line), item.text


def _decode(batch: Batch, line: int, record: bytes) -> str:
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError as error:
        position = error.start
        if batch.kind == "text":
            # The record is a whole file: count up to the line, and the position within it.
            before = record[: error.start]
            line += before.count(b"\n")
            position -= before.rfind(b"\n") + 1
        raise InputError(
            f"{batch.place(line)}: invalid UTF-8 at byte {position + 1} ({error.reason})",
            "invalid_utf8",
        ) from None


def _object(batch: Batch, line: int, line_text: str, cut: bool) -> dict[str, Any]:
    try:
        value = json.loads(line_text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} (column {error.colno})"
        cut_off = "; the file ends in the middle of this line" if cut else ""
        raise InputError(
            f"{batch.place(line)}: not valid JSON: {reason}{cut_off}",
            "cut_line" if cut else "not_json",
        ) from None
    if not isinstance(value, dict):
        raise InputError(
            f"{batch.place(line)}: a {type(value).__name__} instead of a JSON object", "wrong_type"
        )
    return value


_ABSENT = object()


def _field(value: dict[str, Any], key: str) -> Any:
    """The field of that very name, else the dotted way into objects."""
    if key in value:
        return value[key]
    found: Any = value
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return _ABSENT
        found = found[part]
    return found


def _text(batch: Batch, line: int, value: dict[str, Any], key: str) -> str:
    text = _field(value, key)
    if text is _ABSENT:
        known = ", ".join(sorted(value)[:8]) or "no fields"
        raise InputError(
            f"{batch.place(line)}: no field {key!r} (it has {known}); see --text-key", "missing_key"
        )
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(
            f"{batch.place(line)}: field {key!r} holds {type(text).__name__}, not text",
            "wrong_type",
        )
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(
                f"{batch.place(line)}: half a surrogate pair in {key!r}: {error}", "surrogate"
            ) from None
    return text


def _name(value: dict[str, Any], key: str) -> str:
    """The name of a document; empty where the record has none."""
    found = _field(value, key)
    return "" if found is _ABSENT or found is None else str(found)
