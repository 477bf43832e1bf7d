"""Runs of the tokenizer that die at a chosen moment, in a forked process."""

import os
from collections.abc import Callable
from pathlib import Path

from data_prep.append_file import AppendFile
from data_prep.build import Request, tokenize_files
from data_prep.journal import Journal

DEAD = 9


def in_child(work: Callable[[], int]) -> int:
    """Run something in a forked process; its exit code."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            silence = os.open(os.devnull, os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
            code = work()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def die_at(moment: int) -> None:
    """End this process without any clean-up at the n-th write, sync, journal line or rename.

    A write that it dies in leaves half of its bytes, as a kill between two pages may.
    """
    left = [moment]

    def passes() -> bool:
        left[0] -= 1
        return left[0] >= 0

    write, sync, append, replace = AppendFile.write, AppendFile.sync, Journal.append, os.replace

    def dying_write(self, data):
        if passes():
            return write(self, data)
        write(self, data[: len(data) // 2])
        self._stream.flush()
        os._exit(DEAD)

    def dying_sync(self):
        return sync(self) if passes() else os._exit(DEAD)

    def dying_append(self, line):
        if passes():
            return append(self, line)
        self._stream.write(b'{"next": [0, ')
        self._stream.flush()
        os._exit(DEAD)

    def dying_replace(*paths):
        return replace(*paths) if passes() else os._exit(DEAD)

    AppendFile.write, AppendFile.sync = dying_write, dying_sync
    Journal.append = dying_append
    os.replace = dying_replace


def killed_at(moment: int, request: Request) -> bool:
    """Start a run that dies at a moment; False if it came to its end before."""

    def work() -> int:
        die_at(moment)
        tokenize_files(request)
        return 0

    code = in_child(work)
    assert code in (0, DEAD), code
    return code == DEAD


def contents(folder: Path) -> dict[str, bytes]:
    """All files of a folder."""
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
