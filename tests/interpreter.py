"""Run FLA's Triton kernels on the CPU, in Triton's interpreter. Import this before anything of FLA.

TRITON_INTERPRET=1 alone is not enough for FLA; two things are patched here, both private parts of
Triton (seen to work with 3.7 and 3.8):

- The autotuner would time its candidates on a GPU. It takes the first allowed one instead.
- Kernels treat loop indices as Triton scalars (`i_t.to(tl.int64)`), but the interpreter runs
  Python's `range`, which yields integers. While a kernel runs, FLA's modules see a `range` that
  yields scalars.

This proves a kernel's logic and how we call it, in fp32 or fp16; it says nothing about compiled
code, and the interpreter's bf16 arithmetic is wrong.
"""

import builtins
import os
import sys
from collections.abc import Iterator
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402


def _run_first_config(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
    self.nargs = dict(zip(self.arg_names, args, strict=False))
    config = self.prune_configs(kwargs)[0]
    self.best_config = config
    if config.pre_hook is not None:
        config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
    try:
        return self.fn.run(*args, **kwargs, **config.all_kwargs())
    finally:
        self.nargs = None


def _as_int(bound: Any) -> int:
    if isinstance(bound, tl.core.tensor):
        return int(bound.handle.data.item())
    return int(getattr(bound, "value", bound))  # tl.constexpr keeps its number in `value`


def _scalar_range(*bounds: Any) -> Iterator[tl.core.tensor]:
    for index in builtins.range(*(_as_int(bound) for bound in bounds)):
        data = np.array([index], dtype=np.int32)
        yield tl.core.tensor(interpreter.TensorHandle(data, tl.int32), tl.int32)


_run_grid = interpreter.GridExecutor.__call__


def _run_grid_with_scalar_range(self: Any, *args: Any, **kwargs: Any) -> Any:
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("fla.") and m]
    for module in modules:
        module.__dict__["range"] = _scalar_range
    try:
        return _run_grid(self, *args, **kwargs)
    finally:
        for module in modules:
            module.__dict__.pop("range", None)


Autotuner.run = _run_first_config
interpreter.GridExecutor.__call__ = _run_grid_with_scalar_range
