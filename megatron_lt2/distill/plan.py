"""From settings to one training run a stage: model, length, folder.

The student has the teacher's architecture but for the mixers (and, with student.loops, for the
number of physical layers). So its run config follows from the teacher's checkpoint.
"""

import copy
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from megatron_lt2.config.checks import check_config
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import from_values, load_saved
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.distill.settings import DistillSettings, StageSettings
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT
from megatron_lt2.model.pattern import expand_pattern

PATTERN = "pattern.yaml"
"""What a selection leaves in its folder."""


SAME = (
    *("norm_mode", "inter_loop_norm", "norm_eps", "tie_embeddings", "ffn_hidden_size", "rope"),
    *("attention", "num_kv_heads", "head_dim", "exit_gate"),
)
"""Fields of the model section in which student and teacher must agree."""


@dataclass(frozen=True)
class Stage:
    """A stage with everything resolved.

    number: from 0.
    settings: as written.
    folder: its run folder.
    config: of the run; its model is the student's.
    teacher: iteration folder of the teacher's checkpoint.
    teacher_model: its architecture.
    before: run folder of the last stage that trained a student; None: the student starts from the
        teacher.
    """

    number: int
    settings: StageSettings
    folder: Path
    config: RunConfig
    teacher: Path
    teacher_model: ModelConfig
    before: Path | None

    @property
    def mixers(self) -> list[str]:
        """The student's mixer of every layer."""
        return layer_names(self.config.model)


def layer_names(model: ModelConfig) -> list[str]:
    """Mixer of every layer."""
    return expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)


def plan_stages(settings: DistillSettings, *, assume: bool = False) -> list[Stage]:
    """Every stage whose student is known: up to the first selection that has no result yet.

    Args:
        settings: of the distillation.
        assume: go on behind it as if evenly spread layers had been chosen, for a dry run.

    Raises:
        ConfigError: a teacher is missing or none, a stage's settings do not fit.
    """
    stages: list[Stage] = []
    pattern: str | list[str] = settings.student.pattern
    before: Path | None = None
    for number, stage in enumerate(settings.stages):
        folder = Path(settings.run_dir) / "stages" / f"{number:02d}-{stage.label}"
        teacher, teacher_model = teacher_of(stage.teacher or settings.teacher)
        if stage.pattern is not None:
            pattern = stage.pattern
        config = _run_config(settings, stage, number, teacher_model, pattern)
        config.run_dir = str(folder)
        stages.append(Stage(number, stage, folder, config, teacher, teacher_model, before))
        if stage.kind != "select":
            before = folder
            continue
        result = folder / PATTERN
        if result.is_file():
            pattern = yaml.safe_load(result.read_text())["pattern"]
        elif assume:
            pattern = with_full(stages[-1].mixers, even_layers(stages[-1]))
        else:
            break
    return stages


def check_stage(stage: Stage, world: int, *, need_data: bool = True) -> None:
    """`check_config` of a stage's run.

    Raises:
        ConfigError: names the stage too.
    """
    try:
        check_config(stage.config, world, need_data=need_data)
    except ConfigError as error:
        raise ConfigError(f"stages.{stage.number} ({stage.settings.label}): {error}") from None


def even_layers(stage: Stage) -> list[int]:
    """Layers that a selection keeps where it spreads them evenly, the last one among them."""
    layers = stage.config.model.num_layers
    count = kept_layers(stage)
    return [math.ceil((i + 1) * layers / count) - 1 for i in range(count)]


def kept_layers(stage: Stage) -> int:
    """How many layers keep full attention."""
    return max(1, round(stage.settings.select.keep * stage.config.model.num_layers))


def with_full(mixers: list[str], layers: list[int]) -> list[str]:
    """The mixers with full attention in `layers`."""
    return ["full" if i in layers else name for i, name in enumerate(mixers)]


def teacher_of(path: str) -> tuple[Path, ModelConfig]:
    """The teacher's newest checkpoint and its architecture.

    Raises:
        ConfigError: nothing complete is there, or it has other layers than full attention.
    """
    from megatron_lt2.training.checkpoint_files import MANIFEST, newest_complete

    folder = Path(path)
    if not (folder / MANIFEST).is_file():
        inside = folder / "checkpoints"
        newest = newest_complete(inside if inside.is_dir() else folder)
        if newest is None:
            raise ConfigError(
                f"teacher {path}: no complete checkpoint there; "
                "`python checkpoints_tools/convert.py import` makes one of a Hugging Face folder"
            )
        folder = newest
    model = load_saved(folder / "run_config.yaml").model
    others = sorted(set(layer_names(model)) - {"full"})
    if others:
        raise ConfigError(
            f"teacher {path}: has {', '.join(others)} layers; a teacher has full attention in all"
        )
    return folder, model


