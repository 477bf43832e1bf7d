"""What may change between two starts of a run."""

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
    now = RunConfig()
    now.model.mlstm.gate_cap = None
    assert "model.mlstm.gate_cap 15.0, now it is None" in (resume.refusal(RunConfig(), now) or "")


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
    assert resume.notes(RunConfig(), now, [], []) == []


def test_another_split_is_told():
    now = _changed("data", split="90,10,0")
    assert resume.refusal(RunConfig(), now) is None
    (note,) = resume.notes(RunConfig(), now, ["a"], ["a"])
    assert "data.split was '98,2,0', now it is '90,10,0'" in note


def test_data_is_known_by_its_checksums():
    elsewhere = _changed("data", path="moved/b")
    assert resume.notes(RunConfig(), elsewhere, ["a", "b"], ["a", "b"]) == []
    (note,) = resume.notes(RunConfig(), RunConfig(), ["a", "b"], ["a", "c"])
    assert "data.path" in note
