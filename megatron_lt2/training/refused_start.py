"""A start that is refused leaves the run folder as it was.

Some mistakes show only when the data is indexed, the model built or the checkpoint read. By then
the folder has an index of the data, an empty log, a lock. Until the run begins, a ConfigError takes
back what this start has added.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.training.run_lock import LOCK


def missing_folders(run_dir: str | Path) -> list[Path]:
    """The run folder and those above it that do not exist yet, innermost first."""
    folder = Path(run_dir).absolute()
    return [path for path in (folder, *folder.parents) if not path.exists()]


@contextmanager
def leaves_nothing(run_dir: str | Path, missing: list[Path], active: bool) -> Iterator[None]:
    """While a start may still be refused; the run folder is locked, so all that is new is ours.

    Args:
        run_dir: folder of the run.
        missing: what `missing_folders` said before the folder was locked.
        active: whether this rank tidies up.
    """
    folder = Path(run_dir).absolute()
    known = set(_entries(folder)) if active else set()
    try:
        yield
    except ConfigError:
        if active:
            _take_back(folder, known, missing)
        raise


def _entries(folder: Path) -> list[Path]:
    """What is in the run folder, and in the folder that every start may add to."""
    return [path for place in (folder / "data_cache", folder) for path in place.glob("*")]


def _take_back(folder: Path, known: set[Path], missing: list[Path]) -> None:
    with suppress(OSError):
        for path in _entries(folder):
            if path in known:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink()
        if missing:
            (folder / LOCK).unlink(missing_ok=True)
        for path in missing:
            path.rmdir()  # stops at one that somebody else uses
