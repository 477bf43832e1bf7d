"""Python's garbage collection at set times instead of whenever it likes.

A step makes and drops some hundred thousand objects, which sets off collections that look at every
object of the process while the GPU waits: up to a tenth of a second in a forward pass of the 1.3B
model, and on another step on every rank, so that all wait for each.
"""

import gc

INTERVAL = 100
"""Steps between collections."""


class Collections:
    """Turns automatic collection off while it lasts, and collects every `INTERVAL` steps."""

    def __init__(self) -> None:
        self._steps = 0
        self._before = gc.isenabled()

    def __enter__(self) -> "Collections":
        gc.disable()
        return self

    def __exit__(self, *unused: object) -> None:
        gc.unfreeze()
        if self._before:
            gc.enable()

    def after_step(self) -> None:
        """Count a step. After the first, what is there stays, so later collections skip it."""
        self._steps += 1
        if self._steps == 1:
            gc.collect()
            gc.freeze()
        elif self._steps % INTERVAL == 0:
            gc.collect()
