"""A folder that appears when it is complete, and not before."""

import json
import os
import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron_lt2.atomic import fsync_directory, fsync_file

CARD = "README.md"
OURS = "megatron_lt2"
"""Stands in the card of every export."""


def is_export(folder: Path) -> bool:
    """Whether a folder holds a model that we exported, so that another may replace it."""
    try:
        kind = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"]
        if kind == "lt2":
            return True
        card = (folder / CARD).read_text(encoding="utf-8")
        return OURS in card and f"\n- {kind}\n" in card
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextmanager
def new_folder(
    target: Path,
    *,
    overwrite: bool = False,
    ours: Callable[[Path], bool] = is_export,
    kind: str = "exported LT2 model",
) -> Iterator[Path]:
    """A temporary folder that becomes `target` when the block ends without an error.

    Args:
        target: the folder to make.
        overwrite: replace one that is there, if `ours` says that it is one of ours.
        ours: see `overwrite`.
        kind: what `ours` looks for, in words.

    Raises:
        ValueError: `target` exists and is not empty, and overwriting was not asked for or it is not
            one of ours.
    """
    # A link stays one: the folder that it names is replaced.
    target = target.resolve() if target.is_symlink() else target.absolute()
    _remove_leftovers(target)
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise ValueError(f"{target}: already exists; name another folder or add --overwrite")
        if not ours(target):
            raise ValueError(f"{target}: holds no {kind}, so it is not overwritten")
    elif target.exists() and not target.is_dir():
        raise ValueError(f"{target}: is a file")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = _beside(target, "partial")
    temporary.mkdir()
    try:
        yield temporary
        for path in temporary.rglob("*"):
            (fsync_directory if path.is_dir() else fsync_file)(path)
        fsync_directory(temporary)
        _swap(temporary, target)
        fsync_directory(target.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _swap(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = _beside(target, "old")
    target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old)


def _beside(target: Path, kind: str) -> Path:
    """A hidden neighbour, whose name says which process of which machine made it."""
    return target.parent / f".{target.name}.{socket.gethostname()}-{os.getpid()}.{kind}"


def _remove_leftovers(target: Path) -> None:
    """Tidy up after processes of this machine that were killed; a folder that one was about to
    replace comes back."""
    pattern = rf"\.{re.escape(target.name)}\.{re.escape(socket.gethostname())}-(\d+)\.(partial|old)"
    for path in sorted(target.parent.glob(".*")) if target.parent.is_dir() else []:
        found = re.fullmatch(pattern, path.name)
        if found is None or _is_alive(int(found[1])):
            continue
        if found[2] == "old" and not target.exists():
            path.rename(target)
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
