"""What a run survives, and how it ends when it cannot: NaN, full disks, changed data, hangs."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lt2.training.checkpoint_files import complete_checkpoints, newest_complete
from tests.e2e.runs import STEPS, assert_same_run, call, checkpoint_names, curve, records, train

FAULTS = str(Path(__file__).with_name("faults.py"))


def faulty(monkeypatch, run, *arguments, ranks=1, **faults):
    for name, value in faults.items():
        monkeypatch.setenv(f"FAULT_{name.upper()}", str(value))
    argv = [sys.executable, "-m", "megatron_lt2.tools.spawn", "--nproc", str(ranks), "--", FAULTS]
    return call([*argv, *map(str, arguments), "--run_dir", str(run)])


def test_a_nan_on_one_rank_skips_the_step_and_is_found(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    ended = faulty(monkeypatch, run, *config, ranks=2, nan="3:4:1").expect(0)
    skipped = records(run, "skipped")
    assert [(r["step"], r["in_a_row"]) for r in skipped] == [(4, 1), (5, 2)]
    assert "first on rank 1: the output of the mixer" in skipped[0]["fault"]
    assert "of layer 2, loop 1 of micro-batch 1" in skipped[0]["fault"]
    assert "warning: step 4 was skipped: the loss is NaN or infinite (1 of 10 in a row" in ended.out
    losses = {step: values[0] for step, values in curve(run).items()}
    assert losses[4] is None and losses[5] is None, "no number is null in JSON"
    assert all(losses[step] > 0 for step in (1, 2, 3, 6, STEPS))
    assert losses[STEPS] < losses[1] - 1, "the weights were not touched by it"


@pytest.mark.slow
def test_a_skipped_step_leaves_the_weights(config, undisturbed, tmp_path, monkeypatch):
    """Skipping the last step is a run that is one step shorter."""
    run = tmp_path / "run"
    fault = {"gradient": f"{STEPS - 1}:0"}
    ended = faulty(monkeypatch, run, *config, **fault).expect(0)
    assert "a gradient is NaN or infinite" in ended.out
    assert "first on rank 0: the gradient of the output of layer" in ended.out
    shorter = tmp_path / "shorter"
    monkeypatch.delenv("FAULT_GRADIENT")
    train(shorter, *config, "--training.stop_step", STEPS - 1).expect(75)

    from checkpoints_tools.plain_checkpoint import PlainCheckpoint

    ours = PlainCheckpoint(newest_complete(run / "checkpoints"))
    theirs = PlainCheckpoint(newest_complete(shorter / "checkpoints"))
    for name in ours:
        if "rng" not in name:
            assert ours[name].equal(theirs[name]), name
    assert {s: v for s, v in curve(run).items() if s < STEPS} == curve(shorter)


def test_too_many_bad_steps_end_the_run(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    arguments = [*config, "--training.max_bad_steps", 3]
    ended = faulty(monkeypatch, run, *arguments, nan="5:99:0").expect(76)
    (line,) = ended.error_lines
    assert "training.max_bad_steps 3" in line and "up to step 8" in line
    assert "rank 0" in line and "layer 2" in line and "Traceback" not in ended.err
    assert newest_complete(run / "checkpoints").name == "iter_0000004"


def test_a_spike_is_skipped_and_remembered_over_a_restart():
    from types import SimpleNamespace

    import torch

    from megatron_lt2.config.schema import TrainingConfig
    from megatron_lt2.training import guard

    def losses_of(values, seen, restart=False):
        judge = guard.StepGuard(TrainingConfig(spike_factor=2.0), SimpleNamespace())
        found = []
        for number, value in enumerate(values):
            if restart and number == 20:
                state = json.loads(json.dumps(judge.state()))
                judge = guard.StepGuard(TrainingConfig(spike_factor=2.0), SimpleNamespace())
                judge.restore(state)
            seen.append(value)
            found.append(judge._spike(torch.tensor([value, 1.0])))
        return found

    before = guard.mean_over_ranks
    guard.mean_over_ranks = lambda loss, tokens: float(loss)
    try:
        values = [3.0] * 20 + [7.0, 3.0, 5.9, 6.1]
        found = losses_of(values, [])
        assert [bool(why) for why in found] == [False] * 20 + [True, False, False, True]
        assert losses_of(values, [], restart=True) == found
        assert not any(losses_of([1.0, 100.0, 1.0], [])), "too few steps to know what is usual"
    finally:
        guard.mean_over_ranks = before


def can_mount() -> bool:
    return (
        os.geteuid() == 0
        and subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode
        == 0
    )


@pytest.mark.skipif(not can_mount(), reason="needs root, to mount a small file system")
@pytest.mark.parametrize(
    "blind",
    [
        pytest.param(False, marks=pytest.mark.slow, id="seen before"),
        pytest.param(True, id="met while writing"),
    ],
)
def test_a_full_disk_ends_no_run(config, undisturbed, tmp_path, monkeypatch, blind):
    """A disk with room for one checkpoint and a half: the second does not fit."""
    whole, _ = undisturbed(1)
    run = tmp_path / "run"
    one = sum(p.stat().st_size for p in newest_complete(whole / "checkpoints").iterdir())
    folder = run / "checkpoints"
    folder.mkdir(parents=True)
    size = (one + one // 2) // 1024
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "t", str(folder)], check=True)
    try:
        arguments = [*config, "--training.eval_batches", 0, "--training.steps", STEPS]
        if blind:
            monkeypatch.setenv("FAULT_BLIND", "1")
        ended = faulty(monkeypatch, run, *arguments, pause=0)
        assert set(ended.codes) == {74}, ended.out + ended.err
        assert "WARNING: NO CHECKPOINT at step 8" in ended.out
        assert checkpoint_names(run) == ["iter_0000004", "latest"]
        assert [step for step in curve(run)] == list(range(1, STEPS + 1))
        assert complete_checkpoints(folder)[1] == []
        subprocess.run(["mount", "-o", f"remount,size={8 * size}k", str(folder)], check=True)
        again = train(run, *arguments).expect(0)
        assert "resuming at step 4" in again.out
        assert newest_complete(folder).name == f"iter_{STEPS:07d}"
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_slow_disk_does_not_hold_training(config, undisturbed, tmp_path, monkeypatch):
    run = tmp_path / "run"
    ended = faulty(monkeypatch, run, *config, slow_writes=4).expect(0)
    late = [r["step"] for r in records(run, "checkpoint_late")]
    assert late, ended.out
    assert "is still being written after" in ended.out
    assert_same_run(run, undisturbed(1)[0])


@pytest.fixture
def own_data(data, tmp_path):
    """A copy of the token files that may be spoilt."""
    import shutil

    for path in data.glob("corpus.*"):
        shutil.copy(path, tmp_path)
    shutil.copytree(data / "tokenizer", tmp_path / "tokenizer")
    return tmp_path / "corpus"


def spoil(path):
    """Other tokens under the same name, size and manifest."""
    content = bytearray(path.read_bytes())
    content[:64] = content[64:128]
    time.sleep(0.01)
    path.write_bytes(content)


def test_data_changed_between_two_starts_is_refused(config, own_data, tmp_path):
    run = tmp_path / "run"
    arguments = [*config, "--data.path", own_data, "--training.stop_step"]
    train(run, *arguments, 3).expect(75)
    before = curve(run)
    os.utime(f"{own_data}.bin")
    train(run, *arguments, 4).expect(75)  # touched, not changed
    spoil(Path(f"{own_data}.bin"))
    ended = train(run, *arguments, 5).expect(2)
    (line,) = ended.error_lines
    assert "corpus.bin: changed since the run read it first" in line
    assert curve(run).keys() == {1, 2, 3, 4} and before.items() <= curve(run).items()


def test_data_changed_under_a_run_is_never_in_a_checkpoint(own_data, tmp_path):
    from megatron_lt2.training.data_watch import DataWatch

    watch = DataWatch([str(own_data)], tmp_path)
    assert watch.changed_since_last_start() is None and watch.changed() is None
    os.utime(f"{own_data}.idx")
    assert watch.changed() is None
    spoil(Path(f"{own_data}.bin"))
    assert "corpus.bin: changed" in watch.changed()
    Path(f"{own_data}.bin").unlink()
    assert "corpus.bin: No such file" in watch.changed()


def test_a_hang_prints_every_ranks_stacks(config, tmp_path, monkeypatch):
    run = tmp_path / "run"
    started = time.monotonic()
    arguments = [*config, "--training.hang_minutes", 0.1]
    ended = faulty(monkeypatch, run, *arguments, ranks=2, hang="4:1")
    assert set(ended.codes) == {77}, ended.err
    assert time.monotonic() - started < 180
    for rank in (0, 1):
        assert f"rank {rank} hangs:" in ended.err
    assert "in hanging" in ended.err and "after step 4 (training.hang_minutes)" in ended.err
    assert ended.err.count("Thread 0x") + ended.err.count("Current thread") >= 4
    beat = json.loads((run / "heartbeat.json").read_text())
    assert (beat["phase"], beat["restart"]) == ("train", 0)


def test_the_stop_file_saves_and_leaves(config, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "stop").touch()
    ended = train(run, *config).expect(75)
    assert "stopping after step 0: the file stop" in ended.out
    assert not (run / "stop").exists()
    train(run, *config, "--training.stop_step", 1).expect(75)


def test_evaluation_of_the_newest_checkpoint(config, undisturbed):
    run, _ = undisturbed(1)
    before = {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")}
    ended = train(run, *config, "--evaluate").expect(0)
    assert f"step {STEPS}: validation loss" in ended.out
    (found,) = records(run / "evaluations", "eval")
    assert found["loss"] == records(run, "eval")[-1]["loss"]
    assert {p: p.stat().st_mtime_ns for p in (run / "checkpoints").rglob("*")} == before
