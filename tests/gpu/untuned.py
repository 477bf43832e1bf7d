"""Let Triton kernels run with the first configuration that fits, instead of timing all of them.

Tests ask whether a kernel is right, not how fast it is; tuning every shape takes minutes.
"""

from typing import Any


def install() -> None:
    """From now on no kernel is tuned in this process. Idempotent."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.errors import OutOfResources

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        try:
            for config in self.prune_configs(kwargs):
                if config.pre_hook is not None:
                    config.pre_hook({**self.nargs, **kwargs, **config.all_kwargs()})
                try:
                    return self.fn.run(*args, **kwargs, **config.all_kwargs())
                except OutOfResources:
                    continue
        finally:
            self.nargs = None
        raise RuntimeError(f"no configuration of {self.base_fn.__name__} fits this GPU")

    Autotuner.run = run
