"""Leaving early: signals set a flag, the time limit counts, and all ranks agree."""

import os
import signal

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
