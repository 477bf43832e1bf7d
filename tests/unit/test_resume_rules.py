"""What may change between two starts of a run."""

import os
from dataclasses import replace

import pytest

from megatron_lt2.config.schema import RunConfig
from megatron_lt2.training import resume


def _changed(section: str, **values: object) -> RunConfig:
    config = RunConfig()
    return replace(config, **{section: replace(getattr(config, section), **values)})


@pytest.mark.parametrize(
    "section, values, name",
    [
        ("model", {"loops": 2}, "model.loops"),
        ("data", {"sequence_length": 128}, "data.sequence_length"),
        ("training", {"seed": 1}, "training.seed"),
        ("optimizer", {"lr": 1e-5}, "optimizer.lr"),
        ("optimizer", {"weight_decay": 0.0}, "optimizer.weight_decay"),
        ("parallel", {"distributed_optimizer": False}, "parallel.distributed_optimizer"),
    ],
)
def test_refused(section, values, name):
    complaint = resume.refusal(RunConfig(), _changed(section, **values))
    assert complaint is not None and f"was trained with {name} " in complaint


def test_refusal_names_nested_settings():
    now = RunConfig()
    now.model.gdn.conv_size = 3
    assert "model.gdn.conv_size 4, now it is 3" in (resume.refusal(RunConfig(), now) or "")


@pytest.mark.parametrize(
    "section, values",
    [
        ("training", {"steps": 7, "micro_batch_size": 2}),
        ("optimizer", {"schedule": "wsd", "warmup_steps": 3}),
        ("checkpoint", {"keep": 1}),
        ("parallel", {"tensor": 2}),
    ],
)
def test_free_to_change(section, values):
    now = _changed(section, **values)
    assert resume.refusal(RunConfig(), now) is None
    assert resume.notes(RunConfig(), now) == []


def test_other_data_is_told():
    now = _changed("data", path="b", split="90,10,0")
    assert resume.refusal(RunConfig(), now) is None
    notes = resume.notes(RunConfig(), now)
    assert [n.split()[1] for n in notes] == ["data.path", "data.split"]


def test_the_same_data_by_another_name_is_not():
    old, now = _changed("data", path=["x/b"]), _changed("data", path=os.path.abspath("x/b"))
    assert resume.notes(old, now) == []
