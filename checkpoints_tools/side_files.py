"""What lies beside the weights of a Hugging Face folder: configs, tokenizer, code, licence.

An import keeps these files as they are, in `source/` of the run folder, and an export gives them
back, so that a model that went through training still has the config.json that other programs know.
"""

import json
import shutil
from pathlib import Path
from typing import Any

SOURCE = "source"
"""Folder of a run that holds the files which an import found beside the weights."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack")
CARD, KEPT_CARD = "README.md", "README.source.md"


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a Hugging Face folder.

    Raises:
        ValueError: it is missing or no JSON object.
    """
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file, so this is no Hugging Face folder") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: not a readable config.json ({error})") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path}: not a JSON object")
    return config


def side_files(folder: Path) -> list[Path]:
    """The files of a folder that are not its weights."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.is_file()
        and not path.name.startswith(".")
        and not path.name.endswith((*WEIGHTS, ".index.json"))
    )


def keep(folder: Path, run: Path) -> None:
    """Copy the side files of a Hugging Face folder into a run folder."""
    target = run / SOURCE
    target.mkdir()
    for path in side_files(folder):
        shutil.copyfile(path, target / path.name)


def kept_config(run: Path) -> dict[str, Any] | None:
    """The config.json that an import kept in a run folder, None without one."""
    return read_config(run / SOURCE) if (run / SOURCE / "config.json").is_file() else None


def give_back(run: Path, folder: Path) -> list[str]:
    """Copy kept side files into an export; returns their names. The card gets another name."""
    names = []
    for path in side_files(run / SOURCE):
        name = KEPT_CARD if path.name == CARD else path.name
        shutil.copyfile(path, folder / name)
        names.append(name)
    return names
