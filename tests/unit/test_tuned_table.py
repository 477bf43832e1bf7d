"""Tuned configurations as data: reading, merging, the nearest key, files that survive a kill."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_lt2.caches import cache_root, use_cache_folders
from megatron_lt2.tuning import table as tables
from megatron_lt2.tuning.table import TunedTable, load_table

KERNEL = "fla.ops.gla.chunk:kernel"


def config(warps: int) -> dict[str, object]:
    return {"kwargs": {"BK": 64}, "num_warps": warps, "num_stages": 3, "num_ctas": 1}


def filled(*entries: tuple[list[object], int]) -> TunedTable:
    table = TunedTable("sm_90", "NVIDIA H200")
    for key, warps in entries:
        table.put(KERNEL, key, config(warps), 0.5)
    return table


def test_a_file_comes_back_as_it_was(tmp_path: Path) -> None:
    table = filled(([16, True, None, "torch.bfloat16"], 4), ([32, False, 0.5, "x"], 8))
    table.save(tmp_path / "t.json")
    again = load_table(tmp_path / "t.json", "sm_90")
    assert again == table and len(again) == 2
    json.loads((tmp_path / "t.json").read_text())


def test_an_empty_table_is_a_valid_file(tmp_path: Path) -> None:
    TunedTable("sm_90").save(tmp_path / "t.json")
    again = load_table(tmp_path / "t.json", "sm_90")
    assert again is not None and not again


def test_true_is_not_one() -> None:
    table = filled(([1, "a"], 4))
    assert table.exact(KERNEL, (1, "a")) == config(4)
    assert table.exact(KERNEL, (True, "a")) is None
    assert table.exact("other", (1, "a")) is None


def test_the_nearest_key_differs_in_sizes_before_flags() -> None:
    table = filled(([16, True, "bf16"], 1), ([64, True, "bf16"], 2), ([32, False, "bf16"], 4))
    order = [c["num_warps"] for c in table.nearest(KERNEL, (60, True, "bf16"))]
    assert order == [2, 1, 4]
    assert [c["num_warps"] for c in table.nearest(KERNEL, (32, False, "bf16"))][0] == 4
    assert table.nearest("other", (1,)) == []


def test_saving_merges_and_the_new_choice_wins(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "t.json"
    filled(([1], 1), ([2], 2)).save(path)
    filled(([2], 8), ([3], 4)).save(path)
    table = load_table(path, "sm_90")
    assert table is not None
    assert [table.exact(KERNEL, [k])["num_warps"] for k in (1, 2, 3)] == [1, 8, 4]  # type: ignore[index]


@pytest.mark.parametrize(
    "change",
    [
        {"architecture": "sm_80"},
        {"fla": "0.5.0"},
        {"triton": "3.7"},
        {"format": 2},
        {"kernels": {KERNEL: [{"key": [1], "config": {"kwargs": 3, "num_warps": 4}}]}},
        {"kernels": 3},
    ],
)
def test_a_file_of_something_else_is_not_used(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "t.json"
    filled(([1], 4)).save(path)
    assert load_table(path, "sm_90") is not None
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert load_table(path, "sm_90") is None


def test_torn_or_missing_files_count_as_none(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    assert load_table(path, "sm_90") is None
    path.write_text('{"format": 1, "archi')
    assert load_table(path, "sm_90") is None


def test_a_writer_killed_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    filled(([1], 4)).save(path)
    before = path.read_bytes()
    killed = subprocess.run(
        [
            sys.executable,
            "-c",
            "import os, sys\n"
            "from pathlib import Path\n"
            "import megatron_lt2.atomic as atomic\n"
            "from megatron_lt2.tuning.table import TunedTable\n"
            "def die(*a): os.kill(os.getpid(), 9)\n"
            "atomic.replace_durably = die\n"  # all is written, nothing is renamed
            "t = TunedTable('sm_90'); t.put('k', [9], {'kwargs': {}, 'num_warps': 1}, 1)\n"
            "t.save(Path(sys.argv[1]))",
            str(path),
        ],
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert path.read_bytes() == before


def test_this_machines_choices_go_over_the_shipped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shipped = tmp_path / "shipped.json"
    filled(([1], 1), ([2], 2)).save(shipped)
    monkeypatch.setattr(tables, "shipped_file", lambda architecture: shipped)
    monkeypatch.setenv("LT2_CACHE_DIR", str(tmp_path / "own"))
    assert len(tables.known_table("sm_90")) == 2 and not tables.known_table("sm_100")
    filled(([2], 8)).save(tables.own_file("sm_90"))
    known = tables.known_table("sm_90")
    assert [known.exact(KERNEL, [k])["num_warps"] for k in (1, 2)] == [1, 8]  # type: ignore[index]


def test_what_ships_can_be_read() -> None:
    for path in Path(tables.__file__).parent.glob("*.json"):
        table = load_table(path, path.stem)
        assert table is not None and table, path
        assert all(kernel.startswith("fla.") for kernel in table.entries)


def test_cache_folders() -> None:
    environment: dict[str, str] = {}
    assert use_cache_folders(environment) == cache_root(environment) / "triton"
    assert environment["TRITON_CACHE_DIR"] == str(Path.home() / ".cache/megatron_lt2/triton")
    environment = {"LT2_CACHE_DIR": "some/where"}
    use_cache_folders(environment)
    assert environment["TRITON_CACHE_DIR"] == os.path.abspath("some/where/triton")
    environment = {"LT2_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b"}
    assert use_cache_folders(environment) == Path("/b")
