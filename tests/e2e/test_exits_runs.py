"""Whole runs with the loss "exits": reports of every loop, leaving and resuming, another layout."""

import pytest

from tests.e2e.runs import assert_same_run, records, train

OURO = (
    *("--model.pattern", "full", "--model.norm_mode", "sandwich", "--model.loop_residual", "none"),
    *("--model.inter_loop_norm", "true", "--model.exit_gate", "true"),
    *("--model.attention.output_gate", "false", "--model.tie_embeddings", "false"),
)
EXITS = (*OURO, "--model.loss", "exits")


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("exits") / "whole"
    train(run, *config, *EXITS).expect(0)
    return run


def test_every_loop_is_reported(whole):
    reports = records(whole, "train")
    for report in reports:
        assert report["exit_share_1"] + report["exit_share_2"] == pytest.approx(1, abs=1e-5)
        mixed = sum(report[f"loss_loop_{t}"] * report[f"exit_share_{t}"] for t in (1, 2))
        # The entropy of two choices is at most ln 2; shares and losses go together a little.
        assert mixed - 0.1 * 0.694 - 0.05 < report["loss"] < mixed + 0.05
    assert reports[-1]["loss_loop_2"] < reports[0]["loss_loop_2"]
    assert reports[-1]["exit_share_1"] != reports[0]["exit_share_1"]


@pytest.mark.slow
def test_two_halves_are_a_whole_and_another_layout_goes_on(whole, config, tmp_path):
    run = tmp_path / "run"
    train(run, *config, *EXITS, "--training.stop_step", 6).expect(75)
    train(run, *config, *EXITS, "--training.stop_step", 9).expect(75)
    stages = ("--parallel.pipeline", 2)
    ended = train(run, *config, *EXITS, *stages, ranks=2).expect(0)
    assert "resuming at step 9" in ended.out
    ours, theirs = ({r["step"]: r for r in records(x, "train")} for x in (run, whole))
    for step in (7, 9):
        assert ours[step]["loss_loop_1"] == theirs[step]["loss_loop_1"]
    assert ours[12]["loss"] == pytest.approx(theirs[12]["loss"], rel=1e-4)


@pytest.mark.slow
def test_a_gate_without_its_loss_is_said_to_stay(config, tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    ended = train(once, *config, *OURO).expect(0)
    assert "model.loss 'final' does not train the exit gate" in ended.out
    assert "loss_loop_1" not in records(once, "train")[0]
    train(twice, *config, *OURO, "--training.stop_step", 6).expect(75)
    train(twice, *config, *OURO).expect(0)
    assert_same_run(twice, once)
