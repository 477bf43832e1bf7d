"""Whole runs on a pipeline: reports of rank 0, leaving and resuming, and a rank that fails."""

import sys
import time

import pytest

from tests.e2e.runs import STEPS, assert_same_run, call, curve, last_step, records, train

STAGES = ("--parallel.pipeline", 2)


@pytest.fixture(scope="module")
def whole(config, tmp_path_factory):
    run = tmp_path_factory.mktemp("pipeline") / "whole"
    train(run, *config, *STAGES, ranks=2).expect(0)
    return run


def test_reports_are_those_of_one_rank(whole, undisturbed):
    one = undisturbed(1)[0]
    ours, theirs = curve(whole), curve(one)
    assert list(ours) == list(theirs) == list(range(1, STEPS + 1))
    # Later steps have been through Adam, whose first ones are signs of gradients.
    assert ours[1] == pytest.approx(theirs[1], rel=1e-5)
    assert ours[STEPS][0] == pytest.approx(theirs[STEPS][0], rel=0.02)
    ours, theirs = ([r["loss"] for r in records(run, "eval")] for run in (whole, one))
    assert ours == pytest.approx(theirs, rel=0.02)


@pytest.mark.slow
def test_two_halves_are_a_whole(whole, config, tmp_path):
    run = tmp_path / "run"
    train(run, *config, *STAGES, "--training.stop_step", STEPS // 2, ranks=2).expect(75)
    assert last_step(run) == STEPS // 2
    ended = train(run, *config, *STAGES, ranks=2).expect(0)
    assert "resuming at step 6" in ended.out
    assert_same_run(run, whole)


def _with_a_failing_rank(config, run):
    argv = [sys.executable, "-m", "megatron_lt2.tools.spawn", "--nproc", "2", "--"]
    argv += ["-m", "tests.e2e.failing_rank", *map(str, (*config, *STAGES))]
    return call([*argv, "--run_dir", str(run)], timeout=120)


@pytest.mark.parametrize(
    "way, code, how", [("exit", 7, "exit code 7"), ("kill", 128 + 9, "signal 9 (Killed)")]
)
def test_a_rank_that_dies_in_silence_is_named_first(config, tmp_path, monkeypatch, way, code, how):
    monkeypatch.setenv("FAILURE", way)
    started = time.monotonic()
    ended = _with_a_failing_rank(config, tmp_path / "run").expect(code)
    named = ended.err.index(f"rank 1 ended with {how}; the others get 15 s to end")
    assert "rank 0 failed" not in ended.err[:named]
    assert time.monotonic() - started < 60 + 40  # of which 40 to start


def test_a_rank_that_raises_ends_the_run_with_its_traceback_first(config, tmp_path):
    started = time.monotonic()
    ended = _with_a_failing_rank(config, tmp_path / "run").expect(1)
    first = ended.err.index("Traceback")
    assert "rank 1 failed" in ended.err[:first]
    second = ended.err.find("Traceback", first + 1)
    shown = ended.err[first : second if second > 0 else None]
    assert "RuntimeError: a worm in the tape" in shown
    assert time.monotonic() - started < 60 + 40  # of which 40 to start
