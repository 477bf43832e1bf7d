"""Which layers keep full attention: restore one at a time, and see how near the student comes.

    score of layer l = KL(teacher || student with the teacher's attention in layer l), lower is
    better, on held-out text (one_pass), or the loss of a short end-to-end run from there (trained)

The best `keep` of the layers stay. Each score is a file of its own, written in one piece: a killed
selection loses the layer that it was at, and jobs that share the layers need not talk.
"""

import copy
import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from megatron_lt2.atomic import write_json_atomic, write_text_atomic
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.distill.plan import (
    PATTERN,
    Stage,
    even_layers,
    kept_layers,
    with_full,
    with_pattern,
)
from megatron_lt2.distill.settings import DistillSettings

EXIT_SAVED = 75
"""As in training/signals.py, which imports torch."""
ALONE = -1
"""Number of the score of the student with no layer restored."""


def select(
    stage: Stage, settings: DistillSettings, exit_request: Any, part: tuple[int, int]
) -> int:
    """Score what is missing of this job's layers and, when all scores are there, choose.

    Args:
        stage: of the selection.
        settings: of the distillation.
        exit_request: asks for an early end.
        part: i of n jobs.

    Returns:
        The exit code: 0 with a result, 75 if scores are still missing.

    Raises:
        ConfigError: the student's layers are attention already.
    """
    from megatron_lt2.distill.run import agreed

    if agreed((stage.folder / PATTERN).is_file()):
        return 0
    method = stage.settings.select.method
    if method in ("uniform", "given"):
        layers = even_layers(stage) if method == "uniform" else stage.settings.select.layers
        return _conclude(stage, sorted(layers), {})
    if "full" in stage.mixers:
        raise ConfigError(
            f"stage {stage.settings.label}: its student has full attention in some layers already; "
            "select from one with linear mixers in all"
        )
    if stage.config.model.num_layers != stage.teacher_model.num_layers:
        raise ConfigError(
            f"stage {stage.settings.label}: select.method {method!r} puts the teacher's own layers "
            "back, which student.loops has grouped; use 'uniform' or 'given'"
        )
    own = [ALONE, *range(len(stage.mixers))][part[0] - 1 :: part[1]]
    run = _by_passes if method == "one_pass" else _by_training
    left = agreed([n for n in own if not _file(stage, n).exists()])
    code = run(stage, settings, exit_request, part, left)
    if code:
        return code
    scores = {int(n): score for n, score in agreed(read_scores(stage.folder)).items()}
    missing = [n for n in range(len(stage.mixers)) if n not in scores]
    if missing:
        _say(f"{len(missing)} layers are not scored yet, by other jobs; start again when they are")
        return EXIT_SAVED
    ranked = sorted((n for n in scores if n != ALONE), key=lambda n: scores[n])
    return _conclude(stage, sorted(ranked[: kept_layers(stage)]), scores)


def read_scores(folder: Path) -> dict[int, float]:
    """Score of each layer that has one."""
    found = {}
    for path in sorted((folder / "scores").glob("*.json")):
        facts = json.loads(path.read_text())
        found[int(facts["layer"])] = float(facts["score"])
    return found


def _file(stage: Stage, layer: int) -> Path:
    name = "none" if layer == ALONE else f"layer_{layer:03d}"
    return stage.folder / "scores" / f"{name}.json"


def write_score(stage: Stage, layer: int, score: float) -> None:
    """Keep one score."""
    path = _file(stage, layer)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json_atomic(path, {"layer": layer, "score": score})
    name = "no layer" if layer == ALONE else f"layer {layer}"
    _say(f"{name} restored: {stage.settings.select.method} score {score:.6f}")


