"""Layer patterns: which mixer serves which layer, and which mask it has in which loop.

    pattern = part ("->" part)*      one part for all loops, or one a loop
    part    = items, or items with one [items] among them
    item    = [COUNT "*"] NAME ["=" SIZE]

`4*gdn+full` is repeated and cut to the number of layers, so that over 21 layers full attention
stands at 4, 9, 14 and 19 (LT2's interleaved layout). In `full+[4*gdn]+full` the ends stand where
they are written, and what is in brackets is repeated and cut to fill the layers between them
("bookend"). `full->window=128` names a part for each loop: the weights are the same, so only `full`
and `window` may take each other's place, and SIZE is the window in that loop (default:
model.window.size). A list names the mixer of every layer outright.
"""

import difflib
import re
from typing import NamedTuple

_ITEM = re.compile(r"(?:(\d+)\s*\*\s*)?([A-Za-z][A-Za-z0-9_]*)(?:\s*=\s*(\d+))?")
LOOP = "->"
MASKS = ("full", "window")
"""Mixers with the same weights."""


class Layer(NamedTuple):
    """A mixer by name, and the window that the pattern gives it."""

    name: str
    window: int | None = None


def expand_pattern(pattern: str | list[str], num_layers: int, known: tuple[str, ...]) -> list[str]:
    """The mixer name of every layer; of one whose mask changes between loops, "full" if that is
    among them.

    Raises:
        ValueError: the pattern does not parse, names an unknown mixer, or a list has the wrong
            length.
    """
    if not isinstance(pattern, str):
        names = list(pattern)
        if len(names) != num_layers:
            raise ValueError(
                f"model.pattern lists {len(names)} mixers for model.num_layers {num_layers}; "
                "make the two equal"
            )
        _check_known(pattern, names, known)
        return names
    parts = _parts(pattern, num_layers, known)
    return ["full" if "full" in names else names[0] for names in _names_by_layer(parts)]


def loop_windows(
    pattern: str | list[str], num_layers: int, loops: int, size: int, known: tuple[str, ...]
) -> list[list[int | None]] | None:
    """The window of every layer in every loop [loops][layers], None for all tokens (and for other
    mixers); None if the pattern is the same in all loops.

    Args:
        pattern, num_layers, known: as `expand_pattern`.
        loops: T.
        size: of a window that the pattern does not give.

    Raises:
        ValueError: as `expand_pattern`, or there are not as many parts as loops.
    """
    if not isinstance(pattern, str) or LOOP not in pattern:
        return None
    parts = _parts(pattern, num_layers, known)
    if len(parts) != loops:
        raise ValueError(
            f"model.pattern {pattern!r} has {len(parts)} parts for model.loops {loops}; write one "
            "part, or one for each loop"
        )
    return [
        [(layer.window or size) if layer.name == "window" else None for layer in part]
        for part in parts
    ]


def cut_off(pattern: str | list[str], num_layers: int) -> str | None:
    """What is wrong with a pattern so long that a mixer it names gets no layer, or None."""
    if isinstance(pattern, str):
        if "[" in pattern:
            return None
        period = [layer.name for layer in _items(pattern, pattern.split(LOOP)[0])]
    else:
        period = pattern
    lost = [name for name in period[num_layers:] if name not in period[:num_layers]]
    if not lost:
        return None
    return (
        f"model.pattern {pattern!r} is {len(period)} layers long and model.num_layers "
        f"{num_layers}, so that {lost[0]} gets no layer; write a shorter pattern or set "
        f"model.num_layers {len(period)}"
    )


def _parts(pattern: str, num_layers: int, known: tuple[str, ...]) -> list[list[Layer]]:
    """Every layer of every part."""
    parts = [_layers(pattern, part, num_layers) for part in pattern.split(LOOP)]
    for part in parts:
        _check_known(pattern, [layer.name for layer in part], known)
        for layer in part:
            if layer.window is not None and (layer.name != "window" or len(parts) == 1):
                raise ValueError(
                    f"model.pattern {pattern!r}: {layer.name}={layer.window} gives a size, which "
                    "only 'window' has in a pattern with a part for each loop; set "
                    "model.window.size"
                )
            if layer.window == 0:
                raise ValueError(
                    f"model.pattern {pattern!r}: a window of 0 tokens sees nothing; use 1 or more"
                )
    for number, names in enumerate(_names_by_layer(parts)):
        if len(set(names)) > 1 and not set(names) <= set(MASKS):
            different = " and ".join(dict.fromkeys(names))
            raise ValueError(
                f"model.pattern {pattern!r}: layer {number} is {different} in different loops; "
                "loops share weights, so only full and window may change"
            )
    return parts


def _names_by_layer(parts: list[list[Layer]]) -> list[list[str]]:
    return [[layer.name for layer in column] for column in zip(*parts, strict=True)]


def _layers(pattern: str, part: str, num_layers: int) -> list[Layer]:
    """The layers of one part."""
    if "[" not in part and "]" not in part:
        period = _items(pattern, part)
        return [period[i % len(period)] for i in range(num_layers)]
    match = re.fullmatch(r"\s*(?:([^\[\]]*)\+)?\s*\[([^\[\]]*)\]\s*(?:\+([^\[\]]*))?\s*", part)
    if match is None:
        raise ValueError(
            f"model.pattern {pattern!r}: cannot read the brackets of {part.strip()!r}; write one "
            "pair, with + around it, like full+[4*gdn]+full"
        )
    first, middle, last = (
        [] if text is None else _items(pattern, text) for text in match.group(1, 2, 3)
    )
    room = num_layers - len(first) - len(last)
    if room < 1:
        raise ValueError(
            f"model.pattern {pattern!r}: its ends take {len(first) + len(last)} layers of "
            f"model.num_layers {num_layers}, which leaves none for the brackets; use more layers"
        )
    if len(middle) > room and not {x.name for x in middle[room:]} <= {
        x.name for x in middle[:room]
    }:
        raise ValueError(
            f"model.pattern {pattern!r}: what is in brackets is {len(middle)} layers long and has "
            f"room for {room}, so that {middle[room].name} gets no layer; use more layers"
        )
    return [*first, *(middle[i % len(middle)] for i in range(room)), *last]


def _items(pattern: str, text: str) -> list[Layer]:
    layers: list[Layer] = []
    for item in text.split("+"):
        match = _ITEM.fullmatch(item.strip())
        if match is None:
            raise ValueError(
                f"model.pattern {pattern!r}: cannot read {item.strip()!r}; "
                "write it like 4*gdn+full, or list the mixer of every layer"
            )
        count = int(match.group(1) or 1)
        if count == 0:
            raise ValueError(
                f"model.pattern {pattern!r}: {item.strip()!r} makes no layer; leave it out"
            )
        window = None if match.group(3) is None else int(match.group(3))
        layers += [Layer(match.group(2), window)] * count
    return layers


def _check_known(pattern: str | list[str], names: list[str], known: tuple[str, ...]) -> None:
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name.lower(), known, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"model.pattern {pattern!r}: unknown mixer {name!r}; {hint}known are "
                f"{', '.join(known)}"
            )
