"""Checkpoints as files: a folder counts when it is whole, at whatever step a run is killed."""

import json
from pathlib import Path

import pytest

from megatron_lt2.training import checkpoint_files as files

STEPS_OF_PUBLISHING = ["fsync_file", "write_json_atomic", "rename", "fsync_directory", "latest"]


class Killed(Exception):
    """The process ended here."""


def _write(root, step):
    temporary = root / (files.folder_name(step) + ".tmp")
    (temporary / "deep").mkdir(parents=True)
    (temporary / "a.distcp").write_bytes(b"x" * step)
    (temporary / "deep" / "b.distcp").write_bytes(b"yy")
    return temporary


def _publish(root, step):
    return files.publish(_write(root, step), step, {"tokens": 10 * step})


def _latest(root):
    return (root / files.LATEST).read_text()


def test_publish_writes_manifest_and_pointer(tmp_path):
    folder = _publish(tmp_path, 7)
    assert folder == tmp_path / "iter_0000007"
    manifest = files.read_manifest(folder)
    assert manifest == {"step": 7, "tokens": 70, "files": {"a.distcp": 7, "deep/b.distcp": 2}}
    assert _latest(tmp_path) == "iter_0000007\n"
    assert files.newest_complete(tmp_path) == folder
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000007", "latest"]


def test_nothing_there_is_no_error(tmp_path):
    assert files.newest_complete(tmp_path) is None
    assert files.newest_complete(tmp_path / "absent") is None
    assert files.remove_leftovers(tmp_path / "absent") == []


def test_newest_is_by_number_not_by_name(tmp_path):
    for step in (9_999_999, 10_000_000, 5):
        folder = tmp_path / files.folder_name(step)
        folder.mkdir()
        (folder / files.MANIFEST).write_text('{"files": {}}')
    good, bad = files.complete_checkpoints(tmp_path)
    assert [f.name for f in good] == ["iter_0000005", "iter_9999999", "iter_10000000"]
    assert bad == []


def _truncate(folder):
    (folder / "a.distcp").write_bytes(b"x")


def _lose_file(folder):
    (folder / "deep" / "b.distcp").unlink()


def _lose_manifest(folder):
    (folder / files.MANIFEST).unlink()


def _half_a_manifest(folder):
    path = folder / files.MANIFEST
    path.write_text(path.read_text()[:-9])


