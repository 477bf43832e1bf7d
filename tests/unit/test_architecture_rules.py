"""Who may import whom, as docs/architecture.md says; read from the source, nothing is imported."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OURS = ("megatron_lt2", "data_prep", "checkpoints_tools")
NUMERIC = ("torch", "numpy")
CONFIG = "megatron_lt2.config"
ATOMIC = "megatron_lt2.atomic"
ORPHANS = "megatron_lt2.orphans"


@dataclass(frozen=True)
class Import:
    """One imported name, absolute, and where it stands."""

    name: str
    file: Path
    line: int
    in_function: bool

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}: {self.name}"


@dataclass(frozen=True)
class Rule:
    """What a folder may import: module prefixes of ours, and of others."""

    ours: tuple[str, ...]
    others: tuple[str, ...]


RULES = {
    "megatron_lt2/ops": Rule((), ("torch",)),
    "megatron_lt2/kernels": Rule(("megatron_lt2.ops",), ("torch", "packaging", "triton")),
    "megatron_lt2/recurrent": Rule(("megatron_lt2.kernels", "megatron_lt2.ops"), ("torch",)),
    "megatron_lt2/hf": Rule(
        ("megatron_lt2.kernels", "megatron_lt2.ops", "megatron_lt2.recurrent"),
        ("torch", "transformers"),
    ),
    "megatron_lt2/config": Rule(
        ("megatron_lt2.mixers.registry", "megatron_lt2.model.pattern"), ("yaml", "jsonargparse")
    ),
    "megatron_lt2/mixers": Rule(
        (
            "megatron_lt2.config.schema",
            # Functions that take a process group; a layer gets its own from megatron-core.
            *(
                f"megatron_lt2.parallel.{name}"
                for name in (
                    *("attention_exchange", "collectives", "halo", "linear", "remake"),
                    *("sectioned_linear", "sequence", "state_exchange"),
                )
            ),
            *(f"megatron_lt2.{name}" for name in ("kernels", "ops", "recurrent")),
        ),
        ("torch", "megatron.core"),
    ),
    "megatron_lt2/model": Rule(
        (
            *("megatron_lt2.config.megatron_fields", "megatron_lt2.config.schema"),
            *("megatron_lt2.config.errors", "megatron_lt2.config.mixers"),
            *("megatron_lt2.mixers", "megatron_lt2.recurrent", "megatron_lt2.ops.sparse_layout"),
            *("megatron_lt2.parallel.feed_forward", "megatron_lt2.parallel.vocab_loss"),
        ),
        ("torch", "megatron.core"),
    ),
    "megatron_lt2/data": Rule(
        (CONFIG, ATOMIC, "megatron_lt2.parallel.sequence"),
        (*NUMERIC, "megatron.core", "tokenizers"),
    ),
    "megatron_lt2/parallel": Rule(
        (
            *("megatron_lt2.config.errors", "megatron_lt2.config.schema"),
            "megatron_lt2.recurrent.state_maps",
            *("megatron_lt2.kernels.linear_cross_entropy", "megatron_lt2.kernels.swiglu"),
            "megatron_lt2.ops.distillation",
        ),
        ("torch", "megatron.core"),
    ),
    "megatron_lt2/tuning": Rule(
        (
            *(CONFIG, ATOMIC, ORPHANS, "megatron_lt2.caches", "megatron_lt2.kernels.backend"),
            *("megatron_lt2.mixers.registry", "megatron_lt2.recurrent.names"),
            *("megatron_lt2.model.pattern", "megatron_lt2.training.rehearsal"),
        ),
        ("torch", "psutil"),
    ),
    "megatron_lt2/distill": Rule(
        (
            *(CONFIG, ATOMIC, "megatron_lt2.caches", "megatron_lt2.train", "megatron_lt2.warmup"),
            *("megatron_lt2.mixers.registry", "megatron_lt2.mixers.attention"),
            *("megatron_lt2.recurrent.base", "megatron_lt2.kernels.backend"),
            *(f"megatron_lt2.{name}" for name in ("data", "model", "parallel", "training")),
        ),
        (*NUMERIC, "yaml", "megatron.core", "transformers", "matplotlib"),
    ),
    "megatron_lt2/training": Rule(
        (
            CONFIG,
            ATOMIC,
            ORPHANS,
            "megatron_lt2.__version__",
            *(f"megatron_lt2.mixers.{name}" for name in ("registry", "dsa_layer", "indexer")),
            "megatron_lt2.selftest",
            *(f"megatron_lt2.{name}" for name in ("data", "kernels", "model", "parallel")),
        ),
        (*NUMERIC, "megatron.core", "tqdm"),
    ),
    "megatron_lt2/tools": Rule((ORPHANS,), ("torch", "transformers", "matplotlib")),
    "data_prep": Rule(
        (ATOMIC, "megatron_lt2.data.manifest", "megatron_lt2.data.tokenizer"),
        (
            *("numpy", "pyarrow", "tokenizers", "tqdm", "zstandard"),
            *("datasets", "fastokens", "matplotlib"),  # when asked for
        ),
    ),
    "checkpoints_tools": Rule(
        (
            CONFIG,
            ATOMIC,
            "megatron_lt2.__version__",
            "megatron_lt2.data.tokenizer",
            "megatron_lt2.hf",
            "megatron_lt2.model.pattern",
            "megatron_lt2.ops",
            "megatron_lt2.recurrent",
            "megatron_lt2.tools.metrics_file",
            "megatron_lt2.training.checkpoint_files",
            # The training model in one process, to compare with.
            "megatron_lt2.training.one_process",
        ),
        ("torch", "numpy", "tqdm", "transformers", "yaml", "huggingface_hub"),
    ),
}

# What names a process group. A layer gets its own from megatron-core, in `pg_collection`.
GROUPS = ("torch.distributed", "megatron.core.parallel_state")
KNOW_GROUPS = ("megatron_lt2/parallel", "megatron_lt2/training")
# Reads checkpoint files in one process.
NOT_A_GROUP = "torch.distributed.checkpoint"


def files_of(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imports_of(file: Path, text: str | None = None) -> list[Import]:
    """Every import of a file, relative ones made absolute; bare `import a` in functions too."""
    tree = ast.parse(file.read_text(encoding="utf-8") if text is None else text)
    package = list(file.relative_to(ROOT).with_suffix("").parts[:-1])
    found: list[Import] = []

    def visit(node: ast.AST, inside: bool) -> None:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            names = [f"{prefix}.{alias.name}" for alias in node.names]
        found.extend(Import(name, file, node.lineno, inside) for name in names)
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for child in ast.iter_child_nodes(node):
            visit(child, deeper)

    visit(tree, False)
    return found


def within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def broken(folder: str, rule: Rule, imports: list[Import]) -> list[str]:
    """The imports that the rule forbids."""
    own = folder.replace("/", ".")
    bad = []
    for item in imports:
        if item.name.split(".")[0] in sys.stdlib_module_names:
            continue
        if item.name in ("megatron_lt2", "__future__"):  # the version
            continue
        allowed = (own, *rule.ours) if within(item.name, OURS) else rule.others
        if not within(item.name, allowed):
            bad.append(str(item))
    return bad


@pytest.mark.parametrize("folder", RULES)
def test_a_folder_imports_what_it_may(folder: str) -> None:
    files = files_of(folder)
    assert files
    imports = [item for file in files for item in imports_of(file)]
    assert broken(folder, RULES[folder], imports) == []


def test_every_folder_has_a_rule() -> None:
    packages = {p.parent for name in OURS for p in (ROOT / name).rglob("__init__.py")}
    covered = {ROOT / folder for folder in RULES} | {ROOT / "megatron_lt2"}
    uncovered = {p for p in packages if not any(c == p or c in p.parents for c in covered)}
    assert uncovered == set()
    assert {p for p in packages if p.parent == ROOT / "megatron_lt2"} <= covered


def test_only_two_folders_know_process_groups() -> None:
    outside = [
        file
        for name in OURS
        for file in files_of(name)
        if not str(file.relative_to(ROOT)).startswith(KNOW_GROUPS)
    ]
    assert len(outside) > 50
    named = []
    for file in outside:
        named += [
            str(item)
            for item in imports_of(file)
            if within(item.name, GROUPS) and not within(item.name, (NOT_A_GROUP,))
        ]
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed":
                named.append(f"{file.relative_to(ROOT)}:{node.lineno}: torch.distributed")
    assert named == []


@pytest.mark.parametrize(
    "folder", [f"megatron_lt2/{name}" for name in ("ops", "kernels", "recurrent", "hf")]
)
def test_what_travels_with_exports_is_imported_relatively(folder: str) -> None:
    for file in files_of(folder):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and not node.level:
                assert not (node.module or "").startswith("megatron_lt2"), f"{file}:{node.lineno}"


def named_fla(text: str) -> list[tuple[str, str, bool]]:
    """Calls that import a module of FLA or Triton by name: function, module, inside a function?"""
    found: list[tuple[str, str, bool]] = []

    def visit(node: ast.AST, inside: bool) -> None:
        if isinstance(node, ast.Call):
            function = ast.unparse(node.func).split(".")[-1]
            if function in ("fla_function", "import_module", "__import__"):
                for argument in node.args[:1]:
                    module = argument.value if isinstance(argument, ast.Constant) else ""
                    if within(str(module), ("fla", "triton")):
                        found.append((function, str(module), inside))
        deeper = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            visit(child, deeper)

    visit(ast.parse(text), False)
    return found


def test_fla_is_reached_by_name_when_a_kernel_runs() -> None:
    """No import statement names it: transformers would refuse an export where FLA is missing.

    Kernels of our own import Triton, inside `try`, where transformers does not look.
    """
    statements = [item for name in OURS for file in files_of(name) for item in imports_of(file)]
    named = [item for item in statements if within(item.name, ("fla", "triton"))]
    assert [str(item) for item in named if not item.file.name.endswith("_triton.py")] == []
    tries = [
        [part.lineno for part in ast.walk(node) if isinstance(part, ast.Import)]
        for file in {item.file for item in named}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Try)
    ]
    assert sorted(item.line for item in named) == sorted(sum(tries, [])) != []
    kernels = []
    for file in (file for name in OURS for file in files_of(name)):
        for function, module, inside in named_fla(file.read_text(encoding="utf-8")):
            where = str(file.relative_to(ROOT))
            assert inside, (where, module)
            if where.startswith("megatron_lt2/kernels/"):
                assert function == "fla_function", (where, module)
                kernels.append(module)
            else:  # asks whether FLA can be imported at all, or changes how its kernels run
                known = "megatron_lt2/hf/linear_lt2.py"
                assert where == known or where.startswith("megatron_lt2/tuning/"), (where, module)
    assert {"fla.ops.gla", "fla.ops.simple_gla", "fla.modules.convolution"} <= set(kernels)
    assert len(set(kernels)) >= 8


@pytest.mark.parametrize(
    "text, expected",
    [
        ("f = fla_function('fla.ops.gla', 'chunk_gla')", [("fla_function", "fla.ops.gla", False)]),
        ("def f():\n    backend.fla_function('fla.ops', 'x')", [("fla_function", "fla.ops", True)]),
        ("importlib.import_module('triton')", [("import_module", "triton", False)]),
        ("importlib.import_module(name); find_spec('fla')", []),
    ],
)
def test_the_reader_sees_what_is_imported_by_name(text: str, expected: list[object]) -> None:
    assert named_fla(text) == expected


@pytest.mark.parametrize("file", ["atomic.py", "orphans.py", "tools/spawn.py"])
def test_these_need_the_standard_library_only(file: str) -> None:
    imports = imports_of(ROOT / "megatron_lt2" / file)
    assert imports
    known = (*sys.stdlib_module_names, ATOMIC, ORPHANS)
    assert [str(item) for item in imports if not within(item.name, known)] == []


@pytest.mark.parametrize(
    "folder, line",
    [
        ("megatron_lt2/ops", "from megatron_lt2.kernels import gdn"),
        ("megatron_lt2/ops", "from ..kernels.gdn import gated_delta_rule"),
        ("megatron_lt2/ops", "def f():\n    import numpy"),
        ("megatron_lt2/kernels", "def f():\n    from fla.ops.gla import chunk_gla"),
        ("megatron_lt2/recurrent", "from ..parallel import sectioned_linear"),
        ("megatron_lt2/recurrent", "from megatron.core import tensor_parallel"),
        ("megatron_lt2/mixers", "from megatron_lt2.parallel import start"),
        ("megatron_lt2/model", "from megatron_lt2.parallel import platform"),
        ("megatron_lt2/mixers", "from ..training import setup"),
        ("megatron_lt2/config", "import torch"),
        ("data_prep", "from megatron_lt2.data import datasets"),
    ],
)
def test_the_reader_sees_a_forbidden_import(folder: str, line: str) -> None:
    imports = imports_of(ROOT / folder / "example.py", line)
    assert len(broken(folder, RULES[folder], imports)) == 1
