"""FLA's autotuners take a known configuration instead of timing their candidates.

Triton's `Autotuner.run` is wrapped, in one place. Autotuners of other packages go through
untouched, and so do FLA's for which the table has nothing to say about this architecture. A known
key costs what it did before: the key is made once here instead of in Triton.

Read in Triton 3.8 and fla-core 0.6.0, and refused elsewhere (`supported`).
"""

import importlib
import sys
import time
from collections.abc import Callable
from typing import Any

from megatron_lt2.kernels.backend import fla_version, triton_version
from megatron_lt2.tuning import tiles
from megatron_lt2.tuning.table import FLA, TRITON, TunedTable

TUNE = "python -m megatron_lt2.warmup --config FILE --tune"
_FIELDS = ("num_warps", "num_stages", "num_ctas", "maxnreg")

_original: Callable[..., Any] | None = None
_active: "Tuning | None" = None


def supported() -> bool:
    """Whether Triton and FLA are of the versions whose inside is known here."""
    fla, triton = fla_version(), triton_version()
    if fla is None or triton is None:
        return False
    return str(fla) == FLA and f"{triton.major}.{triton.minor}" == TRITON


class Tuning:
    """What FLA's autotuners do from now on.

    Args:
        table: known configurations.
        search: time the candidates of an unknown key, and keep the result in `found`; otherwise
            the configuration of the most similar key is taken, and a line says so once a kernel.
        only_new: search for kernels only of which the table has no key at all.
        all_candidates: run every candidate of an unknown key and keep none: for collecting what a
            search would compile.
        deadline: on `time.monotonic()`; after it nothing is searched.
        found: takes the results of searches.
        kept: called after each.
        say: takes a line of text.
    """

    def __init__(
        self,
        table: TunedTable,
        *,
        search: bool = False,
        only_new: bool = False,
        all_candidates: bool = False,
        deadline: float = float("inf"),
        found: TunedTable | None = None,
        kept: Callable[[], None] = lambda: None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.table, self.search, self.all_candidates = table, search, all_candidates
        self.only_new = only_new
        self.deadline, self.kept = deadline, kept
        self.found = TunedTable(table.architecture) if found is None else found
        self.say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._told: set[str] = set()

    def run(self, tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the place of `Autotuner.run`, for a tuner of FLA with several candidates."""
        key = autotune_key(tuner, args, kwargs)
        config = tuner.cache.get(key)
        if config is None:
            name = kernel_name(tuner)
            known = self.table.exact(name, key) or self.found.exact(name, key)
            config = as_candidate(tuner, known) if known else None
            if config is None:
                return self._unknown(tuner, name, key, args, kwargs)
            tuner.cache[key] = config
        return launch(tuner, config, args, kwargs)

    def _unknown(
        self, tuner: Any, name: str, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        if self.all_candidates:
            for config in _candidates(tuner, args, kwargs):
                launch(tuner, config, args, kwargs)
            return None
        wanted = self.search and not (self.only_new and self.table.nearest(name, key))
        if wanted and time.monotonic() < self.deadline:
            assert _original is not None
            tuner.__dict__["do_bench"] = _short_benchmark
            tuner.cache_results = False  # not timings of an earlier search: those are in the table
            result = _original(tuner, *args, **kwargs)
            timings = getattr(tuner, "configs_timings", None) or {}
            best = tuner.cache[key]
            ms = timings.get(best, 0.0)
            self.found.put(name, key, as_data(best), ms[0] if isinstance(ms, list | tuple) else ms)
            self.kept()
            return result
        return self._most_similar(tuner, name, key, args, kwargs)

    def _most_similar(
        self, tuner: Any, name: str, key: tuple[Any, ...], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """The first that fits the GPU of: similar keys' configurations, then FLA's own order."""
        from_table = [as_candidate(tuner, config) for config in self.table.nearest(name, key)]
        similar = [config for config in from_table if config is not None]
        if name not in self._told:
            self._told.add(name)
            taken = "a similar one's" if similar else "FLA's first"
            sizes = list(key[: len(tuner.keys)])
            self.say(f"kernel {name} is not tuned for {sizes}: {taken} is used ({TUNE})")
        out_of_resources = _triton("triton.runtime.errors").OutOfResources
        for config in [*similar, *_candidates(tuner, args, kwargs)]:
            try:
                result = launch(tuner, config, args, kwargs)
            except out_of_resources:  # raised before anything ran
                continue
            tuner.cache[key] = config
            return result
        raise RuntimeError(f"no configuration of {name} fits this GPU")


def install(tuning: Tuning | None, *, own_tiles: bool = True) -> None:
    """Have FLA's autotuners ask `tuning`; None gives them back to Triton.

    Args:
        tuning: what they are told.
        own_tiles: also launch one kernel with block sizes of ours (tiles.py).

    Raises:
        RuntimeError: Triton or FLA is of a version that this was not written for.
    """
    global _original, _active
    if tuning is not None and not supported():
        raise RuntimeError(
            f"tuned configurations are for fla-core {FLA} and Triton {TRITON}, "
            f"not {fla_version()} and {triton_version()}"
        )
    _active = tuning
    autotuner = _triton("triton.runtime.autotuner").Autotuner
    if tuning is not None and own_tiles:
        tiles.install()
    if tuning is not None and _original is None:
        _original = autotuner.run
        autotuner.run = _run
    elif tuning is None and _original is not None:
        autotuner.run, _original = _original, None


def _run(self: Any, *args: Any, **kwargs: Any) -> Any:
    if _active is None or len(self.configs) < 2 or not is_of_fla(self):
        assert _original is not None
        return _original(self, *args, **kwargs)
    return _active.run(self, args, kwargs)


def _triton(module: str) -> Any:
    return importlib.import_module(module)


def is_of_fla(tuner: Any) -> bool:
    """Whether the tuned kernel is defined in FLA."""
    return tuner.base_fn.__module__.split(".")[0] == "fla"


def kernel_name(tuner: Any) -> str:
    """module:function."""
    return f"{tuner.base_fn.__module__}:{tuner.base_fn.__qualname__}"


def autotune_key(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """As Triton makes it: the values of the key arguments, then the dtypes of all tensors."""
    given = {**dict(zip(tuner.arg_names, args, strict=False)), **kwargs}
    named = {name: value for name, value in given.items() if name in tuner.arg_names}
    key = [named[name] for name in tuner.keys if name in named]
    key += [str(value.dtype) for value in named.values() if hasattr(value, "dtype")]
    return tuple(key)


def as_data(config: Any) -> dict[str, Any]:
    """A `triton.Config` as the table has it."""
    data: dict[str, Any] = {"kwargs": dict(config.kwargs)}
    for name in _FIELDS:
        if getattr(config, name) is not None:
            data[name] = getattr(config, name)
    return data


def as_candidate(tuner: Any, data: dict[str, Any]) -> Any:
    """FLA's own candidate that says the same, or None: then the table is of another FLA."""
    for config in tuner.configs:
        if config.pre_hook is None and as_data(config) == data:
            return config
    return None


def _candidates(tuner: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    try:
        return list(tuner.prune_configs(kwargs))
    finally:
        tuner.nargs = None


def launch(tuner: Any, config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the kernel as `config` says, like the end of `Autotuner.run`."""
    tuner.best_config = config
    if config.pre_hook is not None:
        named = dict(zip(tuner.arg_names, args, strict=False))
        config.pre_hook({**named, **kwargs, **config.all_kwargs()})
    return tuner.fn.run(*args, **kwargs, **config.all_kwargs())


def _short_benchmark(call: Callable[[], Any], quantiles: Any) -> Any:
    """A fifth of Triton's time: the candidates of one kernel differ by more than its noise."""
    return _triton("triton.testing").do_bench(call, warmup=5, rep=20, quantiles=quantiles)
