"""Distil a student: python -m megatron_lt2.distill --config FILE [--dotted.name value].

Exit codes are those of megatron_lt2.train: 0 done; 2 a setting or the data is wrong; 75 saved and
left early, the same command goes on; 74, 76, 77 and others as there.
"""

import os
import sys
from collections.abc import Sequence

from megatron_lt2.caches import use_cache_folders
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import fail

USAGE = """usage: python -m megatron_lt2.distill --config FILE [options] [--dotted.name value ...]

Make a student with linear mixers of a full-attention teacher, in stages (docs/distillation.md). The
stages lie in run_dir/stages/NN-NAME, each a run folder; started again, a distillation goes on where
it stopped.

  --config FILE    YAML file: teacher, student, stages, and sections of a training run
  --dry-run        print what each stage would be (model, length, memory) and stop; writes nothing
  --world-size N   ranks to assume for --dry-run (default: the ranks of this launch)
  --until N        stop behind stage N, counted from 0
  --part I/N       score only every N-th layer of a selection, for N jobs side by side; job 1 waits
                   for nobody: start it again when the others are done
  --help           this text

example: python -m megatron_lt2.distill --config launchers/configs/distill_ouro_1b4_hybrid.yaml \\
           --teacher imported/ouro --data.path corpus --stages.0.tokens 2e8
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run the stages; returns the exit code."""
    from megatron_lt2 import train
    from megatron_lt2.distill.load import load_settings

    arguments = list(sys.argv[1:] if argv is None else argv)
    if "--help" in arguments or "-h" in arguments:
        print(USAGE, end="")
        return 0
    try:
        dry = "--dry-run" in arguments
        arguments = [a for a in arguments if a != "--dry-run"]
        path, arguments = _take(arguments, "--config")
        world, arguments = _take(arguments, "--world-size")
        until, arguments = _take(arguments, "--until")
        part, arguments = _take(arguments, "--part")
        if path is None:
            raise ConfigError("--config needs a file name, e.g. --config distill.yaml")
        settings = load_settings(path, arguments)
        use_cache_folders()
        if dry:
            from megatron_lt2.distill.describe import describe

            print(describe(settings, _number("--world-size", world)), end="")
            return 0
        from megatron_lt2.distill.run import run_stages

        last = _number("--until", until)
        if last is not None and last >= len(settings.stages):
            raise ConfigError(
                f"--until {last}: stages are numbered 0 to {len(settings.stages) - 1}"
            )
        return run_stages(settings, _part(part), last)
    except train.diverged() as error:
        fail(error, say=os.environ.get("RANK", "0") == "0")
        train.leave_process_group()
        return train.EXIT_DIVERGED
    except (ConfigError, train.UserError) as error:
        local = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        code = fail(error, say=local == "0")
        train.leave_process_group()
        return code
    except Exception:
        train.end_rank_at_once()
        raise


def _take(arguments: list[str], name: str) -> tuple[str | None, list[str]]:
    """The value of an option, and the other arguments."""
    for at, argument in enumerate(arguments):
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2], arguments[:at] + arguments[at + 1 :]
        if argument == name:
            if at + 1 == len(arguments):
                raise ConfigError(f"{name} needs a value")
            return arguments[at + 1], arguments[:at] + arguments[at + 2 :]
    return None, arguments


def _number(name: str, value: str | None) -> int | None:
    if value is None:
        return None
    if not value.isdigit():
        raise ConfigError(f"{name} {value!r} is no whole number")
    return int(value)


def _part(value: str | None) -> tuple[int, int]:
    if value is None:
        return 1, 1
    first, _, second = value.partition("/")
    if not (first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise ConfigError(f"--part {value!r} is not like 2/8, the second of eight jobs")
    return int(first), int(second)


if __name__ == "__main__":
    sys.exit(main())
