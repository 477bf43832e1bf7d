"""One run folder, one run: a second start while the first is alive would remove its files."""

import fcntl
import os
import socket
from pathlib import Path
from typing import IO

from megatron_lt2.config.errors import ConfigError

LOCK = ".lock"


def lock_run(run_dir: str | Path) -> IO[str] | None:
    """Hold the folder until this process ends; keep what is returned.

    Returns:
        The lock, or None where the file system has no locks.

    Raises:
        ConfigError: another process holds it, or the folder cannot be written.
    """
    folder = Path(run_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+")
    except OSError as error:
        raise ConfigError(f"run_dir {run_dir}: cannot be written ({error.strerror})") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        raise ConfigError(
            f"run_dir {run_dir}: in use by {file.read().strip() or 'another run'}; wait for it, or "
            "choose another run_dir"
        ) from None
    except OSError:
        return None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file
