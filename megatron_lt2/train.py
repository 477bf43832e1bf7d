"""Pretrain an LT2 model: python -m megatron_lt2.train --config FILE [--dotted.name value].

Exit codes: 0 done; 2 a setting or the data is wrong (one line says which); 75 saved and left early,
start the same command again to continue; 74 the last checkpoint could not be written; 76 the loss
diverged; 77 a rank hung; anything else is a failure with a traceback.
"""

import copy
import os
import re
import shlex
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from megatron_lt2.caches import use_cache_folders
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import fail, load_config, to_yaml
from megatron_lt2.config.schema import RunConfig

EXIT_DIVERGED = 76
"""As in training/signals.py, which imports torch."""

DESCRIPTION = """Pretrain a looped linear-time transformer (LT2).

Settings come from, weakest first: the defaults below, the YAML file given with --config,
environment variables (ENV names below), and the command line. The run writes to run_dir; started
again with the same run_dir it resumes from the newest complete checkpoint. SIGUSR1, SIGTERM or a
file RUN/stop: finish the step, save, exit 75. SIGUSR2: print the stacks of all threads, go on.

  --config FILE       YAML file with any of the settings below
  --print-config      print the resolved configuration as YAML and stop
  --check             check settings, data and run folder without a GPU, print the resolved
                      configuration and stop; nothing is written
  --check-without-data  the same where the token files are not there yet
  --evaluate          no training: the validation loss of the newest checkpoint
  --estimate-memory   print what the model costs in parameters, FLOPs and memory, and stop
  --world-size N      ranks to assume for the two options above (default: the ranks of this launch)

example: torchrun --nproc-per-node 8 -m megatron_lt2.train \\
           --config launchers/configs/lt2_1b3.yaml --data.path corpus --model.loops 2
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, train; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        print_config, arguments = _flag(arguments, "--print-config")
        estimate, arguments = _flag(arguments, "--estimate-memory")
        check, arguments = _flag(arguments, "--check")
        without_data, arguments = _flag(arguments, "--check-without-data")
        only_evaluate, arguments = _flag(arguments, "--evaluate")
        assumed, arguments = _value(arguments, "--world-size")
        config = load_config(
            arguments,
            prog="python -m megatron_lt2.train",
            description=DESCRIPTION,
            other_options=re.findall(r"^  (--[a-z-]+)", DESCRIPTION, re.MULTILINE),
        )
        use_cache_folders()
        if print_config and not estimate:
            print(to_yaml(config), end="")
            return 0
        if check or without_data:
            _check(config, assumed, need_data=not without_data)
            print(to_yaml(config), end="")
            return 0
        if estimate:
            return _estimate(config, assumed)
        return _evaluate(config) if only_evaluate else _train(config)
    except diverged() as error:
        fail(error, say=_is_first_rank())
        leave_process_group()
        return EXIT_DIVERGED
    except (ConfigError, UserError) as error:
        # Every rank finds the same mistake; one a node says so.
        local_rank = os.environ.get("LOCAL_RANK") or os.environ.get("SLURM_LOCALID") or "0"
        code = fail(error, say=local_rank == "0")
        leave_process_group()
        return code
    except Exception:
        end_rank_at_once()
        raise


def _is_first_rank() -> bool:
    return os.environ.get("RANK", "0") == "0"


def diverged() -> type[Exception]:
    """The error of a run that diverged; its module is imported only if a run was."""
    module = sys.modules.get("megatron_lt2.training.guard")
    return module.DivergedError if module is not None else _NeverRaised


def leave_process_group() -> None:
    """Quietly, or NCCL warns about it after the one line that matters."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()


