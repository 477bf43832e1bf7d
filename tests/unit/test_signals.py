"""Leaving early: signals set a flag, the time limit counts, and all ranks agree."""

import os
import signal
import subprocess
import sys

import pytest

from megatron_lt2.training import signals
from megatron_lt2.training.signals import EXIT_SAVED, ExitRequest


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """One rank, and the signal handlers of the test process put back afterwards."""
    monkeypatch.setattr(signals.dist, "all_reduce", lambda tensor, op: None)
    numbers = (signal.SIGUSR1, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_nothing_asks_to_stop():
    request = ExitRequest()
    assert not request.agreed()


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_signal_asks_to_stop(number):
    request = ExitRequest()
    os.kill(os.getpid(), number)
    assert request.agreed()
    assert request.agreed()
    assert request.reason == number.name


def test_a_second_sigterm_has_its_usual_effect():
    ExitRequest()
    os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_sigusr1_can_come_twice():
    request = ExitRequest()
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert signal.getsignal(signal.SIGUSR1) == request._handle


def test_a_request_that_is_repeated_at_the_end_is_ignored():
    """Python puts default handlers back for signals that it handles, not for ignored ones."""
    code = (
        "import os, signal, sys\n"
        "from megatron_lt2.training.signals import ExitRequest\n"
        "request = ExitRequest()\n"
        "if sys.argv[1] == 'closed': request.close()\n"
        "class Late:\n"
        "    def __del__(self, kill=os.kill, pid=os.getpid(), number=signal.SIGUSR1):\n"
        "        kill(pid, number)\n"
        "sys.late = Late()\n"
        "sys.exit(75)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, "closed"], capture_output=True, text=True, check=False
    )
    assert ended.returncode == EXIT_SAVED, ended.stderr
    assert signal.getsignal(signal.SIGUSR1) is not signal.SIG_IGN


def test_the_stop_file_counts_and_goes(tmp_path):
    file = tmp_path / "stop"
    request = ExitRequest(stop_file=file)
    assert not request.agreed()
    file.touch()
    assert request.agreed() and request.reason == "the file stop"
    assert not file.exists()


def test_the_time_limit_counts_from_the_start(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    request = ExitRequest(after_minutes=2)
    now[0] = 1119.0
    assert not request.agreed()
    now[0] = 1121.0
    assert request.agreed()
    assert request.reason == "training.exit_after_minutes"


def test_what_another_rank_was_told_stops_this_one(monkeypatch):
    monkeypatch.setattr(signals.dist, "all_reduce", lambda tensor, op: tensor.fill_(1))
    request = ExitRequest()
    assert request.agreed()
    assert request.reason == "another rank"


def test_the_code_means_try_again():
    assert EXIT_SAVED == os.EX_TEMPFAIL
