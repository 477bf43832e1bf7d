"""From a YAML file, environment variables and the command line to one checked `RunConfig`.

jsonargparse does the parsing; this module only fixes the precedence and the wording:

    defaults < YAML file (--config) < environment (LT2_MODEL__LOOPS=4)
             < command line (--model.loops 4)

The YAML file is handed over as jsonargparse's "default config file", since that is the layer which
it places below the environment. Unknown keys are errors in every layer.
"""

import difflib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import Any

import yaml

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.kinds import kind_in_words, setting_type, type_error
from megatron_lt2.config.megatron_fields import check_names, field_names
from megatron_lt2.config.schema import RunConfig

ENV_PREFIX = "LT2"

SCRIPT_VARIABLES = tuple(
    f"{ENV_PREFIX}_{name}"
    for name in (
        *("CONFIG", "RUN_DIR", "FORCE_CPU", "CACHE_DIR", "VENV", "PYTHON", "ROOT", "NPROC"),
        *("DRY_RUN", "SMOKE", "LAUNCHER", "SAVED", "SPAWNED", "HUNG", "LOG_DIR", "HANG_TIMEOUT"),
        *("CHAIN", "CHAIN_ID", "CHAIN_LEFT", "MAX_RETRIES", "SAVE_SECONDS", "SBATCH_ARGS"),
        *("NODE_RANKS", "SLURM_DIR", "STOP_FILE", "RANK_SHELL", "TORCHRUN_SHELL"),
    )
)
"""Variables of the launch scripts and the platform, which are not settings of their own."""