def end_rank_at_once() -> None:
    """After a failure among several ranks: say what happened, then end without goodbyes.

    The others wait for this rank in some collective call. As long as it lives they cannot notice,
    and an orderly exit would wait for them in turn, in NCCL or for a checkpoint's writer.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_initialized():
        return
    if distributed.get_world_size() > 1:
        # In one piece, and with the time: ranks share an output, and the first failure counts.
        text = f"rank {distributed.get_rank()} failed at {time.time():.3f}:\n"
        sys.stderr.write(text + traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


class _NeverRaised(Exception):
    """Stands for an error whose module was not imported."""


class UserError(ValueError):
    """A mistake in the data or settings that was found after parsing."""


def _flag(arguments: list[str], name: str) -> tuple[bool, list[str]]:
    return name in arguments, [a for a in arguments if a != name]


def _value(arguments: list[str], name: str) -> tuple[int | None, list[str]]:
    if name not in arguments:
        return None, arguments
    at = arguments.index(name)
    if at + 1 >= len(arguments) or not arguments[at + 1].isdigit():
        raise ConfigError(f"{name} needs a number of ranks, e.g. {name} 8")
    if int(arguments[at + 1]) < 1:
        raise ConfigError(f"{name} {arguments[at + 1]} is not a number of ranks; give 1 or more")
    return int(arguments[at + 1]), arguments[:at] + arguments[at + 2 :]


def _estimate(config: RunConfig, assumed: int | None) -> int:
    """Print the costs of `config`; needs no data."""
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.config.checks import check_config
    from megatron_lt2.model.counting import (
        count_parameters,
        estimate_memory,
        training_flops_per_token,
    )
    from megatron_lt2.parallel.start import rank_info

    world = rank_info().world_size if assumed is None else assumed
    if config.model.vocab_size is None:
        resolve_tokenizer(config)
    check_config(config, world, need_data=False)
    size = 4 if config.precision.dtype == "fp32" else 2
    memory = estimate_memory(config, world, size)
    flops = training_flops_per_token(config.model, config.data.sequence_length)
    print(f"parameters         {count_parameters(config.model):,}")
    print(f"training compute   {flops / 1e9:.2f} GFLOP a token, {config.model.loops} loops counted")
    print(f"memory of one of {world} ranks ({'bf16' if size == 2 else 'fp32'}), an estimate:")
    for name in ("parameters", "gradients", "optimizer", "activations", "logits", "total"):
        print(f"  {name:<16} {getattr(memory, name) / 1e9:8.2f} GB")
    return 0


def _check(config: RunConfig, assumed: int | None, *, need_data: bool) -> None:
    """Refuse what can be refused before a GPU is held."""
    from megatron_lt2.parallel import platform

    platform.install()  # counting imports the mixers; quietly
    from megatron_lt2.preflight import check_run

    need_data = need_data and bool(config.data.prefixes)
    resolved = config if not need_data else copy.deepcopy(config)
    if need_data:
        resolve_tokenizer(resolved)
    check_run(resolved, assumed or 1, need_data=need_data)


def resolve_tokenizer(config: RunConfig):
    """Load the tokenizer, check that it made the data, and fix the vocabulary size."""
    from megatron_lt2.data.manifest import check_same_tokenizer, read_manifest
    from megatron_lt2.data.tokenizer import load_tokenizer

    if not config.data.prefixes:
        raise UserError(
            "data.path is empty; write data with `python data_prep/tokenize.py --input FILE... "
            "--tokenizer DIR --output PREFIX` and pass --data.path PREFIX"
        )
    try:
        manifest = read_manifest(config.data.prefixes[0])
        tokenizer = load_tokenizer(config.data.tokenizer or manifest["tokenizer"]["path"])
        check_same_tokenizer(config.data.prefixes, tokenizer)
    except (ValueError, OSError) as error:
        raise UserError(str(error)) from None
    if config.model.vocab_size is None:
        config.model.vocab_size = tokenizer.vocab_size
    elif config.model.vocab_size < tokenizer.vocab_size:
        raise UserError(
            f"model.vocab_size {config.model.vocab_size} is smaller than the tokenizer's "
            f"{tokenizer.vocab_size} ({tokenizer.path}); set it to at least that"
        )
    return tokenizer


def _train(config: RunConfig) -> int:
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.config.checks import check_config
    from megatron_lt2.parallel.start import rank_info, start_ranks, stop_ranks
    from megatron_lt2.training.heartbeat import dump_stacks_on_signal
    from megatron_lt2.training.signals import ExitRequest
    from megatron_lt2.warmup import before_training

    dump_stacks_on_signal()
    first = Path(config.run_dir) / "stop" if rank_info().rank == 0 else None
    exit_request = ExitRequest(config.training.exit_after_minutes, first)
    tokenizer = resolve_tokenizer(config)
    if config.precision.fp8 != "none":  # before sizes: without a GPU they do not matter
        from megatron_lt2.training.fp8_device import check_fp8_device

        check_fp8_device(config.precision.fp8)
    check_config(config, rank_info().world_size)
    before_training(config, rank_info().local_rank)
    start_ranks(config.parallel, config.training.seed)
    from megatron_lt2.training.loop import Trainer

    code = run_trainer(config, tokenizer, exit_request, Trainer)
    stop_ranks()
    return code


def run_trainer(
    config: RunConfig,
    tokenizer,
    exit_request,
    make_trainer,
    *,
    module: str = "megatron_lt2.train",
    more: bool = False,
) -> int:
    """One run of a trainer on ranks that have started; returns the exit code.

    Args:
        config: of the run, resolved and checked.
        tokenizer: of the data.
        exit_request: asks for an early end.
        make_trainer: called as `Trainer`.
        module: what the user has started, for cmd.txt.
        more: another run follows on these ranks if this one is complete.
    """
    from megatron_lt2.parallel.start import rank_info
    from megatron_lt2.training.heartbeat import Heartbeat
    from megatron_lt2.training.metrics import RunLog
    from megatron_lt2.training.refused_start import leaves_nothing, missing_folders

    info = rank_info()
    main_rank = info.rank == 0
    missing = missing_folders(config.run_dir)
    lock = _lock_on_first_rank(config, main_rank)
    log = None
    heartbeat = Heartbeat(config.run_dir, info.rank, config.training.hang_minutes)
    try:
        with leaves_nothing(config.run_dir, missing, main_rank):
            heartbeat.beat("start", 0)
            log = RunLog(
                config.run_dir,
                config.training.steps,
                tensorboard=config.logging.tensorboard,
                active=main_rank,
            )
            trainer = make_trainer(config, tokenizer, log, exit_request, heartbeat)
            trainer.restore()
        if main_rank:  # not before: a start that is refused changes nothing in the run folder
            _write_run_facts(config, tokenizer, module)
        code: int = trainer.run()
        if code or not more:
            exit_request.close()
    finally:
        if log is not None:
            log.close()
        heartbeat.close()
    del lock  # held until here
    return code


def _evaluate(config: RunConfig) -> int:
    """Validation loss of the newest checkpoint, also while the run goes on; the record is in
    RUN/evaluations/metrics.jsonl."""
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.config.checks import check_config
    from megatron_lt2.parallel.start import rank_info, start_ranks, stop_ranks
    from megatron_lt2.training.signals import ExitRequest
    from megatron_lt2.warmup import before_training

    exit_request = ExitRequest()
    tokenizer = resolve_tokenizer(config)
    check_config(config, rank_info().world_size)
    before_training(config, rank_info().local_rank)
    info = start_ranks(config.parallel, config.training.seed)
    from megatron_lt2.training.heartbeat import Heartbeat
    from megatron_lt2.training.loop import Trainer
    from megatron_lt2.training.metrics import RunLog

    log = RunLog(
        Path(config.run_dir) / "evaluations",
        config.training.steps,
        tensorboard=False,
        active=info.rank == 0,
    )
    heartbeat = Heartbeat(config.run_dir, -1, config.training.hang_minutes)
    try:
        Trainer(config, tokenizer, log, exit_request, heartbeat).evaluate_newest()
    finally:
        log.close()
        heartbeat.close()
    stop_ranks()
    return 0


def _lock_on_first_rank(config: RunConfig, main_rank: bool) -> object:
    """Lock the run folder on rank 0; if it cannot, every rank refuses."""
    from megatron_lt2.parallel.start import first_rank_says
    from megatron_lt2.training.run_lock import lock_run

    lock, refusal = None, ""
    if main_rank:
        try:
            lock = lock_run(config.run_dir)
        except ConfigError as error:
            refusal = str(error)
    refusal = first_rank_says(refusal)
    if refusal:
        raise UserError(refusal)
    return lock


def _write_run_facts(config: RunConfig, tokenizer, module: str) -> None:
    """config.yaml, cmd.txt, env.txt and the tokenizer, beside the checkpoints."""
    from megatron_lt2.atomic import write_text_atomic
    from megatron_lt2.training.environment import describe_environment

    folder = Path(config.run_dir)
    write_text_atomic(folder / "config.yaml", to_yaml(config))
    # What tools.spawn or a launcher put before it, so that the line can be typed again.
    start = os.environ.get("LT2_SPAWNED", Path(sys.executable).name).split()
    command = shlex.join([*start, "-m", module, *sys.argv[1:]])
    write_text_atomic(folder / "cmd.txt", command + "\n")
    write_text_atomic(folder / "env.txt", describe_environment(os.environ))
    tokenizer.save(folder / "tokenizer")


if __name__ == "__main__":
    sys.exit(main())
