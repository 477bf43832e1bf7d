"""A converted folder appears whole, and what a killed conversion left is tidied up."""

import os
import socket
import subprocess
import sys

import pytest

from checkpoints_tools.hf_folder import new_folder


def _dead_process():
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], stdout=-1)
    return int(ended.stdout)


def _left(target, process, kind, host=None):
    path = target.parent / f".{target.name}.{host or socket.gethostname()}-{process}.{kind}"
    path.mkdir()
    (path / "weights").write_text(kind)
    return path


def _write(target, text, **options):
    with new_folder(target, ours=lambda folder: True, **options) as folder:
        (folder / "weights").write_text(text)


def test_a_killed_process_leaves_nothing_for_good(tmp_path):
    target = tmp_path / "model"
    partial = _left(target, _dead_process(), "partial")
    working = _left(target, os.getpid(), "partial")
    working = working.rename(working.with_name(working.name.replace("model", "model2")))
    elsewhere = _left(target, 1, "partial", host="another")
    _write(target, "new")
    assert (target / "weights").read_text() == "new"
    assert not partial.exists()
    assert working.exists() and elsewhere.exists()


def test_what_was_about_to_be_replaced_comes_back(tmp_path):
    target = tmp_path / "model"
    _left(target, _dead_process(), "old")
    with pytest.raises(ValueError, match="already exists"):
        _write(target, "new")
    assert (target / "weights").read_text() == "old"
    _write(target, "new", overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_link_stays_a_link(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "weights").write_text("old")
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "there")
    _write(link, "new", overwrite=True)
    assert link.is_symlink() and (tmp_path / "there" / "weights").read_text() == "new"


def test_a_failure_leaves_what_was_there(tmp_path):
    target = tmp_path / "model"
    _write(target, "old")
    with pytest.raises(KeyError), new_folder(target, overwrite=True, ours=lambda f: True):
        raise KeyError
    assert (target / "weights").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["model"]
