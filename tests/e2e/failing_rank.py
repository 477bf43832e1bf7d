"""The trainer, but rank 1 fails at its fifth micro-batch, in the way that FAILURE names."""

import os
import signal
import sys

from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.training.steps import DataFeed  # noqa: E402

read_next, reads = DataFeed.__next__, []


def failing_read(self):
    reads.append(None)
    if os.environ["RANK"] == "1" and len(reads) == 5:
        way = os.environ.get("FAILURE", "raise")
        if way == "exit":
            os._exit(7)
        if way == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError("a worm in the tape")
    return read_next(self)


DataFeed.__next__ = failing_read  # type: ignore[method-assign]

if __name__ == "__main__":
    from megatron_lt2.train import main

    sys.exit(main())
