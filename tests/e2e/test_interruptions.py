"""Runs that are stopped, signalled or killed continue as if nothing had happened, bit for bit."""

import os
import shutil
import signal

import pytest

from megatron_lt2.training.checkpoint_files import newest_complete
from tests.e2e.runs import (
    STEPS,
    assert_same_run,
    call,
    checkpoint_names,
    command,
    curve,
    last_step,
    launch,
    records,
    start,
    train,
    wait_until,
)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_halves_are_a_whole(undisturbed, config, tmp_path, ranks):
    run = tmp_path / "run"
    train(run, *config, "--training.stop_step", STEPS // 2, ranks=ranks).expect(75)
    assert last_step(run) == STEPS // 2
    assert newest_complete(run / "checkpoints").name == "iter_0000006"
    assert records(run, "end")[-1]["exit_code"] == 75

    ended = train(run, *config, ranks=ranks).expect(0)
    assert "resuming at step 6" in ended.out
    assert [r["step"] for r in records(run, "train")] == list(range(1, STEPS + 1))
    assert_same_run(run, undisturbed(ranks)[0])


def _durable_step(run):
    newest = newest_complete(run / "checkpoints")
    return 0 if newest is None else int(newest.name.removeprefix("iter_"))


def test_sigkill_in_the_middle(undisturbed, config, tmp_path):
    """Two ranks under their launcher; only the launcher's group is killed, the ranks follow."""
    run = tmp_path / "run"
    argv = command(*config, "--run_dir", run, ranks=2)
    launcher = start(argv)
    try:
        wait_until(lambda: 0 < _durable_step(run) < last_step(run), launcher)
    finally:
        os.killpg(launcher.pid, signal.SIGKILL)
    launcher.communicate(timeout=30)  # returns once nobody is left who holds the pipes
    durable, killed_at = _durable_step(run), last_step(run)
    assert killed_at > durable >= 4
    assert not records(run, "end")

    ended = call(argv).expect(0)
    assert f"resuming at step {durable}" in ended.out
    again = [r["step"] for r in records(run, "train")]
    assert again.count(killed_at) == 2, "steps after the checkpoint are made again"
    assert_same_run(run, undisturbed(2)[0])


@pytest.fixture(scope="module")
def killed_while_writing(config, tmp_path_factory):
    """A run killed while its second checkpoint was being written, one complete before it."""
    run = tmp_path_factory.mktemp("killed") / "run"
    running = launch(run, *config)
    try:
        running.wait_until(
            lambda: {"iter_0000004", "iter_0000008.tmp"} <= set(checkpoint_names(run))
        )
    finally:
        running.kill()
    return run


def test_sigkill_while_a_checkpoint_is_written(killed_while_writing, undisturbed, config, tmp_path):
    run = shutil.copytree(killed_while_writing, tmp_path / "run")
    assert checkpoint_names(run) == ["iter_0000004", "iter_0000008.tmp", "latest"]
    ended = train(run, *config).expect(0)
    assert "removed iter_0000008.tmp" in ended.out
    assert "resuming at step 4" in ended.out
    assert checkpoint_names(run) == ["iter_0000008", "iter_0000012", "latest"]
    assert_same_run(run, undisturbed(1)[0])


def test_half_a_record_at_the_end_of_the_metrics(killed_while_writing, config, tmp_path):
    run = shutil.copytree(killed_while_writing, tmp_path / "run")
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole + '{"kind": "train", "st')
    train(run, *config, "--training.stop_step", 5).expect(75)
    assert (run / "metrics.jsonl").read_text().startswith(whole + '{"kind": "start"')


@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_a_damaged_checkpoint_is_passed_over(undisturbed, config, tmp_path, damage):
    whole, _ = undisturbed(1)
    run = shutil.copytree(whole, tmp_path / "run")
    newest = run / "checkpoints" / "iter_0000012"
    victim = next(iter(sorted(newest.glob("*.distcp"))))
    if damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:-100])
    else:
        victim.unlink()
    ended = train(run, *config).expect(0)
    (warning,) = [line for line in ended.out.splitlines() if line.startswith("warning:")]
    assert victim.name in warning and "iter_0000012" in warning
    assert "resuming at step 8" in ended.out
    assert_same_run(run, whole)


@pytest.mark.parametrize("number, ranks", [(signal.SIGUSR1, 1), (signal.SIGTERM, 2)])
def test_a_signal_saves_and_leaves(undisturbed, config, tmp_path, number, ranks):
    """With two ranks only the second gets the signal; both stop after the same step."""
    run = tmp_path / "run"
    running = launch(run, *config, ranks=ranks)
    try:
        running.wait_until(lambda: last_step(run) >= 2)
    except BaseException:
        running.kill()
        raise
    os.kill(running.ranks[-1].pid, number)
    ended = running.end().expect(75)
    step = last_step(run)
    assert 2 <= step < STEPS
    reason = "another rank" if ranks == 2 else number.name
    assert f"stopping after step {step}: {reason}" in ended.out
    assert newest_complete(run / "checkpoints").name == f"iter_{step:07d}"
    end = records(run, "end")[-1]
    assert (end["step"], end["exit_code"]) == (step, 75)

    ended = train(run, *config, ranks=ranks).expect(0)
    assert f"resuming at step {step}" in ended.out
    assert curve(run) == curve(undisturbed(ranks)[0])


def test_sigterm_to_the_launcher(config, tmp_path):
    run = tmp_path / "run"
    launcher = start(command(*config, "--run_dir", run, ranks=2))
    try:
        wait_until(lambda: last_step(run) >= 2, launcher)
        launcher.terminate()
        out, err = launcher.communicate(timeout=60)
    finally:
        launcher.kill()
    assert launcher.returncode == 75, out + err
    assert "stopping after step" in out
    assert newest_complete(run / "checkpoints").name == f"iter_{last_step(run):07d}"
