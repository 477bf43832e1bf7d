"""From a YAML file and the command line to checked settings of a distillation."""

import difflib
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.kinds import kind_in_words
from megatron_lt2.config.load import StrictLoader
from megatron_lt2.distill.settings import SECTIONS, DistillSettings, StageSettings


def load_settings(path: str, overrides: Sequence[str] = ()) -> DistillSettings:
    """Read a file and put `--dotted.name value` pairs over it (stages by number: stages.0.loss.kl).

    Raises:
        ConfigError: one line that names file or option, and what is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        values = yaml.load(text, Loader=StrictLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the config file ({error})") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{place}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a distillation file holds 'teacher:' and 'stages:'")
    _override(values, list(overrides))
    settings: DistillSettings = _build(DistillSettings, values, "")
    _check(settings)
    return settings


def _override(values: dict[str, Any], arguments: list[str]) -> None:
    while arguments:
        option = arguments.pop(0)
        name, _, given = option.removeprefix("--").partition("=")
        if not option.startswith("--"):
            raise ConfigError(f"{option!r} is no option; write --dotted.name value")
        if "=" not in option:
            if not arguments:
                raise ConfigError(f"--{name} needs a value")
            given = arguments.pop(0)
        *way, last = name.split(".")
        place: Any = values
        for step in way:
            if isinstance(place, list):
                place = _entry(place, step, name)
            else:
                place = place.setdefault(step, {})
            if not isinstance(place, dict | list):
                raise ConfigError(f"--{name}: {step} is no section")
        if isinstance(place, list):
            raise ConfigError(f"--{name}: name a setting of the stage, e.g. --{name}.tokens 1e6")
        place[last] = yaml.safe_load(given)


def _entry(stages: list[Any], step: str, name: str) -> Any:
    if not step.isdigit() or int(step) >= len(stages):
        raise ConfigError(
            f"--{name}: there are {len(stages)} stages, numbered from 0; {step!r} is none of them"
        )
    return stages[int(step)]


def _build(cls: Any, values: Any, at: str) -> Any:
    """A dataclass of plain values, every one checked against the field's type."""
    if not isinstance(values, dict):
        raise ConfigError(f"{at.rstrip('.')} is a section, got {values!r}")
    known = {f.name: f for f in fields(cls) if f.name != "sections"}
    has_sections = any(f.name == "sections" for f in fields(cls))
    given: dict[str, Any] = {"sections": {}} if has_sections else {}
    for key, value in values.items():
        if has_sections and key in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{at}{key} is a section, got {value!r}")
            given["sections"][key] = value
        elif key not in known:
            names = [*known, *(SECTIONS if has_sections else ())]
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"
            raise ConfigError(f"unknown key {at}{key} ({hint})")
        elif key == "stages":
            if not isinstance(value, list):
                raise ConfigError(f"stages is a list with one entry a stage, got {value!r}")
            given[key] = [
                _build(StageSettings, stage, f"stages.{number}.")
                for number, stage in enumerate(value)
            ]
        elif is_dataclass(known[key].type):
            given[key] = _build(known[key].type, value, f"{at}{key}.")
        else:
            given[key] = _typed(value, known[key].type, f"{at}{key}")
    for name, f in known.items():
        if name not in given and f.default is MISSING and f.default_factory is MISSING:
            raise ConfigError(f"{at}{name} is missing; give {kind_in_words(f.type)}")
    return cls(**given)


def _typed(value: Any, kind: Any, name: str) -> Any:
    if isinstance(value, str) and _takes(kind, float) and not _takes(kind, str):
        with suppress(ValueError):
            value = float(value)  # YAML reads 1e6 as text
    if not _fits(value, kind):
        raise ConfigError(f"{name} cannot take {value!r}; give {kind_in_words(kind)}")
    return float(value) if _takes(kind, float) and isinstance(value, int) else value


def _takes(kind: Any, plain: type) -> bool:
    return kind is plain or plain in get_args(kind)


def _fits(value: Any, kind: Any) -> bool:
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in inner)
    if kind is NoneType:
        return value is None
    if origin is Literal:
        return value in inner
    if origin is list:
        return isinstance(value, list) and all(_fits(item, inner[0]) for item in value)
    if origin is dict:
        typed = inner[1] is not Any
        return isinstance(value, dict) and all(
            _fits(item, inner[1]) for item in value.values() if typed
        )
    if kind is float:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        return number and math.isfinite(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def _check(settings: DistillSettings) -> None:
    """Refuse what means nothing by itself.

    Raises:
        ConfigError: names the setting, its value and the fix.
    """
    if not settings.stages:
        raise ConfigError("stages is empty; give at least one, e.g. - kind: mixer")
    for number, stage in enumerate(settings.stages):
        at = f"stages.{number}"
        loss, select = stage.loss, stage.select
        if stage.tokens is not None and stage.tokens <= 0:
            raise ConfigError(f"{at}.tokens {stage.tokens:g} is no length; give more than 0")
        if stage.tokens is not None and "steps" in stage.sections.get("training", {}):
            raise ConfigError(f"{at}: tokens and training.steps both say its length; give one")
        if loss.ce < 0 or loss.kl < 0 or (stage.kind in ENDS and loss.ce + loss.kl == 0):
            raise ConfigError(
                f"{at}.loss: ce {loss.ce:g} and kl {loss.kl:g} leave nothing to minimise; give "
                "weights of 0 or more, one of them above 0"
            )
        if loss.temperature <= 0:
            raise ConfigError(f"{at}.loss.temperature {loss.temperature:g} must be above 0")
        if loss.top_k is not None and loss.top_k < 1:
            raise ConfigError(f"{at}.loss.top_k {loss.top_k} must be 1 or more")
        if loss.top_k is not None and loss.over == "support" and not loss.ce:
            raise ConfigError(
                f"{at}.loss.over 'support' leaves all but {loss.top_k} tokens of the vocabulary to "
                "themselves with ce 0; set ce above 0, or over 'vocabulary'"
            )
        if loss.cached is not None and (loss.top_k is None or loss.loops != "final"):
            raise ConfigError(
                f"{at}.loss.cached {loss.cached!r} holds the likeliest tokens after the last loop; "
                f"set top_k (it is {loss.top_k}) and leave loops {loss.loops!r} at 'final'"
            )
        if loss.cached is not None and stage.kind not in ENDS:
            raise ConfigError(
                f"{at}.loss.cached has no meaning in a stage {stage.kind}; leave it out"
            )
        if not 0 <= loss.final_from <= 1:
            raise ConfigError(f"{at}.loss.final_from {loss.final_from:g} is a share from 0 to 1")
        if not 0 < select.keep <= 1:
            raise ConfigError(f"{at}.select.keep {select.keep:g} is a share above 0, at most 1")
        if min(select.batches, select.steps) < 1:
            raise ConfigError(f"{at}.select: batches and steps must be 1 or more")
        if stage.kind == "sft" and not stage.chat.train:
            raise ConfigError(f"{at}.chat.train is empty; name a JSON-lines file of conversations")


ENDS = ("logits", "long", "sft")
"""Kinds of stages with a loss on the output head."""
