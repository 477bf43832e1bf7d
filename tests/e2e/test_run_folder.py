"""What a run folder and the data under it protect against: two runs at once, files replaced."""

import fcntl
import json

import pytest

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.training.run_lock import lock_run


def test_a_second_run_in_the_folder_is_refused(tmp_path):
    held = lock_run(tmp_path)
    assert held is not None
    with pytest.raises(ConfigError, match="in use by process"):
        lock_run(tmp_path)
    held.close()
    again = lock_run(tmp_path)
    assert again is not None
    again.close()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        lock_run(tmp_path / "file")


def test_a_file_system_without_locks_is_no_obstacle(tmp_path, monkeypatch):
    def unsupported(*args):
        raise OSError(95, "not supported")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    assert lock_run(tmp_path) is None


def test_checksums_follow_the_token_files(tmp_path):
    from megatron_lt2.config.schema import DataConfig, RunConfig
    from megatron_lt2.data.datasets import data_checksums

    config = RunConfig(data=DataConfig(path=str(tmp_path / "t")))
    sums = []
    for content in (b"\x01\x00", b"\x02\x00"):
        files = {}
        for kind in ("bin", "idx"):
            (tmp_path / f"t.{kind}").write_bytes(content)
            files[f"t.{kind}"] = {"bytes": 2, "sha256": f"{kind}-{content.hex()}"}
        manifest = {
            **{"format": "megatron", "version": 1, "dtype": "uint16", "documents": 1},
            **{"tokens": 1, "append_eod": True, "files": files, "inputs": []},
            **{"command": [], "lt2_version": "0"},
            "tokenizer": {
                **{"path": "x", "sha256": "y", "vocab_size": 9, "eos_id": 0},
                **{"eos_token": "e", "bos_id": None},
            },
        }
        (tmp_path / "t.manifest.json").write_text(json.dumps(manifest))
        sums.append(data_checksums(config))
    assert sums == [["bin-0100"], ["bin-0200"]]
