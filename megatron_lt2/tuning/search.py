"""The search for configurations: FLA's candidates are compiled side by side, then timed."""

import sys
import time
from pathlib import Path

import torch

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.mixers.registry import MIXER_NAMES
from megatron_lt2.model.pattern import expand_pattern
from megatron_lt2.training import rehearsal
from megatron_lt2.tuning import autotuners, compile_ahead
from megatron_lt2.tuning.fill import collect
from megatron_lt2.tuning.stamp import architecture, say
from megatron_lt2.tuning.table import TUNABLE, TunedTable, known_table, load_table, own_file

VOCABULARY = 1024
"""Of the small models; no kernel with candidates sees it."""

SAVE_EVERY_S = 2.0


def tune(
    config: RunConfig,
    mixers: list[str],
    lengths: list[int],
    output: Path | None,
    *,
    workers: int | None = None,
    force: bool = False,
    deadline: float = float("inf"),
) -> int:
    """Mixer after mixer: collect all candidates, compile them, time them, write the file.

    Args:
        config: gives width, heads and settings of the mixers.
        mixers, lengths: what is timed; empty for the run's own.
        output: the file, which also says what is tuned already; default: this user's, over the
            shipped one.
        workers: processes that compile.
        force: time everything again.
        deadline: on `time.monotonic()`.

    Returns:
        0, or 1 if a mixer failed.
    """
    arch = architecture()
    model = config.model
    if not mixers:
        used = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
        mixers = [name for name in TUNABLE if name in used]
    lengths = lengths or [config.data.sequence_length]
    target = output or own_file(arch)
    table = known_table(arch) if output is None else load_table(output, arch) or TunedTable(arch)
    if force:
        table = TunedTable(arch)
    say(f"tuning {', '.join(mixers)} at {', '.join(map(str, lengths))} tokens into {target}")
    workers = workers or compile_ahead.default_workers()
    found, failed, saved = TunedTable(arch, torch.cuda.get_device_name()), 0, [time.monotonic()]

    def keep(at_least_s: float = SAVE_EVERY_S) -> None:
        if found and time.monotonic() - saved[0] >= at_least_s:
            found.save(target)
            saved[0] = time.monotonic()

    def in_time(length: int) -> bool:
        return time.monotonic() < deadline

    rehearsal.start(rehearsal.only(config, mixers[0], VOCABULARY).parallel)
    for number, mixer in enumerate(mixers, 1):
        if time.monotonic() >= deadline:
            say(f"time is up before {', '.join(mixers[number - 1 :])}")
            break
        started, before = time.monotonic(), len(found)
        small = rehearsal.only(config, mixer, VOCABULARY)
        small.data.sequence_length = max(lengths)
        known = table.overlaid(found)

        def walk(small: RunConfig = small) -> None:
            parts = rehearsal.build(small)
            rehearsal.steps(small, parts, lengths=lengths, documents=(3,), before=in_time)

        variants, complaint = collect(autotuners.Tuning(known, all_candidates=True), walk)
        rehearsal.free()
        compile_ahead.compile_all(variants, workers, deadline=deadline)
        compiled = time.monotonic() - started
        search = autotuners.Tuning(
            known, search=True, deadline=deadline, found=found, kept=keep, say=lambda text: None
        )
        try:
            if not complaint:
                autotuners.install(search)
                walk()
        except Exception as error:  # a candidate crashed; other mixers may still work
            complaint = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        finally:
            autotuners.install(None)
            keep(0)
        failed += bool(complaint)
        if complaint:
            print(f"warning: {mixer}: {complaint}", file=sys.stderr, flush=True)
        rehearsal.free()
        say(
            f"{number}/{len(mixers)} {mixer}: {len(variants)} candidates compiled in "
            f"{compiled:.0f} s, {len(found) - before} choices, {time.monotonic() - started:.0f} s"
        )
    rehearsal.stop()
    say(f"{len(found)} new choices, {target}")
    return 1 if failed else 0
