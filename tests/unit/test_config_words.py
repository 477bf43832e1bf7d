"""Slips in names and values are told in plain words when the config is loaded, without torch."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_config
from megatron_lt2.config.megatron_fields import CLASSES, OWNED, check_names, field_names
from megatron_lt2.parallel import platform

platform.install()

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def message(*arguments: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (("--model.loops", "two"), "model.loops cannot take 'two'; give a whole number"),
        (("--optimizer.lr", "fast"), "optimizer.lr cannot take 'fast'; give a number"),
        (
            ("--model.tie_embeddings", "maybe"),
            "model.tie_embeddings cannot take 'maybe'; give true or false",
        ),
        (
            ("--optimizer.betas", "[0.9,x]"),
            "optimizer.betas cannot take 'x'; give a list of two numbers, e.g. [0.9, 0.95]",
        ),
        (
            ("--parallel.pipeline_layers", "3"),
            "parallel.pipeline_layers cannot take '3'; give a list of whole numbers, e.g. [2, 3], "
            "or null for the default",
        ),
        (
            ("--parallel.context_exchange", "head"),
            "parallel.context_exchange cannot take 'head'; give 'state' or 'heads' (did you mean "
            "heads?)",
        ),
        (
            ("--megatron.ddp", "7"),
            "megatron.ddp cannot take '7'; give names with values, e.g. {name: value}",
        ),
        (
            ("--model", "3"),
            "model is a section; set what is in it, e.g. --model.num_layers",
        ),
        (("--model.loops",), "--model.loops needs a value: a whole number"),
        (("--qwertz", "3"), "unknown option --qwertz (--help lists what there is)"),
    ],
)
def test_a_value_of_the_wrong_kind(arguments, said):
    assert message(*arguments) == said


@pytest.mark.parametrize(
    "arguments, said",
    [
        (
            ("--megatron.transformer.batch_invarant_mode", "true"),
            "megatron.transformer.batch_invarant_mode is no field of megatron-core's "
            "TransformerConfig; did you mean batch_invariant_mode?",
        ),
        (("--megatron.ddp.bucket_sizes", "3"), "did you mean bucket_size?"),
        (("--megatron.optimizer.adam_bta1", "3"), "did you mean adam_beta1?"),
        (
            ("--megatron.optimizer.lr", "3"),
            "megatron.optimizer.lr is owned by optimizer.lr; set that instead",
        ),
        (("--megatron.transformer.qk_layernorm", "true"), "has no effect"),
        (("--megatron.ddp.use_megatron_fsdp", "true"), "use_megatron_fsdp is not served"),
    ],
)
def test_a_slip_in_a_name_of_megatron_core(arguments, said):
    assert said in message(*arguments)


def test_names_are_those_of_the_installed_classes():
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    for section, kind in (
        ("transformer", TransformerConfig),
        ("ddp", DistributedDataParallelConfig),
        ("optimizer", OptimizerConfig),
    ):
        names = {field.name for field in dataclasses.fields(kind)}
        assert set(field_names(section) or ()) == names
        assert set(OWNED[section]) <= names
        assert CLASSES[section][-1][1] == kind.__name__


def test_without_its_source_only_what_is_ours_is_refused():
    check_names("ddp", ["anything"], None)
    with pytest.raises(ConfigError, match="owned by"):
        check_names("ddp", ["use_distributed_optimizer"], None)


@pytest.mark.parametrize("tool", ["train --print-config", "train --estimate-memory", "plan"])
def test_every_tool_refuses_it_and_says_nothing_else(tool, tmp_path):
    argv = [sys.executable, "-m", *f"megatron_lt2.{tool}".split()]
    argv += ["--gpus", "2"] if tool == "plan" else []
    argv += ["--model.vocab_size", "64", "--megatron.ddp.bucket_sizes", "3"]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2 and ended.stdout == ""
    assert ended.stderr.startswith("error: megatron.ddp.bucket_sizes is no field")
    assert len(ended.stderr.splitlines()) == 1


def test_names_are_checked_without_torch():
    code = "import sys; from megatron_lt2.config.load import load_config\n"
    code += "load_config(['--megatron.transformer.deterministic_mode', 'false'])\n"
    code += "sys.exit('torch' in sys.modules)"
    argv = [sys.executable, "-c", code]
    assert subprocess.run(argv, cwd=ROOT, timeout=60, check=False).returncode == 0


def test_a_tools_own_options_are_known_to_its_near_misses(capsys):
    from megatron_lt2 import plan, train

    assert plan.main(["--gpus", "8", "--memori", "80GB"]) == 2
    assert "unknown option --memori (did you mean --memory?)" in capsys.readouterr().err
    assert train.main(["--print-confg"]) == 2
    assert "(did you mean --print-config?)" in capsys.readouterr().err


def test_the_recorded_command_says_how_several_ranks_were_started(tmp_path):
    code = """
import sys
from types import SimpleNamespace
from megatron_lt2 import train
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.parallel import platform

platform.install()
tokenizer = SimpleNamespace(save=lambda path: None)
train._write_run_facts(RunConfig(run_dir=sys.argv[1]), tokenizer, "megatron_lt2.train")
"""
    (tmp_path / "rank.py").write_text(code)
    spawn = [sys.executable, "-m", "megatron_lt2.tools.spawn", "--nproc", "1", "--"]
    argv = [str(tmp_path / "rank.py"), str(tmp_path), "--model.loops", "2"]
    ended = subprocess.run([*spawn, *argv], cwd=ROOT, env=ENVIRONMENT, timeout=60, check=False)
    assert ended.returncode == 0
    command = (tmp_path / "cmd.txt").read_text()
    python = Path(sys.executable).name
    started = f"{python} -m megatron_lt2.tools.spawn --nproc 1 -- -m megatron_lt2.train "
    assert command == f"{started}{tmp_path} --model.loops 2\n"