def _foreign_manifest(folder):
    (folder / files.MANIFEST).write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage, named",
    [
        (_truncate, "a.distcp: 1 bytes, the manifest says 9"),
        (_lose_file, "b.distcp: None bytes, the manifest says 2"),
        (_lose_manifest, "manifest.json: no usable checkpoint manifest"),
        (_half_a_manifest, "manifest.json: no usable checkpoint manifest"),
        (_foreign_manifest, "manifest.json: no usable checkpoint manifest"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path, damage, named):
    older = _publish(tmp_path, 3)
    newer = _publish(tmp_path, 9)
    damage(newer)
    assert files.newest_complete(tmp_path) == older
    _, (complaint,) = files.complete_checkpoints(tmp_path)
    assert str(newer) in complaint and named in complaint
    with pytest.raises(ValueError, match="manifest"):
        files.read_manifest(newer)


def test_other_names_are_ignored(tmp_path):
    folder = _publish(tmp_path, 3)
    (tmp_path / "iter_0000009").write_text("a file")
    (tmp_path / "iter_12").mkdir()
    (tmp_path / "notes").mkdir()
    _write(tmp_path, 8)
    assert files.complete_checkpoints(tmp_path) == ([folder], [])


def test_prune_keeps_the_newest_complete_ones(tmp_path):
    for step in (1, 2, 3, 4):
        _publish(tmp_path, step)
    _lose_file(tmp_path / "iter_0000004")
    assert files.prune(tmp_path, 2) == ["iter_0000001"]
    assert files.prune(tmp_path, 0) == []
    assert files.prune(tmp_path, 1) == ["iter_0000002"]
    assert files.prune(tmp_path, 5) == []
    assert files.newest_complete(tmp_path) == tmp_path / "iter_0000003"
    # What is incomplete is left for a person to look at.
    assert (tmp_path / "iter_0000004").is_dir()


def test_a_checkpoint_that_is_being_removed_no_longer_counts(tmp_path, monkeypatch):
    for step in (1, 2):
        _publish(tmp_path, step)
    monkeypatch.setattr(files.shutil, "rmtree", _kill)
    with pytest.raises(Killed):
        files.prune(tmp_path, 1)
    good, _ = files.complete_checkpoints(tmp_path)
    assert [f.name for f in good] == ["iter_0000002"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    folder = _publish(tmp_path, 3)
    _write(tmp_path, 8)
    _write(tmp_path, 9)
    assert sorted(files.remove_leftovers(tmp_path)) == ["iter_0000008.tmp", "iter_0000009.tmp"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["iter_0000003", "latest"]
    assert files.newest_complete(tmp_path) == folder


def _kill(*args, **kwargs):
    raise Killed


def _spy(monkeypatch, note):
    """Call note(step of publishing, path) before each of the steps."""

    def watch(owner, attribute, name):
        original = getattr(owner, attribute)

        def wrapper(path, *args, **kwargs):
            note(name, Path(path))
            return original(path, *args, **kwargs)

        monkeypatch.setattr(owner, attribute, wrapper)

    watch(files, "fsync_file", "fsync_file")
    watch(files, "write_json_atomic", "write_json_atomic")
    watch(files.os, "rename", "rename")
    watch(files, "fsync_directory", "fsync_directory")
    watch(files, "write_text_atomic", "latest")


def test_order_of_publishing(tmp_path, monkeypatch):
    done = []
    _spy(monkeypatch, lambda name, path: done.append((name, path.name)))
    _publish(tmp_path, 7)
    assert done == [
        ("fsync_file", "a.distcp"),
        ("fsync_file", "b.distcp"),
        ("write_json_atomic", "manifest.json"),
        ("rename", "iter_0000007.tmp"),
        ("fsync_directory", tmp_path.name),
        ("latest", "latest"),
    ]


@pytest.mark.parametrize("killed_at", STEPS_OF_PUBLISHING)
def test_killed_while_publishing(tmp_path, monkeypatch, killed_at):
    older = _publish(tmp_path, 3)
    temporary = _write(tmp_path, 9)

    def die(name, path):
        if name == killed_at:
            raise Killed

    with monkeypatch.context() as patch:
        _spy(patch, die)
        with pytest.raises(Killed):
            files.publish(temporary, 9, {"tokens": 90})

    renamed = STEPS_OF_PUBLISHING.index(killed_at) > STEPS_OF_PUBLISHING.index("rename")
    newest = tmp_path / "iter_0000009" if renamed else older
    assert files.newest_complete(tmp_path) == newest
    # The pointer is moved last, so it may lag behind but never names half a checkpoint.
    assert _latest(tmp_path) == "iter_0000003\n"
    files.read_manifest(tmp_path / _latest(tmp_path).strip())

    assert files.remove_leftovers(tmp_path) == ([] if renamed else ["iter_0000009.tmp"])
    again = _publish(tmp_path, 9)
    assert files.newest_complete(tmp_path) == again
    assert _latest(tmp_path) == "iter_0000009\n"


def test_an_incomplete_folder_gives_way_to_the_same_step_written_again(tmp_path):
    folder = _publish(tmp_path, 9)
    _truncate(folder)
    (folder / "stray").write_text("x")
    assert _publish(tmp_path, 9) == folder
    assert files.newest_complete(tmp_path) == folder
    assert not (folder / "stray").exists()
    assert json.loads((folder / files.MANIFEST).read_text())["step"] == 9
