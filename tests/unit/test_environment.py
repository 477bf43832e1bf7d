"""What a run writes about the machine, and how it names PyPI's unrelated `apex`."""

import pytest

from megatron_lt2.training import environment


@pytest.fixture(params=["unrelated", "nvidia", None])
def apex(request, monkeypatch):
    """The way `detect_apex` answers."""
    monkeypatch.setattr(environment, "detect_apex", lambda: request.param)
    return request.param


def test_only_an_unrelated_apex_is_pointed_out(apex):
    note = environment.apex_note()
    assert (note is not None) == (apex == "unrelated")
    assert note is None or "PyPI" in note


def test_env_txt_names_versions_and_steering_variables(apex):
    text = environment.describe_environment({"LT2_MODEL__LOOPS": "2", "HOME": "/root"})
    assert "torch " in text and "megatron-core 0.19.2" in text
    assert "LT2_MODEL__LOOPS=2" in text and "HOME" not in text
    assert f"apex: {environment.APEX[apex]}" in text


@pytest.mark.parametrize(
    "part, expected", [("apex", "unrelated"), ("multi_tensor_apply", "nvidia")]
)
def test_a_package_called_apex_is_recognised(tmp_path, monkeypatch, part, expected):
    folder = tmp_path / "apex" / part if part != "apex" else tmp_path / "apex"
    folder.mkdir(parents=True)
    (tmp_path / "apex" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert environment.detect_apex() == expected
