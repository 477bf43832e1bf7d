"""The stages of a distillation, one after the other on the same ranks."""

import gc
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.distill.plan import Stage, check_stage, plan_stages
from megatron_lt2.distill.settings import DistillSettings


def is_finished(stage: Stage) -> bool:
    """Whether a stage's run came to its last step."""
    from megatron_lt2.training.loop import FINISHED

    path = stage.folder / FINISHED
    return path.is_file() and path.read_text().strip() == str(stage.config.training.steps)


def agreed(value: Any) -> Any:
    """What rank 0 found, on every rank: file systems show files at different times."""
    from megatron_lt2.parallel.start import first_rank_says

    return json.loads(first_rank_says(json.dumps(value)))


def run_stages(
    settings: DistillSettings, part: tuple[int, int] = (1, 1), until: int | None = None
) -> int:
    """Go on where the distillation stopped; returns the exit code.

    Args:
        settings: of the distillation.
        part: i of n jobs that share a selection's layers; only the first goes on behind it.
        until: last stage to run, from 0; default: all.

    Raises:
        ConfigError: a stage's settings or data are wrong.
    """
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.parallel.start import rank_info, start_ranks
    from megatron_lt2.training.heartbeat import dump_stacks_on_signal
    from megatron_lt2.training.signals import ExitRequest

    dump_stacks_on_signal()
    for stage in plan_stages(settings, assume=True):
        check_stage(stage, rank_info().world_size)
    first = Path(settings.run_dir) / "stop" if rank_info().rank == 0 else None
    training = plan_stages(settings)[0].config.training
    exit_request = ExitRequest(training.exit_after_minutes, first)
    start_ranks(plan_stages(settings)[0].config.parallel, training.seed)
    code = 0
    for number in range(len(settings.stages) if until is None else until + 1):
        stage = plan_stages(settings)[number]
        more = number + 1 < len(settings.stages)
        if part[0] > 1 and stage.settings.kind != "select":
            if not agreed(is_finished(stage)):
                raise ConfigError(
                    f"--part {part[0]}/{part[1]}: stage {stage.folder.name} is not finished; the "
                    "first job runs it"
                )
        elif stage.settings.kind == "select":
            from megatron_lt2.distill.selection import select

            code = select(stage, settings, exit_request, part)
            if part[0] > 1:
                break
        elif not agreed(is_finished(stage)):
            code = run_stage(stage, settings.student.grouping, exit_request, more=more)
        if code:
            break
    _leave()
    return code


def run_stage(stage: Stage, grouping: str, exit_request: Any, *, more: bool) -> int:
    """One stage, or what is left of it; returns the exit code."""
    from megatron_lt2.distill.trainer import StageTrainer

    make = partial(StageTrainer, stage, grouping)
    return on_ranks(stage, exit_request, make, more=more)


def on_ranks(stage: Stage, exit_request: Any, make: Callable[..., Any], *, more: bool) -> int:
    """Run a trainer with the layout of a stage."""
    from megatron_lt2.parallel.start import rank_info, regroup
    from megatron_lt2.train import resolve_tokenizer, run_trainer
    from megatron_lt2.warmup import before_training

    config = stage.config
    tokenizer = resolve_tokenizer(config)
    check_stage(stage, rank_info().world_size)
    before_training(config, rank_info().local_rank)
    regroup(config.parallel, config.training.seed)
    code = run_trainer(
        config, tokenizer, exit_request, make, module="megatron_lt2.distill", more=more
    )
    gc.collect()  # models hold each other in cycles
    return code


def _leave() -> None:
    from megatron_lt2.parallel.start import stop_ranks

    stop_ranks()
