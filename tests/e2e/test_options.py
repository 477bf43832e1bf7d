"""What the command line prints without training, and megatron-core's own fields in a run."""

import os
import time

import pytest
import yaml

from megatron_lt2.config.load import dotted_names
from megatron_lt2.config.schema import RunConfig
from tests.e2e.runs import ROOT, call, command, curve, train

LARGE = ROOT / "launchers" / "configs" / "lt2_1b3.yaml"


def test_help_is_quick_and_documents_every_setting():
    started = time.monotonic()
    ended = call(command("--help")).expect(0)
    assert time.monotonic() - started < 3
    words = set(ended.out.replace("=", " ").split())
    assert {f"--{name}" for name in dotted_names(RunConfig)} <= words
    text = " ".join(ended.out.split())
    for documented in (
        "T: how often the whole stack runs, with the same weights.",
        "Newest checkpoints kept; older ones go after a newer one is durable.",
        "LT2_MODEL__LOOPS",
        "--estimate-memory",
        "exit 75",
    ):
        assert documented in text


def test_print_config_round_trip(data, tmp_path, monkeypatch):
    """File < environment < command line; what is printed is a config file that prints itself."""
    monkeypatch.setenv("LT2_MODEL__LOOPS", "3")
    monkeypatch.setenv("LT2_OPTIMIZER__LR", "0.5")
    arguments = ["--config", data / "config.yaml", "--optimizer.lr", "0.25"]
    printed = call(command(*arguments, "--print-config")).expect(0).out
    values = yaml.safe_load(printed)
    assert values["model"]["num_layers"] == 3
    assert values["model"]["loops"] == 3
    assert values["optimizer"]["lr"] == 0.25
    assert values["optimizer"]["betas"] == [0.9, 0.95]
    again = tmp_path / "again.yaml"
    again.write_text(printed)
    for name in ("LT2_MODEL__LOOPS", "LT2_OPTIMIZER__LR"):
        monkeypatch.delenv(name)
    assert call(command("--config", again, "--print-config")).expect(0).out == printed


def test_an_environment_variable_that_is_no_setting(monkeypatch):
    monkeypatch.setenv("LT2_MODEL__LOPPS", "3")
    ended = call(command("--print-config")).expect(2)
    assert ended.error_lines == [line for line in ended.err.splitlines() if line]
    assert "LT2_MODEL__LOPPS" in ended.error_lines[0]


def test_estimate_of_the_large_model_needs_no_data(tmp_path):
    before = sorted(os.listdir(tmp_path))
    ended = call(
        command("--config", LARGE, "--run_dir", tmp_path / "run", "--estimate-memory")
        + ["--world-size", "8"]
    ).expect(0)
    assert sorted(os.listdir(tmp_path)) == before
    words = ended.out.split()
    parameters = int(words[words.index("parameters") + 1].replace(",", ""))
    assert parameters / 1e9 == pytest.approx(1.50, abs=0.005)
    assert "one of 8 ranks" in ended.out
    total = float(words[words.index("total") + 1])
    # bf16 weights, fp32 gradients and an eighth of 12 bytes of optimizer state a parameter.
    assert total > parameters * (2 + 4 + 12 / 8) / 1e9


RECOMPUTE = ("--memory.recompute_layers", 1)


def test_recomputation_is_bit_equal(config, tmp_path):
    """Where the order of sums stays: the gradients of one micro-batch, without a loop residual."""
    arguments = ["--training.micro_batch_size", 8, "--model.loop_residual", "none"]
    arguments += ["--training.stop_step", 5]
    plain, recomputed = tmp_path / "plain", tmp_path / "recomputed"
    train(plain, *config, *arguments).expect(75)
    train(recomputed, *config, *arguments, *RECOMPUTE).expect(75)
    assert curve(recomputed) == curve(plain)
    assert len(curve(plain)) == 5
    kept = yaml.safe_load((recomputed / "config.yaml").read_text())["memory"]
    assert kept == {"recompute_cheap": False, "recompute_layers": 1.0}


def test_recomputation_with_loop_residual_and_micro_batches(undisturbed, config, tmp_path):
    run = tmp_path / "run"
    train(run, *config, *RECOMPUTE, "--training.stop_step", 3).expect(75)
    whole = curve(undisturbed(1)[0])
    for step in (1, 2, 3):
        assert curve(run)[step] == pytest.approx(whole[step], rel=1e-4)


def test_bucket_size_is_taken(undisturbed, config, tmp_path):
    run = tmp_path / "run"
    arguments = ["--megatron.ddp.bucket_size", 1000, "--training.stop_step", 3]
    train(run, *config, *arguments, ranks=2).expect(75)
    whole = curve(undisturbed(2)[0])
    for step in (1, 2, 3):
        assert curve(run)[step] == pytest.approx(whole[step], rel=1e-4)
    assert yaml.safe_load((run / "config.yaml").read_text())["megatron"]["ddp"] == {
        "bucket_size": 1000
    }
