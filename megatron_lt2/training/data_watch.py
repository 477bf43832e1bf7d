"""Token files that change under a run are found before the next checkpoint.

At the start, size and checksum stand in the manifest, and only the size is looked at: reading the
files takes too long. So their time stamps are kept in the run folder, and whoever changes a file
without changing its manifest is found by the checksum, at the next start or the next checkpoint.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron_lt2.atomic import sha256_file, write_json_atomic
from megatron_lt2.data.manifest import read_manifest, token_files

STAMPS = "data_stamps.json"


class DataWatch:
    """The token files of one run, as rank 0 sees them.

    Args:
        prefixes: of the token files.
        run_dir: where the stamps are kept.
    """

    def __init__(self, prefixes: list[str], run_dir: str | Path) -> None:
        self.file = Path(run_dir) / STAMPS
        self.checksums: dict[str, str] = {}
        for prefix in prefixes:
            files = token_files(prefix, read_manifest(prefix))
            self.checksums |= {str(path): facts["sha256"] for path, facts in files.items()}
        self.stamps = {name: _stamp(name) for name in self.checksums}

    def changed_since_last_start(self) -> str | None:
        """Which file is no longer what its manifest says, or None; keeps the stamps of now."""
        before: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            before = json.loads(self.file.read_text(encoding="utf-8"))
        for name, stamp in self.stamps.items():
            known = before.get(name)
            if known and known["sha256"] == self.checksums[name] and known["stamp"] != stamp:
                complaint = self._compare(name)
                if complaint:
                    return complaint
        with suppress(OSError):
            write_json_atomic(
                self.file,
                {n: {"sha256": self.checksums[n], "stamp": s} for n, s in self.stamps.items()},
            )
        return None

    def changed(self) -> str | None:
        """Which file is no longer what it was when the run began, or None."""
        for name, stamp in self.stamps.items():
            now = _stamp(name)
            if now != stamp:
                complaint = self._compare(name)
                if complaint:
                    return complaint
                self.stamps[name] = now
        return None

    def _compare(self, name: str) -> str | None:
        """Copied or touched, or something else?"""
        try:
            same = sha256_file(name) == self.checksums[name]
        except OSError as error:
            return f"{name}: {error.strerror}, while the run reads it; put it back"
        if same:
            return None
        return (
            f"{name}: changed since the run read it first, and its checksum is not that of the "
            "manifest; put the file back and start again: the run goes on from its last checkpoint"
        )


def _stamp(name: str) -> list[int]:
    """Size, modification time and identity of a file; empty if it is gone."""
    with suppress(OSError):
        facts = Path(name).stat()
        return [facts.st_size, facts.st_mtime_ns, facts.st_ino]
    return []
