"""The README: its commands, files and options exist."""

import re
from pathlib import Path

import pytest

from megatron_lt2.config.load import dotted_names
from megatron_lt2.config.schema import RunConfig

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```(?:bash|sh|console)\n(.*?)```", README, flags=re.DOTALL)
COMMANDS = [
    line.split("#")[0].strip()
    for block in BLOCKS
    for line in block.replace("\\\n", " ").splitlines()
    if line.split("#")[0].strip()
]


@pytest.mark.parametrize("command", ["bash launchers/quickstart.sh", "bash ci/test.sh"])
def test_the_two_commands_stand_in_the_readme(command: str) -> None:
    assert command in COMMANDS


def test_scripts_and_modules_of_the_commands_exist() -> None:
    found = 0
    for command in COMMANDS:
        for path in re.findall(r"(?:^|\s)((?:[\w.-]+/)+[\w.-]+\.(?:sh|py|yaml))\b", command):
            assert (ROOT / path).is_file(), command
            found += 1
        for module in re.findall(r"-m (megatron_lt2[\w.]*)", command):
            path = ROOT / module.replace(".", "/")
            assert path.with_suffix(".py").is_file() or (path / "__main__.py").is_file(), command
            found += 1
    assert found > 5


def test_settings_in_the_readme_exist() -> None:
    known = {f"--{name}" for name in dotted_names(RunConfig)}
    named = set(re.findall(r"--[a-z]+\.[a-z0-9_.]+\b", README))
    assert named
    assert named <= known


def test_links_in_the_readme_lead_to_files() -> None:
    targets = [t for t in re.findall(r"\]\(([^)#]+)", README) if "://" not in t]
    assert targets
    for target in targets:
        assert (ROOT / target).exists(), target


def test_file_map_names_real_folders() -> None:
    table = README.split("## File map")[1].split("\n## ")[0]
    folders = re.findall(r"^\| `([\w./]+)` \|", table, flags=re.MULTILINE)
    assert len(folders) > 8
    for folder in folders:
        assert (ROOT / folder).exists(), folder
