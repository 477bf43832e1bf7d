"""The documentation: links, settings, files, commands and messages that it names exist."""

import ast
import importlib.util
import re
import sys
from functools import cache
from pathlib import Path

import pytest
import torch

import megatron_lt2.config.mixers
from megatron_lt2 import selftest
from megatron_lt2.config.load import dotted_names
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.linear_entry import linear_entry
from megatron_lt2.recurrent.names import RECURRENT

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
SETTINGS = set(dotted_names(RunConfig))
SECTIONS = {name.split(".")[0] for name in SETTINGS if "." in name}
# Tensors and files of an export begin like settings.
EXPORT_NAMES = re.compile(r"model\.(layers|embed_tokens|norm|early_exit_gate|safetensors)\b")
SOURCES = (
    *("megatron_lt2", "data_prep", "checkpoints_tools", "launchers"),
    *("benchmarks", "tests", "ci"),
)
# Starts of messages that other packages write.
FOREIGN = ("KeyError", "IndexError", "UserWarning")

ids = [str(page.relative_to(ROOT)) for page in PAGES]
each_page = pytest.mark.parametrize("page", PAGES, ids=ids)


def code_spans(page: Path) -> list[str]:
    """What stands in backticks outside of code blocks."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"`([^`\n]+)`", text)


def commands(page: Path) -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if line.split("#")[0].strip()]


@cache
def source_files() -> list[str]:
    kinds = (".py", ".sh")
    return [
        str(path.relative_to(ROOT))
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in kinds
    ]


@cache
def messages() -> str:
    """Every piece of text in the code, cut where a value is filled in."""
    texts = []
    for name in source_files():
        text = (ROOT / name).read_text(encoding="utf-8")
        if name.endswith(".sh"):
            texts.append(text)
        elif not name.startswith("tests/"):
            nodes = ast.walk(ast.parse(text))
            texts += [n.value for n in nodes if isinstance(n, ast.Constant) and _is_text(n)]
    return "\n".join(texts)


def _is_text(node: ast.Constant) -> bool:
    return isinstance(node.value, str)


def is_setting(name: str) -> bool:
    """Whether the schema has this setting or section, or takes any name below it."""
    open_ended = name.startswith(("megatron.transformer.", "megatron.ddp.", "megatron.optimizer."))
    return name in SETTINGS or open_ended or any(s.startswith(name + ".") for s in SETTINGS)


@each_page
def test_relative_links_resolve(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text("utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), target


@each_page
def test_settings_exist(page: Path) -> None:
    named = set()
    for span in [*code_spans(page), *commands(page)]:
        for name in re.findall(r"(?<![\w./])(?:--)?([a-z]+(?:\.[a-z_][a-z0-9_]*)+)", span):
            if name.split(".")[0] in SECTIONS and not EXPORT_NAMES.match(name):
                named.add(name)
    assert {name for name in named if not is_setting(name)} == set()


def test_settings_are_named_at_all() -> None:
    text = (ROOT / "docs/configuration.md").read_text("utf-8")
    assert sum(f"`{name}`" in text for name in SETTINGS) > 20


@each_page
def test_environment_names_exist(page: Path) -> None:
    known = {"LT2_" + name.upper().replace(".", "__") for name in SETTINGS}
    named = re.findall(r"\bLT2_[A-Z]+__[A-Z_]+", page.read_text("utf-8"))
    assert set(named) <= known


@each_page
def test_source_files_exist(page: Path) -> None:
    for span in [*code_spans(page), *commands(page)]:
        for name in re.findall(r"(?<![\w*./-])(\w[\w/]*\.(?:py|sh))\b", span):
            assert any(f"/{path}".endswith(f"/{name}") for path in source_files()), name


@each_page
def test_modules_of_commands_exist(page: Path) -> None:
    for command in [*code_spans(page), *commands(page)]:
        for module in re.findall(r"-m (megatron_lt2[\w.]*)", command):
            file = ROOT / (module.replace(".", "/") + ".py")
            package = file.with_suffix("") / "__main__.py"
            assert file.is_file() or package.is_file(), command


@each_page
def test_options_of_commands_exist(page: Path) -> None:
    checked = 0
    for command in commands(page):
        script = re.search(r"python (?:(\S+\.py)|-m (megatron_lt2\.tools\.\w+))", command)
        if script is None:
            continue
        file = script.group(1) or script.group(2).replace(".", "/") + ".py"
        source = (ROOT / file).read_text(encoding="utf-8")
        for option in re.findall(r"(--[a-z-]+)", command.split(" -- ")[0]):
            assert f'"{option}"' in source or f'"--{option[5:]}"' in source, (file, option)
            checked += 1
    if page.name in ("data.md", "export.md", "README.md"):
        assert checked > 2


def test_messages_of_the_troubleshooting_page_are_ours() -> None:
    """Each quoted message, cut where the code fills a value in, stands in the code."""
    checked = 0
    for line in (ROOT / "docs/troubleshooting.md").read_text("utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        for message in re.findall(r"`([^`]+)`", line.split(" | ")[0]):
            if message.startswith(FOREIGN):
                continue
            message = re.sub(r"^(environment|lt2): ", "", message)
            pieces = re.split(r"\b[NMXY]\b|\.\.\.|--[\w.-]*\w|\d[\d.]*|'[^']*'|LT2_\w*", message)
            for piece in pieces:
                piece = piece.strip(" ?()")
                if len(piece) > 4:
                    assert piece in messages(), (message, piece)
                    checked += 1
    assert checked > 30


def test_the_example_of_adding_a_mixer_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixer, name and settings of the page make a mixer of which kernel and plain form agree."""
    text = (ROOT / "docs/adding_a_mixer.md").read_text("utf-8")
    mixer, name, settings = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    names = eval(name.removeprefix("RECURRENT = ").replace("...,", ""))
    ((new, file),) = names.items()
    assert new not in RECURRENT

    (tmp_path / f"{file}.py").write_text(mixer, encoding="utf-8")
    module_name = f"megatron_lt2.recurrent.{file}"
    spec = importlib.util.spec_from_file_location(module_name, tmp_path / f"{file}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setitem(sys.modules, module_name, module)
    monkeypatch.setitem(RECURRENT, new, file)
    before = dict(vars(megatron_lt2.config.mixers))
    scope = dict(before)
    exec(settings, scope)
    ((class_name, settings_class),) = ((k, v) for k, v in scope.items() if k not in before)
    assert f"`{new}: {class_name} = field(default_factory={class_name})`" in text
    model = ModelConfig(num_layers=1, hidden_size=32, num_heads=4)
    setattr(model, new, settings_class())

    result = selftest.compare(
        new,
        model,
        device=torch.device("cpu"),
        dtype=torch.float32,
        backend="torch",
        tokens=30,
        packed=True,
    )
    assert result.agrees and result.gradient > 0
    entry = linear_entry(new, module.MIXER)
    assert entry.heads(model) == {f"model.{new}.num_heads": 4}
    # q, k, v, gate and the way out, a decay a head, the norm's weight.
    assert entry.parameters(model) == 5 * 32 * 32 + 4 * 32 + 8


@each_page
def test_pages_are_plain_text_of_a_readable_length(page: Path) -> None:
    text = page.read_text("utf-8")
    assert text.isascii()
    assert len(text.splitlines()) <= 150
