"""The trainer, but rank 1 raises at its fifth micro-batch; run by test_pipeline_runs.py."""

import os
import sys

from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.training.steps import DataFeed  # noqa: E402

read_next, reads = DataFeed.__next__, []


def failing_read(self):
    reads.append(None)
    if os.environ["RANK"] == "1" and len(reads) == 5:
        raise RuntimeError("a worm in the tape")
    return read_next(self)


DataFeed.__next__ = failing_read  # type: ignore[method-assign]

if __name__ == "__main__":
    from megatron_lt2.train import main

    sys.exit(main())
