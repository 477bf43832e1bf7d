"""The model's code in an exported folder: files of four packages, flat, with their imports changed.

transformers loads code that travels with a checkpoint from one folder, so `ops/gdn.py` becomes
`ops_gdn.py` and what imports `..ops.gdn` imports `.ops_gdn`; the files of hf/ have names of their
own and keep them. Of the recurrences only those of the model's mixers are copied, and of the rest
what these need.

transformers finds files by the import statements of the one it loads, some versions only by the
first file's own, and mixers are imported by name when a model is built. So the exported modeling
file ends with an import of every file that it does not import itself.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import megatron_lt2

ENTRY = ("hf", "modeling_lt2")
FOLDERS = ("hf", "kernels", "ops", "recurrent")

Source = tuple[str, str]
"""Folder and name of a file, without the suffix."""


def copy_model_code(folder: Path, mixers: Iterable[str]) -> list[str]:
    """Write the code of a model with these mixers into `folder`; returns the file names."""
    from megatron_lt2.recurrent.names import RECURRENT

    package = Path(megatron_lt2.__file__).parent
    needed = [("hf", path.stem) for path in package.glob("hf/*_lt2.py")]
    needed += [("recurrent", RECURRENT[name]) for name in set(mixers) & RECURRENT.keys()]
    texts: dict[Source, str] = {}
    while needed:
        source = needed.pop()
        if source not in texts:
            text = (package / source[0] / f"{source[1]}.py").read_text(encoding="utf-8")
            texts[source], imported = flatten_imports(text, source[0])
            needed += imported
    names = {source: _flat(*source) for source in texts}
    assert len(set(names.values())) == len(names), "two files would have one name"
    own = re.findall(r"^from \.(\w+) import", texts[ENTRY], re.MULTILINE)
    rest = sorted(set(names.values()) - {names[ENTRY], *own})
    texts[ENTRY] += "\n# Named here because transformers copies the files that this one imports.\n"
    texts[ENTRY] += "".join(f"from .{name} import __name__ as _  # noqa\n" for name in rest)
    for source, text in texts.items():
        (folder / f"{names[source]}.py").write_text(text, encoding="utf-8")
    return sorted(f"{name}.py" for name in names.values())


def flatten_imports(text: str, folder: str) -> tuple[str, list[Source]]:
    """The text of a file with its relative imports as they must be in an export.

    Args:
        text: of the file.
        folder: of megatron_lt2 in which it lies.

    Returns:
        The new text, and the files that it imports.
    """
    lines, imported = text.split("\n"), []
    for node in _relative_imports(text):
        path = [folder] if node.level == 1 else []
        path += node.module.split(".") if node.module else []
        assert path[0] in FOLDERS and len(path) < 3, f"{ast.unparse(node)} in {folder}/"
        line = lines[node.lineno - 1]
        if len(path) == 2:
            imported.append((path[0], path[1]))
            line = re.sub(r"from \.[.\w]*", f"from .{_flat(*path)}", line, count=1)
        else:  # from ..ops import gdn
            assert node.lineno == node.end_lineno, f"{ast.unparse(node)} on several lines"
            modules = [(path[0], alias.name) for alias in node.names]
            imported += modules
            renamed = ", ".join(
                f"{_flat(*module)} as {alias.asname or alias.name}"
                for module, alias in zip(modules, node.names, strict=True)
            )
            line = line[: node.col_offset] + f"from . import {renamed}"
        lines[node.lineno - 1] = line
    return "\n".join(lines), imported


def _flat(folder: str, name: str) -> str:
    return name if folder == "hf" else f"{folder}_{name}"


def _relative_imports(text: str) -> Iterator[ast.ImportFrom]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.level:
            yield node
