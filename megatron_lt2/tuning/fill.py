"""The cache gets the kernels of a run: collected, compiled side by side, and stamped."""

import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.training import rehearsal
from megatron_lt2.tuning import autotuners, compile_ahead, stamp
from megatron_lt2.tuning.stamp import architecture, say
from megatron_lt2.tuning.table import known_table


def warm(
    config: RunConfig, cache: Path, workers: int | None, *, force: bool, deadline: float
) -> int:
    """Compile what the steps of `config` launch, unless a stamp says that it was done.

    Args:
        config: the run, with a vocabulary.
        cache: Triton's folder.
        workers: processes; default: `compile_ahead.default_workers`.
        force: whatever stamps say.
        deadline: on `time.monotonic()`.

    Returns:
        0, or 1 if some kernels are not in the cache.
    """
    facts = stamp.facts_of(config, architecture())
    path = stamp.stamp_file(cache, facts)

    def there() -> bool:
        if path.exists() and not force:
            say(f"{cache} has the kernels of these settings already ({path.name})")
            return True
        return False

    if there():
        return 0
    with stamp.one_at_a_time(cache):
        if there():  # another process was at it
            return 0
        return _compile_run(config, cache, workers, path, facts, deadline)


def _compile_run(
    config: RunConfig,
    cache: Path,
    workers: int | None,
    path: Path,
    facts: dict[str, Any],
    deadline: float,
) -> int:
    started = time.monotonic()
    table = known_table(architecture())
    # Without a table the first step will time all candidates, which at least are compiled then.
    untuned: list[str] = []  # training names them
    tuning = autotuners.Tuning(table, all_candidates=not table, say=untuned.append)
    small = rehearsal.one_of_each(config)

    def walk() -> None:
        rehearsal.start(small.parallel)
        try:
            parts = rehearsal.build(small)
            rehearsal.steps(small, parts)
            rehearsal.selftest(small, parts)
        finally:
            rehearsal.stop()

    variants, complaint = collect(tuning, walk)
    collected = time.monotonic() - started
    count = workers or compile_ahead.default_workers()
    if untuned:
        say(f"{len(untuned)} kernels are not tuned for these shapes ({autotuners.TUNE})")
    say(f"{len(variants)} kernels to compile with {count} processes; found in {collected:.1f} s")
    result = compile_ahead.compile_all(variants, count, deadline=deadline, progress=_progress)
    seconds = time.monotonic() - started
    whole = not complaint and not result.left
    if whole:
        figures = {"kernels": result.count, "seconds": round(seconds, 1), "failed": result.failures}
        stamp.write_stamp(path, facts, **figures)
    for text in [*result.failures, *([complaint] if complaint else [])]:
        print(f"warning: {text}", file=sys.stderr, flush=True)
    left = f", {result.left} left" if result.left else ""
    say(f"{result.count} kernels{left} in {seconds:.1f} s, in {cache}")
    return 0 if whole and not result.failures else 1


def collect(
    tuning: autotuners.Tuning, walk: Callable[[], None]
) -> tuple[list[compile_ahead.Variant], str]:
    """The kernels that `walk` would launch, and what ended it early, if something did.

    Raises:
        ConfigError: the settings of the run do not go together.
    """
    found: dict[Any, compile_ahead.Variant] = {}
    complaint = ""
    autotuners.install(tuning)
    try:
        with compile_ahead.collecting(found), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            walk()
    except ConfigError:
        raise
    except Exception as error:  # what was found is worth compiling all the same
        text = " ".join(str(error).split())[:300]
        complaint = f"the walk through the step ended early: {type(error).__name__}: {text}"
    finally:
        autotuners.install(None)
    return list(found.values()), complaint


def _progress(name: str, seconds: float, done: int, total: int) -> None:
    say(f"{done}/{total} {name} {seconds:.1f} s")
