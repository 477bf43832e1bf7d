"""Helper processes end with the process that needs them, even when that is killed.

Otherwise a run that was killed leaves processes behind which keep its output open and may still
write into its folder. Only the standard library is imported, see tools/spawn.py.
"""

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int | None = None) -> None:
    """Let the kernel kill this process when its parent dies; a no-op where there is no Linux.

    Args:
        parent: process id of the parent, to end at once if it has died before this call.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