def build_parser(prog: str, description: str, config_file: str | None = None) -> Any:
    """An argument parser with one option a `RunConfig` field, help taken from the field's text."""
    from argparse import RawDescriptionHelpFormatter

    from jsonargparse import ArgumentParser, DefaultHelpFormatter, set_parsing_settings

    class Formatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Keeps the line breaks of the description."""

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog=prog,
        usage="%(prog)s --config FILE [--dotted.name value ...]",
        description=description,
        default_env=True,
        env_prefix=ENV_PREFIX,
        default_config_files=[config_file] if config_file else [],
        exit_on_error=False,
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    parser.add_class_arguments(RunConfig)
    return parser


def load_config(
    argv: Sequence[str],
    *,
    prog: str = "megatron_lt2",
    description: str = "",
    other_options: Sequence[str] = (),
) -> RunConfig:
    """Parse `argv` (with an optional `--config FILE`) into a RunConfig.

    Values are typed and known; `checks.check_config` looks at how they fit together.

    Args:
        argv: the command line.
        prog, description: of the program, for --help.
        other_options: the program's own, so that near-misses of them are recognised.

    Raises:
        ConfigError: one line that names the file or option and what is wrong with it.
    """
    config_file, rest = _take_config_option(list(argv))
    # Read here first: for errors that name the key, and jsonargparse refuses a file of comments.
    if config_file is not None and not _read_yaml(config_file):
        config_file = None
    _reject_unknown_environment()
    parser = build_parser(prog, description, config_file)
    try:
        namespace = parser.parse_args(rest)
        built = parser.instantiate(namespace)
    except SystemExit:
        raise
    except Exception as error:  # jsonargparse raises several unrelated types
        source = f"{config_file}: " if config_file and not rest else ""
        raise ConfigError(source + _one_line(error, other_options)) from None
    config = _as_run_config(built)
    for section in fields(config.megatron):
        given = getattr(config.megatron, section.name)
        if given:  # reading megatron-core's source takes a while
            check_names(section.name, given, field_names(section.name))
    return config


def from_values(values: dict[str, Any], where: str) -> RunConfig:
    """A RunConfig of plain values, typed and with known keys; the environment plays no part.

    Args:
        values: sections as a YAML file has them.
        where: what errors begin with.

    Raises:
        ConfigError: one line that names the setting and what is wrong with it.
    """
    _check_keys(RunConfig, values, where, "")
    parser = build_parser("", "")
    try:
        built = parser.instantiate(parser.parse_object(values, env=False))
    except Exception as error:  # jsonargparse raises several unrelated types
        raise ConfigError(f"{where}: {_one_line(error, ())}") from None
    config = _as_run_config(built)
    for section in fields(config.megatron):
        given = getattr(config.megatron, section.name)
        if given:
            check_names(section.name, given, field_names(section.name))
    return config


def load_saved(path: str | Path) -> RunConfig:
    """Read a resolved config written by `save_config`; the environment plays no part.

    Raises:
        ConfigError: the file is missing, not YAML, or has unknown keys.
    """
    return _from_mapping(RunConfig, _read_yaml(str(path)), str(path))


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML text, one block a section."""
    return yaml.safe_dump(_plain(asdict(config)), sort_keys=False, default_flow_style=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _take_config_option(argv: list[str]) -> tuple[str | None, list[str]]:
    config_file = os.environ.get("LT2_CONFIG") or None
    rest: list[str] = []
    items = iter(argv)
    for item in items:
        if item == "--config":
            config_file = next(items, None)
            if config_file is None:
                raise ConfigError("--config needs a file name, e.g. --config run.yaml")
        elif item.startswith("--config="):
            config_file = item.split("=", 1)[1]
        else:
            rest.append(item)
    return config_file, rest


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read the config file ({error})") from None
    try:
        loaded = yaml.load(text, Loader=StrictLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else path
        raise ConfigError(f"{place}: not valid YAML ({getattr(error, 'problem', error)})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise ConfigError(
            f"{path}: a config file holds sections such as 'model:', not a {type(loaded).__name__}"
        )
    _check_keys(RunConfig, loaded, path, "")
    return loaded


class StrictLoader(yaml.SafeLoader):
    """Refuses a key that stands twice in one section, where YAML would take the last."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "a key must be a plain word", key.start_mark
                )
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} stands twice in a section", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _check_keys(cls: type, values: dict[str, Any], path: str, prefix: str) -> None:
    """Reject keys that the schema does not know, with the nearest one that it does."""
    known = {f.name: f for f in fields(cls)}
    for key, value in values.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown key {prefix}{key}{_nearest(str(key), list(known))}")
        section = known[key].type
        if isinstance(section, type) and is_dataclass(section):
            if not isinstance(value, dict):
                raise ConfigError(f"{path}: {prefix}{key} is a section, got {value!r}")
            _check_keys(section, value, path, f"{prefix}{key}.")


def _nearest(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else f" (known: {', '.join(known)})"


def _known_environment(cls: type, prefix: str) -> list[str]:
    names = []
    for f in fields(cls):
        name = f"{prefix}__{f.name}".upper()
        if isinstance(f.type, type) and is_dataclass(f.type):
            names += _known_environment(f.type, name)
        else:
            names.append(name)
    return names


def _reject_unknown_environment() -> None:
    """LT2_* is ours: a name that is neither a setting nor one of the scripts' is a slip."""
    settings = [
        name
        for f in fields(RunConfig)
        if isinstance(f.type, type) and is_dataclass(f.type)
        for name in _known_environment(f.type, f"{ENV_PREFIX}_{f.name}".upper())
    ]
    known = [*settings, *SCRIPT_VARIABLES]
    for name in os.environ:
        if name.upper().startswith(f"{ENV_PREFIX}_") and name not in known:
            raise ConfigError(f"environment variable {name} is no setting{_nearest(name, known)}")


def _one_line(error: Exception, other_options: Sequence[str]) -> str:
    text = " ".join(str(error).split())
    unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", text)
    if unknown:
        options = ["--" + name for name in dotted_names(RunConfig)]
        options += ["--config", *other_options]
        close = difflib.get_close_matches(unknown[1], options, n=1)
        hint = f"did you mean {close[0]}?" if close else "--help lists what there is"
        return f"unknown option {unknown[1]} ({hint})"
    needs = re.search(r"argument (--[\w.]+): expected one argument", text)
    if needs:
        kind = setting_type(RunConfig, needs[1].removeprefix("--"))
        return f"{needs[1]} needs a value: {kind_in_words(kind)}"
    return type_error(text, RunConfig) or text.replace("Parser key ", "setting ")


def dotted_names(cls: type, prefix: str = "") -> list[str]:
    """All leaf settings by dotted name, e.g. model.loops."""
    names = []
    for f in fields(cls):
        if isinstance(f.type, type) and is_dataclass(f.type):
            names += dotted_names(f.type, f"{prefix}{f.name}.")
        else:
            names.append(prefix + f.name)
    return names


def _as_run_config(namespace: Any) -> RunConfig:
    return RunConfig(**{f.name: getattr(namespace, f.name) for f in fields(RunConfig)})


def _from_mapping(cls: Any, values: dict[str, Any], path: str) -> Any:
    kwargs: dict[str, Any] = {}
    for f in fields(cls):
        if f.name not in values:
            continue
        value = values[f.name]
        if isinstance(f.type, type) and is_dataclass(f.type):
            value = _from_mapping(f.type, value, path)
        elif str(f.type).startswith("tuple") and isinstance(value, list):
            value = tuple(value)
        kwargs[f.name] = value
    return cls(**kwargs)


def fail(error: Exception, *, say: bool = True) -> int:
    """Print a user's mistake as one line (if `say`) and return the exit code for it."""
    if say:
        print(f"error: {error}", file=sys.stderr)
    return 2
