"""What a setting takes, in words: from the schema's types."""

import difflib
import re
from dataclasses import fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

PLAIN = {int: "whole number", float: "number", str: "text"}
COUNTS = {1: "one", 2: "two", 3: "three"}


def setting_type(cls: type, dotted: str) -> Any:
    """Type of a setting such as model.loops; None if there is no such setting."""
    kind: Any = cls
    for name in dotted.split("."):
        known = {f.name: f.type for f in fields(kind)} if is_dataclass(kind) else {}
        if name not in known:
            return None
        kind = known[name]
    return kind


def kind_in_words(kind: Any) -> str:
    """What a value of this type is, e.g. "a whole number" or "'cosine' or 'wsd'"."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        words = [kind_in_words(part) for part in inner if part is not NoneType]
        words += ["null for the default"] if NoneType in inner else []
        return ", or ".join(words)
    if origin is Literal:
        *first, last = [repr(value) for value in inner]
        return f"{', '.join(first)} or {last}" if first else last
    if origin is list:
        return f"a list of {_many(inner[0])}, e.g. {_example(inner[0], 2)}"
    if origin is tuple:
        count = COUNTS.get(len(inner), str(len(inner)))
        return f"a list of {count} {_many(inner[0])}, e.g. {_example(inner[0], len(inner))}"
    if origin is dict:
        return "names with values, e.g. {name: value}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text"
    return f"a {PLAIN.get(kind, getattr(kind, '__name__', str(kind)))}"


def _many(kind: Any) -> str:
    return f"{PLAIN[kind]}s" if kind in PLAIN else str(kind)


def _example(kind: Any, count: int) -> str:
    one = {int: ["2", "3", "4"], float: ["0.9", "0.95", "0.99"], str: ["a", "b", "c"]}
    return f"[{', '.join(one.get(kind, one[str])[:count])}]"


def type_error(text: str, cls: type) -> str | None:
    """jsonargparse's complaint about a value in plain words; None if it is about something else.

    Args:
        text: its message, on one line.
        cls: the schema.
    """
    found = re.search(r'Parser key "([\w.]+)": (.*)', text)
    if found is None:
        return None
    name, rest = found[1], found[2]
    kind = setting_type(cls, name)
    if kind is None:
        return None
    if is_dataclass(kind):
        first = fields(kind)[0].name
        return f"{name} is a section; set what is in it, e.g. --{name}.{first}"
    value = re.search(r"(?:Got|Given) value: (.*)", rest)
    if value is None:
        return None
    said = value[1].strip()
    hint = ""
    if get_origin(kind) is Literal:
        close = difflib.get_close_matches(said, [str(x) for x in get_args(kind)], n=1)
        hint = f" (did you mean {close[0]}?)" if close else ""
    return f"{name} cannot take {said!r}; give {kind_in_words(kind)}{hint}"
