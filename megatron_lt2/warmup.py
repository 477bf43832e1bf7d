"""Compile what a run's steps need before it starts, and time FLA's kernels on this GPU.

    python -m megatron_lt2.warmup --config FILE          # compile, side by side
    python -m megatron_lt2.warmup --config FILE --tune   # choose FLA's configurations by timing

A trainer that finds no stamp of its settings, GPU and software in the cache runs the first form by
itself (precision.warmup). How, and why not by Triton's own means: megatron_lt2/tuning.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_lt2.caches import use_cache_folders
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import fail, load_config, load_saved, to_yaml
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.orphans import die_with_parent
from megatron_lt2.tuning.stamp import architecture, facts_of, say, stamp_file
from megatron_lt2.tuning.table import FLA, TRITON, TUNABLE, known_table

LENGTHS = (4096, 8192, 16384, 32768)
TRAINER_WAITS_S = 420.0
"""Less than the ten minutes that torch lets the other ranks wait for the first one."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.warmup",
        description="Compile the kernels of a run's training step into Triton's cache, several at "
        "a time, so that the first step need not. Further arguments are settings of the run, e.g. "
        "--parallel.tensor 2. Without a GPU there is nothing to do.",
        epilog="example: python -m megatron_lt2.warmup --config launchers/configs/lt2_1b3.yaml",
        allow_abbrev=False,
    )
    parser.add_argument("--config", help="YAML file of the run")
    parser.add_argument("--resolved", help=argparse.SUPPRESS)  # the trainer's, whole
    parser.add_argument("--workers", type=int, help="processes (default: cores, at most 16)")
    parser.add_argument("--force", action="store_true", help="although the cache has a stamp")
    parser.add_argument(
        "--tune",
        action="store_true",
        help="time the candidates of FLA's kernels that are not tuned yet for this GPU",
    )
    parser.add_argument("--mixers", help="for --tune: comma-separated, or all; default: the run's")
    parser.add_argument(
        "--lengths",
        help="for --tune: sequence lengths (default: the run's; with --mixers all "
        + ",".join(map(str, LENGTHS))
        + ")",
    )
    parser.add_argument(
        "--output",
        help="for --tune: the file that is written, and that says what is tuned already; default: "
        "this user's in LT2_CACHE_DIR or ~/.cache/megatron_lt2, which overlays the package's",
    )
    parser.add_argument(
        "--minutes", type=float, help="begin nothing new after so long; what was done is kept"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """The command: 0 done, 1 some kernels could not be compiled or timed, 2 a wrong setting."""
    args, settings = _parser().parse_known_args(argv)
    started = time.monotonic()
    deadline = started + 60 * args.minutes if args.minutes is not None else float("inf")
    try:
        mixers, lengths = _check(args)
        config = _config(args, settings)
    except ConfigError as error:
        return fail(error)
    cache = use_cache_folders()
    from megatron_lt2.parallel import platform

    platform.install()
    if not platform.has_gpu():
        say("no GPU here, so there is nothing to compile")
        return 0
    _be_the_only_rank()
    try:
        check_can_compile(config, tune=args.tune)
        from megatron_lt2.tuning import fill

        if args.tune:
            from megatron_lt2.tuning import search

            target = Path(args.output) if args.output else None
            return search.tune(
                config,
                mixers,
                lengths,
                target,
                workers=args.workers,
                force=args.force,
                deadline=deadline,
            )
        return fill.warm(config, cache, args.workers, force=args.force, deadline=deadline)
    except ConfigError as error:
        return fail(error)


def _check(args: argparse.Namespace) -> tuple[list[str], list[int]]:
    """The mixers and lengths asked for; empty for the run's own.

    Raises:
        ConfigError: an option means nothing.
    """
    if args.workers is not None and args.workers < 1:
        raise ConfigError(f"--workers {args.workers} is no number of processes; give 1 or more")
    if args.minutes is not None and not args.minutes > 0:
        raise ConfigError(f"--minutes {args.minutes} leaves no time; give more than 0")
    for name in ("mixers", "lengths", "output"):
        if getattr(args, name) is not None and not args.tune:
            raise ConfigError(f"--{name} {getattr(args, name)} is for tuning; add --tune")
    mixers = list(TUNABLE) if args.mixers == "all" else (args.mixers or "").split(",")
    for name in mixers:
        if name and name not in TUNABLE:
            raise ConfigError(
                f"--mixers {args.mixers}: {name!r} has nothing to tune; name some of "
                f"{', '.join(TUNABLE)}, or all"
            )
    lengths = args.lengths.split(",") if args.lengths else []
    for length in lengths:
        if not length.isdigit() or int(length) < 64:
            raise ConfigError(f"--lengths {args.lengths}: {length!r} is no length of 64 or more")
    if args.mixers == "all" and not lengths:
        lengths = [str(length) for length in LENGTHS]
    if args.output and not Path(args.output).absolute().parent.is_dir():
        raise ConfigError(f"--output {args.output}: its folder does not exist; make it first")
    return [name for name in mixers if name], [int(length) for length in lengths]


def _config(args: argparse.Namespace, settings: list[str]) -> RunConfig:
    """The run's settings, with a vocabulary.

    Raises:
        ConfigError: they are wrong, or say nothing about the vocabulary.
    """
    if args.resolved:
        die_with_parent()
        return load_saved(args.resolved)
    config = load_config(
        [*(["--config", args.config] if args.config else []), *settings],
        prog="python -m megatron_lt2.warmup",
        other_options=("--tune", "--mixers", "--lengths", "--output", "--minutes", "--workers"),
    )
    if config.model.vocab_size is None and config.data.prefixes:
        from megatron_lt2.data.manifest import read_manifest

        try:
            manifest = read_manifest(config.data.prefixes[0])
        except (ValueError, OSError) as error:
            raise ConfigError(str(error)) from None
        config.model.vocab_size = int(manifest["tokenizer"]["vocab_size"])
    if config.model.vocab_size is None:
        raise ConfigError(
            "model.vocab_size is not set and data.path is empty; give the run's data.path, or "
            "--model.vocab_size"
        )
    return config


def _be_the_only_rank() -> None:
    """Whatever launched this: it is one process, on the first of its GPUs."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")


def check_can_compile(config: RunConfig, *, tune: bool = False) -> None:
    """Refuse where there is nothing that this could do.

    Raises:
        ConfigError: says which setting or version stands in the way.
    """
    from megatron_lt2.kernels.backend import fla_version, resolve_backend, triton_version
    from megatron_lt2.tuning import autotuners

    try:
        kernels = resolve_backend(config.precision.kernels, "cuda")
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from error
    if kernels != "fla" and tune:
        raise ConfigError(
            f"precision.kernels {config.precision.kernels} uses no kernels that could be tuned; "
            "set it to auto or fla"
        )
    if not autotuners.supported():
        raise ConfigError(
            f"fla-core {fla_version()} with Triton {triton_version()}: warming up is written for "
            f"fla-core {FLA} and Triton {TRITON}; install those, or set precision.warmup=off and "
            "let the first step compile"
        )


def use_tuned(config: RunConfig, local_rank: int) -> bool:
    """Use tuned configurations from now on; False where the run has no kernels to tune."""
    from megatron_lt2.parallel import platform

    if not platform.has_gpu():
        return False
    from megatron_lt2.kernels.backend import resolve_backend
    from megatron_lt2.tuning import autotuners

    try:
        kernels = resolve_backend(config.precision.kernels, "cuda")
    except (ValueError, RuntimeError):
        return False  # refused later, in its own words
    if kernels != "fla" or not autotuners.supported():
        return False
    table = known_table(architecture())
    if table:
        # Every rank finds the same; one a node says so.
        quiet = None if local_rank == 0 else (lambda text: None)
        autotuners.install(autotuners.Tuning(table, say=quiet))
    return True


def before_training(config: RunConfig, local_rank: int) -> None:
    """Use tuned configurations from now on, and have the kernels compiled if they are not.

    The first rank of each node compiles, in a process of its own; the others wait where ranks meet.
    A failure costs time, not the run.
    """
    if config.precision.warmup == "off" or not use_tuned(config, local_rank):
        return
    arch = architecture()
    cache = use_cache_folders()
    if local_rank != 0 or stamp_file(cache, facts_of(config, arch)).exists():
        return
    say(f"compiling this run's kernels ahead of the first step, into {cache}")
    with tempfile.TemporaryDirectory() as folder:
        resolved = Path(folder) / "config.yaml"
        resolved.write_text(to_yaml(config), encoding="utf-8")
        command = [sys.executable, "-m", "megatron_lt2.warmup", "--resolved", str(resolved)]
        try:
            code = subprocess.run(command, timeout=TRAINER_WAITS_S, check=False).returncode
        except (OSError, subprocess.TimeoutExpired) as error:
            code = -1
            print(f"warning: warmup: {error}", file=sys.stderr)
    if code:
        say(f"not everything was compiled (code {code}); the first step compiles the rest")


if __name__ == "__main__":
    sys.exit(main())
