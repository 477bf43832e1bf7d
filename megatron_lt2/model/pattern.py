"""Layer patterns: which mixer serves which layer.

Grammar: `item ("+" item)*` with `item = [COUNT "*"] NAME`, e.g. `4*gdn+full`. The pattern is
repeated and cut to the number of layers, so 4*gdn+full over 21 layers puts full attention at 4, 9,
14 and 19 (LT2's interleaved layout). A list names the mixer of every layer outright.
"""

import re

_ITEM = re.compile(r"(?:(\d+)\s*\*\s*)?([a-z][a-z0-9_]*)")


def expand_pattern(pattern: str | list[str], num_layers: int, known: tuple[str, ...]) -> list[str]:
    """The mixer name of every layer.

    Raises:
        ValueError: the pattern does not parse, names an unknown mixer, or a list has the wrong
            length.
    """
    if isinstance(pattern, str):
        period: list[str] = []
        for item in pattern.split("+"):
            match = _ITEM.fullmatch(item.strip())
            if match is None:
                raise ValueError(
                    f"model.pattern {pattern!r}: cannot read {item.strip()!r}; "
                    "write it like 4*gdn+full, or list the mixer of every layer"
                )
            period += [match.group(2)] * int(match.group(1) or 1)
        if not period:
            raise ValueError(f"model.pattern {pattern!r} has no layer; write it like 4*gdn+full")
        names = [period[i % len(period)] for i in range(num_layers)]
    else:
        names = list(pattern)
        if len(names) != num_layers:
            raise ValueError(
                f"model.pattern lists {len(names)} mixers for model.num_layers {num_layers}; "
                "make the two equal"
            )
    for name in names:
        if name not in known:
            raise ValueError(
                f"model.pattern {pattern!r}: unknown mixer {name!r}; known are {', '.join(known)}"
            )
    return names