def _by_passes(
    stage: Stage,
    settings: DistillSettings,
    exit_request: Any,
    part: tuple[int, int],
    layers: list[int],
) -> int:
    from megatron_lt2.distill.run import on_ranks
    from megatron_lt2.distill.scorer import Scorer

    if not layers:
        return 0
    config = copy.deepcopy(stage.config)
    config.run_dir = str(stage.folder / "jobs" / f"{part[0]}-of-{part[1]}")
    job = replace(stage, config=config)
    make = partial(Scorer, layers, job, settings.student.grouping)
    return on_ranks(job, exit_request, make, more=True)


def _by_training(
    stage: Stage,
    settings: DistillSettings,
    exit_request: Any,
    part: tuple[int, int],
    layers: list[int],
) -> int:
    from megatron_lt2.distill.run import is_finished, run_stage
    from megatron_lt2.parallel.start import rank_info

    for layer in layers:
        if layer == ALONE:
            continue
        restored = with_full(stage.mixers, [layer])
        trial = with_pattern(stage, restored, stage.folder / "trials" / f"layer_{layer:03d}")
        if not is_finished(trial):
            code = run_stage(trial, settings.student.grouping, exit_request, more=True)
            if code:
                return code
        if rank_info().rank == 0:
            write_score(stage, layer, _last_loss(trial.folder))
    return 0


def _last_loss(folder: Path) -> float:
    """Mean of the last quarter of the reported losses."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    by_step = {x["step"]: x["loss"] for x in lines if x["kind"] == "train"}
    losses = [by_step[step] for step in sorted(by_step)]
    last = losses[-max(1, len(losses) // 4) :]
    return float(sum(last) / len(last))


def _conclude(stage: Stage, layers: list[int], scores: dict[int, float]) -> int:
    """Write the result, on the first rank."""
    from megatron_lt2.parallel.start import rank_info

    if rank_info().rank != 0:
        _wait_for(stage.folder / PATTERN)
        return 0
    stage.folder.mkdir(parents=True, exist_ok=True)
    chosen = stage.settings.select
    if scores:
        named = {"none" if n == ALONE else str(n): scores[n] for n in sorted(scores)}
        write_json_atomic(stage.folder / "scores.json", {"method": chosen.method, "scores": named})
        _plot(stage, layers, scores)
    result = {
        "method": chosen.method,
        "layers": layers,
        "pattern": with_full(stage.mixers, layers),
    }
    write_text_atomic(stage.folder / PATTERN, yaml.safe_dump(result, sort_keys=False))
    _say(f"full attention stays in layers {', '.join(map(str, layers))} ({chosen.method})")
    return 0


def _wait_for(path: Path, seconds: float = 120.0) -> None:
    """Until the first rank has written, also on a file system that shows it late."""
    import time

    end = time.monotonic() + seconds
    while not path.is_file():
        if time.monotonic() > end:
            raise RuntimeError(f"{path} has not appeared within {seconds:.0f} s")
        time.sleep(0.05)


def _plot(stage: Stage, layers: list[int], scores: dict[int, float]) -> None:
    """Bars of the scores, chosen layers dark."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = [n for n in sorted(scores) if n != ALONE]
    figure, axes = pyplot.subplots(figsize=(0.3 * len(numbers) + 2.5, 3))
    colours = ["#1f5582" if n in layers else "#b5c7d6" for n in numbers]
    axes.bar([str(n) for n in numbers], [scores[n] for n in numbers], color=colours)
    values = [scores[n] for n in numbers]
    margin = 0.1 * (max(values) - min(values)) or 0.1 * abs(max(values)) or 1.0
    axes.set_ylim(max(0.0, min(values) - margin), max(values) + margin)
    if ALONE in scores:
        axes.axhline(scores[ALONE], color="gray", linestyle=":", label="no layer")
        axes.legend()
    axes.set_xlabel("layer with full attention")
    axes.set_ylabel("KL, nat a token" if stage.settings.select.method == "one_pass" else "loss")
    figure.tight_layout()
    figure.savefig(stage.folder / "scores.png", dpi=120)
    pyplot.close(figure)


def _say(text: str) -> None:
    from megatron_lt2.parallel.start import rank_info

    if rank_info().rank == 0:
        print(text, flush=True)
