"""Checkpoints as files: names, completeness, the `latest` pointer, pruning. No tensors here.

checkpoints/iter_0000100.tmp/   being written
checkpoints/iter_0000100/       complete: manifest.json, written last, names every file and its size
checkpoints/latest              text file with the newest folder's name, moved after it is durable
"""

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

from megatron_lt2.atomic import fsync_directory, fsync_file, write_json_atomic, write_text_atomic

MANIFEST = "manifest.json"
LATEST = "latest"
_NAME = re.compile(r"iter_(\d{7,})")


def folder_name(step: int) -> str:
    """Name of the checkpoint after `step` optimizer steps."""
    return f"iter_{step:07d}"


def read_manifest(folder: str | Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: it is missing, unreadable, or a file that it names is absent or of another size.
    """
    folder = Path(folder)
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
        files = manifest["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no usable checkpoint manifest ({error})") from None
    for name, size in files.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found != size:
            raise ValueError(
                f"{file}: {found} bytes, the manifest says {size}; not a whole checkpoint"
            )
    return manifest


def complete_checkpoints(checkpoints: str | Path) -> tuple[list[Path], list[str]]:
    """Complete checkpoint folders, oldest first, and what is wrong with the others."""
    good: list[tuple[int, Path]] = []
    bad = []
    root = Path(checkpoints)
    for folder in sorted(root.iterdir()) if root.is_dir() else []:
        match = _NAME.fullmatch(folder.name)
        if match is None or not folder.is_dir():
            continue
        try:
            read_manifest(folder)
        except ValueError as error:
            bad.append(str(error))
        else:
            good.append((int(match.group(1)), folder))
    return [folder for _, folder in sorted(good)], bad


def newest_complete(checkpoints: str | Path) -> Path | None:
    """The newest complete checkpoint folder. `latest` may lag behind by one; the files decide."""
    good, _ = complete_checkpoints(checkpoints)
    return good[-1] if good else None


def publish(temporary: Path, step: int, facts: dict[str, Any]) -> Path:
    """Make a fully written temporary folder the newest checkpoint.

    Every file is synced, the manifest written, the folder renamed, then `latest` moved.
    """
    names = sorted(p for p in temporary.rglob("*") if p.is_file() and p.name != MANIFEST)
    for path in names:
        fsync_file(path)
    sizes = {str(path.relative_to(temporary)): path.stat().st_size for path in names}
    write_json_atomic(temporary / MANIFEST, {"step": step, **facts, "files": sizes})
    final = temporary.parent / folder_name(step)
    aside = temporary.with_suffix(".old.tmp")
    if final.exists():  # a folder of this step that was not complete
        os.rename(final, aside)
    os.rename(temporary, final)
    shutil.rmtree(aside, ignore_errors=True)
    fsync_directory(final.parent)
    write_text_atomic(final.parent / LATEST, final.name + "\n")
    return final


def prune(checkpoints: Path, keep: int) -> list[str]:
    """Remove complete checkpoints beyond the newest `keep` (0 keeps all); returns their names."""
    good, _ = complete_checkpoints(checkpoints)
    old = good[:-keep] if keep else []
    for folder in old:
        aside = folder.with_name(f"{folder.name}.old.tmp")
        os.rename(folder, aside)  # first: a half-removed folder must not count as complete
        shutil.rmtree(aside)
    return [folder.name for folder in old]


def remove_leftovers(checkpoints: Path) -> list[str]:
    """Remove folders under a temporary name, which a killed run left behind; returns the names."""
    removed = []
    for folder in sorted(checkpoints.glob("iter_*.tmp")) if checkpoints.is_dir() else []:
        shutil.rmtree(folder)
        removed.append(folder.name)
    return removed