def student_model(settings: DistillSettings, teacher: ModelConfig, pattern: Any) -> dict[str, Any]:
    """The model section of the student, as plain values.

    Raises:
        ConfigError: student.loops does not divide the teacher's layers.
    """
    student = settings.student
    values = asdict(teacher)
    values["pattern"] = copy.copy(pattern)
    values["loss"] = "final"
    loops = student.loops or teacher.loops
    if loops != teacher.loops:
        if teacher.loops > 1 or teacher.num_layers % loops:
            raise ConfigError(
                f"student.loops {loops}: the teacher has {teacher.num_layers} layers and "
                f"{teacher.loops} loops; give a divisor of its layers for a teacher without loops, "
                "else leave it out"
            )
        values["loops"], values["num_layers"] = loops, teacher.num_layers // loops
        values["loop_residual"] = "per_channel"
    for name in RECURRENT:
        values[name] = {**values[name], **matching_sizes(name, teacher)}
    for key, value in student.model.items():
        if key in ("num_layers", "loops", "pattern", "vocab_size", "hidden_size", "num_heads"):
            raise ConfigError(
                f"student.model.{key} follows from the teacher and student.pattern, student.loops; "
                "leave it out"
            )
        old = values.get(key)
        values[key] = {**old, **value} if isinstance(old, dict) and value else value
    return values


def matching_sizes(name: str, teacher: ModelConfig) -> dict[str, Any]:
    """Settings with which a linear mixer has the teacher's heads and channels."""
    dim, heads = teacher.attention_head_dim, teacher.num_heads
    sizes: dict[str, Any] = {"num_heads": heads, "head_k_dim": dim, "head_v_dim": dim}
    if name == "mamba2":
        sizes |= {"groups": heads, "norm": "head"}
    if name == "hgrn2":
        sizes |= {"norm": "head"}
    if name == "retnet":
        sizes |= {"rope_theta": teacher.rope.theta}
    return sizes


def _run_config(
    settings: DistillSettings,
    stage: StageSettings,
    number: int,
    teacher: ModelConfig,
    pattern: str | list[str],
) -> RunConfig:
    where = f"stages.{number} ({stage.label})"
    values: dict[str, Any] = {}
    for sections in (settings.sections, stage.sections):
        for name, section in sections.items():
            values[name] = {**values.get(name, {}), **section}
    values["model"] = student_model(settings, teacher, pattern)
    if stage.tokens is not None:
        defaults = RunConfig()
        batch = values.get("training", {}).get(
            "global_batch_size", defaults.training.global_batch_size
        )
        length = values.get("data", {}).get("sequence_length", defaults.data.sequence_length)
        values["training"] = {
            **values.get("training", {}),
            "steps": math.ceil(stage.tokens / (batch * length)),
        }
    if stage.kind == "select":
        chosen = stage.select
        steps = {"trained": chosen.steps}.get(chosen.method, 1)
        evaluation = {"eval_batches": chosen.batches if chosen.method == "one_pass" else 0}
        optimizer = {"warmup_steps": 0} if steps == 1 else {}
        values["training"] = {**values.get("training", {}), "steps": steps, **evaluation}
        values["optimizer"] = {**values.get("optimizer", {}), **optimizer}
    config = from_values(_plain(values), where)
    _check_stage(config, stage, teacher, where)
    return config


def _check_stage(config: RunConfig, stage: StageSettings, teacher: ModelConfig, where: str) -> None:
    if config.parallel.pipeline > 1:
        raise ConfigError(
            f"{where}: parallel.pipeline {config.parallel.pipeline} is not served, for teacher and "
            "student are compared layer by layer in one process; use parallel.tensor, "
            "parallel.context or more data-parallel ranks"
        )
    if config.precision.fp8 != "none":
        raise ConfigError(
            f"{where}: precision.fp8 {config.precision.fp8!r} is not served; set it to none"
        )
    if config.checkpoint.init_from is not None:
        raise ConfigError(
            f"{where}: checkpoint.init_from has no meaning, a stage starts from the one before; "
            "leave it out"
        )
    model = config.model
    for name in SAME:
        if getattr(model, name) != getattr(teacher, name):
            raise ConfigError(
                f"{where}: student.model.{name} {getattr(model, name)!r} is not the teacher's "
                f"{getattr(teacher, name)!r}, whose weights would mean something else; leave it out"
            )
    loss = stage.loss
    if loss.top_k is not None and loss.top_k > (model.vocab_size or 0):
        raise ConfigError(
            f"{where}: loss.top_k {loss.top_k} is more than the vocabulary {model.vocab_size}"
        )
    if stage.select.method == "given" and stage.kind == "select":
        beyond = [x for x in stage.select.layers if not 0 <= x < model.num_layers]
        if beyond or not stage.select.layers:
            raise ConfigError(
                f"{where}: select.layers {stage.select.layers} must name layers from 0 to "
                f"{model.num_layers - 1}"
            )


def _plain(value: Any) -> Any:
    """Tuples as lists, for the parser."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def with_pattern(stage: Stage, pattern: list[str], folder: Path) -> Stage:
    """The same stage for another student, in another folder."""
    config = copy.deepcopy(stage.config)
    config.model.pattern, config.run_dir = list(pattern), str(folder)
    return replace(stage, config=config, folder=folder)
