"""The learning rate of every step, for each shape, from the scheduler that training uses."""

import math
from types import SimpleNamespace

import pytest

from megatron_lt2.config.schema import OptimizerConfig, RunConfig, TrainingConfig
from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.training.schedule import build_scheduler, peak_and_final_lr  # noqa: E402

# megatron-core says so at each logging call of a process without ranks.
pytestmark = pytest.mark.filterwarnings("ignore:Could not determine rank")

PEAK, FINAL, STEPS, WARMUP = 0.1, 0.01, 20, 4


def _config(**optimizer):
    values = {"lr": PEAK, "min_lr": FINAL, "warmup_steps": WARMUP, **optimizer}
    return RunConfig(optimizer=OptimizerConfig(**values), training=TrainingConfig(steps=STEPS))


def _curve(**optimizer):
    """Learning rate of each step, and where it would stand after the last."""
    stub = SimpleNamespace(param_groups=[{"lr_mult": 1.0, "wd_mult": 1.0}])
    scheduler = build_scheduler(_config(**optimizer), stub)
    rates = [stub.param_groups[0]["lr"]]
    for _ in range(STEPS):
        scheduler.step(1)
        rates.append(stub.param_groups[0]["lr"])
    return rates


def _between(share):
    return FINAL + (PEAK - FINAL) * share


def test_final_rate_defaults_to_a_millionth_of_the_peak():
    assert peak_and_final_lr(_config(min_lr=None)) == (PEAK, pytest.approx(1e-7))
    assert peak_and_final_lr(_config()) == (PEAK, FINAL)
    assert peak_and_final_lr(_config(min_lr=0.0)) == (PEAK, 0.0)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_never_zero(schedule):
    rates = _curve(schedule=schedule)
    first = PEAK / WARMUP
    expected = [first + (PEAK - first) * i / WARMUP for i in range(WARMUP + 1)]
    assert rates[: WARMUP + 1] == pytest.approx(expected)


def test_without_warm_up_the_first_step_is_at_the_peak():
    for schedule in ("cosine", "linear", "wsd", "constant"):
        assert _curve(schedule=schedule, warmup_steps=0)[0] == pytest.approx(PEAK)


def test_cosine():
    rates = _curve(schedule="cosine")[WARMUP:]
    span = STEPS - WARMUP
    assert rates == pytest.approx(
        [_between(0.5 + 0.5 * math.cos(math.pi * i / span)) for i in range(span + 1)]
    )


def test_linear():
    rates = _curve(schedule="linear")[WARMUP:]
    span = STEPS - WARMUP
    assert rates == pytest.approx([_between(1 - i / span) for i in range(span + 1)])


def test_constant_stays():
    assert _curve(schedule="constant")[WARMUP:] == pytest.approx([PEAK] * (STEPS - WARMUP + 1))


@pytest.mark.parametrize(
    "shape, share",
    [
        ("linear", lambda r: 1 - r),
        ("cosine", lambda r: 0.5 + 0.5 * math.cos(math.pi * r)),
        ("exponential", lambda r: 2 * 0.5**r - 1),
        ("minus_sqrt", lambda r: 1 - math.sqrt(r)),
    ],
)
def test_wsd_stays_and_then_decays(shape, share):
    rates = _curve(schedule="wsd", decay_steps=5, decay_shape=shape)
    assert rates[WARMUP : STEPS - 5] == pytest.approx([PEAK] * (STEPS - 5 - WARMUP))
    assert rates[STEPS - 5 :] == pytest.approx([_between(share(i / 5)) for i in range(6)])


def test_wsd_decays_over_a_tenth_by_default():
    rates = _curve(schedule="wsd")
    assert rates[STEPS - 2] == pytest.approx(PEAK)
    assert rates[STEPS - 1 :] == pytest.approx([_between(0.5), FINAL])


def test_weight_decay_does_not_move():
    stub = SimpleNamespace(param_groups=[{"wd_mult": 1.0}, {"wd_mult": 0.0}])
    scheduler = build_scheduler(_config(weight_decay=0.3), stub)
    for _ in range(STEPS):
        assert [g["weight_decay"] for g in stub.param_groups] == [0.3, 0.0]
        scheduler.step(1)
