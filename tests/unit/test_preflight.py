"""What `train --check` refuses about the run folder; settings and data have tests of their own."""

import os
import shutil
from types import SimpleNamespace

import pytest

from megatron_lt2 import preflight
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.preflight import check_run, checkpoint_bytes
from tests.tiny_run import tiny_config


@pytest.fixture
def config(tmp_path):
    return tiny_config(run_dir=str(tmp_path / "some" / "run"))


def test_a_good_run_passes_and_nothing_is_written(config, tmp_path):
    check_run(config, 2, need_data=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written(config, monkeypatch, tmp_path):
    """os.access stands in: root may write everywhere."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(ConfigError, match=f"{tmp_path} cannot be written; change its permissions"):
        check_run(config, 2, need_data=False)


def test_too_little_disk(config, monkeypatch):
    size = checkpoint_bytes(config)
    assert size > 10_000
    for free, fits in ((2 * size, True), (2 * size - 1, False)):
        monkeypatch.setattr(
            shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free)
        )
        if fits:
            check_run(config, 2, need_data=False)
            continue
        with pytest.raises(ConfigError, match="GB free, and checkpoints of about"):
            check_run(config, 2, need_data=False)


def test_a_run_folder_of_other_settings(config, monkeypatch, tmp_path):
    from megatron_lt2.config.load import to_yaml
    from megatron_lt2.training import checkpoint_files

    temporary = tmp_path / "some/run/checkpoints/iter_0000005.tmp"
    temporary.mkdir(parents=True)
    (temporary / "run_config.yaml").write_text(to_yaml(config))
    checkpoint_files.publish(temporary, 5, {})
    check_run(config, 2, need_data=False)
    config.checkpoint.resume = False
    with pytest.raises(ConfigError, match="checkpoint.resume is false"):
        check_run(config, 2, need_data=False)
    config.checkpoint.resume = True
    config.model.loops = 3
    with pytest.raises(ConfigError, match="was trained with model.loops 2"):
        check_run(config, 2, need_data=False)


def test_a_checkpoint_is_as_large_as_estimated(tmp_path):
    """Weights and AdamW's state; of a tiny model the rest counts too, so only from below."""
    config = tiny_config()
    from megatron_lt2.model.counting import count_parameters

    parameters = count_parameters(config.model)
    assert checkpoint_bytes(config) in (14 * parameters, 16 * parameters)
    assert preflight.SPARE_CHECKPOINTS == 2
