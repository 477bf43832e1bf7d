"""launchers/status.py: what it says of runs that go, end, stop, and fall silent."""

import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "launchers" / "status.py"
spec = importlib.util.spec_from_file_location("status", SCRIPT)
assert spec is not None and spec.loader is not None
status = importlib.util.module_from_spec(spec)
spec.loader.exec_module(status)

NOW = 1000.0


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "checkpoints/latest").write_text("iter_0000020\n")
    (folder / "config.yaml").write_text("run_dir: x\ntraining:\n  seed: 3\n  steps: 100\n")
    lines = [
        {"kind": "start", "step": 0, "time": 900.0, "message": "starting from scratch"},
        {
            **{"kind": "train", "step": 24, "time": 990.0, "loss": 2.5, "tokens": 4096},
            **{"tokens_per_s": 100.0, "eta_s": 760.0, "step_s": 10.0},
        },
        {"kind": "eval", "step": 20, "time": 980.0, "loss": 2.75},
        {"kind": "skipped", "step": 9, "time": 950.0},
    ]
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "tr'
    )
    beat = {"time": 998.0, "phase": "train", "step": 25, "job": "7", "restart": 1}
    (folder / "heartbeat.json").write_text(json.dumps(beat))
    return folder


def add(run, **record):
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps(record) + "\n")


def test_a_run_that_goes_on(run):
    facts = status.describe(run, NOW)
    assert (facts["state"], facts["step"], facts["steps"]) == ("running", 25, 100)
    assert (facts["eta_s"], facts["heartbeat_age_s"]) == (750.0, 2.0)
    text = status.as_text(facts)
    assert "step        25 of 100 (25.0%)" in text
    assert "left        12m30s" in text and "job 7 restart 1" in text
    assert "validation  2.7500" in text and "skipped steps  1" in text


def test_a_run_that_fell_silent(run):
    assert status.describe(run, NOW + 500)["state"] == "silent"
    assert status.main([str(run)]) == 1  # long ago


def test_a_run_that_stopped_and_one_that_is_done(run, capsys):
    add(run, kind="end", step=25, time=999.0, exit_code=75)
    assert status.describe(run, NOW)["state"] == "stopped"
    add(run, kind="start", step=25, time=999.5, message="resuming")
    assert status.describe(run, NOW)["state"] == "running"
    add(run, kind="end", step=100, time=999.9, exit_code=0)
    (run / "finished").write_text("100\n")
    assert status.main([str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "finished"


def test_errors_come_from_the_newest_start(run):
    for name, text in (("job-7.0", "error: old\n"), ("job-7.1", "rank 3 failed at 1.5:\nok\n")):
        folder = run / "logs" / name
        folder.mkdir(parents=True)
        (folder / "rank-3.log").write_text(text)
    import os

    os.utime(run / "logs/job-7.0", (1, 1))
    (run / "events.jsonl").write_text('{"event": "end", "code": 77}\n')
    facts = status.describe(run, NOW)
    assert facts["errors"] == ["rank-3.log: rank 3 failed at 1.5:"]
    assert "exit codes  77 (hung)" in status.as_text(facts)


def test_no_run_there(tmp_path, capsys):
    assert status.main([str(tmp_path)]) == 2
    assert "no run folder" in capsys.readouterr().err
