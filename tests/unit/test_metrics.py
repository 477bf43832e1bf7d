"""The run's log: console lines, records, and what a killed run left behind."""

import json

import pytest

from megatron_lt2.training.metrics import RunLog, console_line

VALUES = {
    "loss": 5.12345,
    "grad_norm": 0.5123,
    "lr": 3e-4,
    "tokens": 81920.0,
    "tokens_per_s": 2650.4,
    "tflops": 0.1234,
    "mfu": None,
    "memory_gb": 1.234,
    "data_wait_s": 0.05,
    "step_s": 0.5,
    "eta_s": 3725.0,
}
LINE = (
    "step 20/400 (5%) | loss 5.1235 | grad norm 0.512 | lr 3.00e-04 | 81,920 tokens | "
    "2,650 tok/s | 0.123 TFLOP/s a rank | MFU n/a | 1.23 GB | data wait 10% | 0.50 s/step | "
    "1h02m left"
)


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path, 400, tensorboard=False, active=True)
    yield log
    log.close()


def _records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_console_line():
    assert console_line(20, 400, VALUES) == LINE
    assert "MFU 41.2%" in console_line(20, 400, VALUES | {"mfu": 0.4123})
    assert "1m05s left" in console_line(20, 400, VALUES | {"eta_s": 65.9})


def test_console_line_without_values_is_still_a_line():
    assert console_line(0, 400, {}).startswith("step 0/400 (0%) | loss 0.0000")


def test_training_goes_to_console_and_file(log, tmp_path, capsys):
    log.train(20, VALUES)
    assert capsys.readouterr().out == LINE + "\n"
    (record,) = _records(tmp_path)
    assert record.pop("time") > 0
    assert record == {"kind": "train", "step": 20, **VALUES}


@pytest.mark.parametrize(
    "loss, unigram, text",
    [
        (2.5, 3.0, "step 7: validation loss 2.5000, 0.500 below the unigram entropy 3.0000"),
        (3.5, 3.0, "step 7: validation loss 3.5000, 0.500 above the unigram entropy 3.0000"),
        (3.5, None, "step 7: validation loss 3.5000"),
    ],
)
def test_evaluation(log, tmp_path, capsys, loss, unigram, text):
    log.evaluation(7, loss, unigram)
    assert capsys.readouterr().out == text + "\n"
    (record,) = _records(tmp_path)
    assert (record["kind"], record["loss"], record["split"]) == ("eval", loss, "validation")


def test_records_are_on_disk_before_the_log_closes(log, tmp_path):
    log.event("checkpoint", "checkpoint iter_0000020 is durable", step=20, seconds=0.5)
    (record,) = _records(tmp_path)
    assert record["message"] == "checkpoint iter_0000020 is durable"
    assert record["seconds"] == 0.5


@pytest.mark.parametrize(
    "left, kept",
    [
        ('{"step": 1}\n{"step": 2}\n{"st', ['{"step": 1}', '{"step": 2}']),
        ('{"step": 1}\n{"step": 2}\n', ['{"step": 1}', '{"step": 2}']),
        ('{"step"', []),
        ("", []),
    ],
)
def test_half_a_last_line_is_cut(tmp_path, left, kept):
    path = tmp_path / "metrics.jsonl"
    path.write_text(left)
    log = RunLog(tmp_path, 400, tensorboard=False, active=True)
    log.record("train", 3, loss=1.0)
    log.close()
    *old, new = path.read_text().splitlines()
    assert old == kept
    assert json.loads(new)["step"] == 3


def test_other_ranks_write_and_print_nothing(tmp_path, capsys):
    log = RunLog(tmp_path / "run", 400, tensorboard=True, active=False)
    log.start_bar(0)
    log.advance()
    log.train(20, VALUES)
    log.evaluation(20, 1.0, None)
    log.event("end", "done", step=20)
    log.close()
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "run").exists()


def test_tensorboard_gets_the_values_that_exist(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(tmp_path, 400, tensorboard=True, active=True)
    log.train(20, VALUES)
    log.evaluation(20, 2.5, None)
    log.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"train/loss", "train/validation_loss", "perf/tokens_per_s", "data/data_wait_s"} <= tags
    assert "perf/mfu" not in tags
    (point,) = events.Scalars("train/loss")
    assert (point.step, point.value) == (20, pytest.approx(5.12345))
