"""From an undecoded record to the text of one document, with faults named as FILE:LINE."""

import json
from collections.abc import Iterator

from data_prep.readers import Batch, InputError


def document_texts(batch: Batch, text_key: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each document of a batch, in order.

    A null text counts as an empty document, and blank lines between JSON records are no documents.

    Raises:
        InputError: invalid UTF-8 or JSON, a record that is not an object, lacks `text_key`, or
            holds something else than text there; the message starts with FILE:LINE:.
    """
    last = len(batch.records) - 1
    for offset, record in enumerate(batch.records):
        line = batch.first_line + offset
        if record is None:
            yield line, ""
            continue
        text = _decode(batch, line, record)
        if batch.kind == "json":
            if not text.strip():
                continue
            cut = batch.unfinished and offset == last
            text = _json_text(f"{batch.path}:{line}", text, text_key, cut)
        yield line, text


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
            f"{batch.path}:{line}: invalid UTF-8 at byte {position + 1} ({error.reason})"
        ) from None


def _json_text(place: str, line_text: str, text_key: str, cut: bool) -> str:
    try:
        value = json.loads(line_text)
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg.removesuffix(' at')} (column {error.colno})"
        cut_off = "; the file ends in the middle of this line" if cut else ""
        raise InputError(f"{place}: not valid JSON: {reason}{cut_off}") from None
    if not isinstance(value, dict):
        raise InputError(f"{place}: a {type(value).__name__} instead of a JSON object")
    if text_key not in value:
        known = ", ".join(sorted(value)[:8]) or "no fields"
        raise InputError(f"{place}: no field {text_key!r} (it has {known}); see --text-key")
    text = value[text_key]
    if text is None:
        return ""
    if not isinstance(text, str):
        raise InputError(f"{place}: field {text_key!r} holds {type(text).__name__}, not text")
    if not text.isascii():
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"{place}: half a surrogate pair in {text_key!r}: {error}") from None
    return text
