"""python -m megatron_lt2.warmup: its options, stamps, two at once, and what the trainer does."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_lt2 import warmup
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.config.schema import ParallelConfig, RunConfig  # noqa: E402
from megatron_lt2.training import rehearsal  # noqa: E402
from megatron_lt2.tuning import autotuners, compile_ahead, fill, search, stamp  # noqa: E402
from megatron_lt2.tuning.table import TunedTable, load_table  # noqa: E402
from tests.tiny_run import tiny_config  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
CONFIG = str(ROOT / "launchers/configs/lt2_1b3.yaml")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LT2_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache" / "triton"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache" / "inductor"))
    return tmp_path / "cache" / "triton"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--workers", "0"], "--workers 0"),
        (["--minutes", "0"], "--minutes 0"),
        (["--mixers", "gdn"], "--mixers gdn is for tuning; add --tune"),
        (["--tune", "--mixers", "gdn,full"], "'full' has nothing to tune"),
        (["--tune", "--lengths", "4k"], "'4k' is no length"),
        (["--tune", "--output", "no/such/folder/x.json"], "its folder does not exist"),
        (["--nosuch", "1"], "unknown option --nosuch"),
        (["--config", "no-such.yaml"], "no-such.yaml: cannot read"),
        (["--model.loops", "x"], "model.loops"),
        ([], "model.vocab_size is not set"),
    ],
)
def test_mistakes_are_one_line(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert warmup.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and words in lines[0], lines
    assert not (tmp_path / "cache").exists()


def test_without_a_gpu_nothing_happens(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LT2_FORCE_CPU", "1")
    assert warmup.main(["--config", CONFIG]) == 0
    assert warmup.main(["--config", CONFIG, "--mixers", "all", "--tune", "--minutes", "6"]) == 0
    assert "no GPU here" in capsys.readouterr().out
    warmup.before_training(tiny_config(), 0)
    assert not (tmp_path / "cache").exists()


def test_help_is_quick_and_imports_no_torch() -> None:
    code = (
        "import sys\nfrom megatron_lt2 import warmup\n"
        "try:\n    warmup.main(['--help'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "assert 'torch' not in sys.modules, 'torch'"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for word in ("--tune", "--mixers", "--minutes", "--output", "--force", "--workers"):
        assert word in done.stdout
    assert "--resolved" not in done.stdout


@pytest.mark.parametrize(
    "field, value, matters",
    [
        ("data.sequence_length", 4096, True),
        ("data.isolate_documents", False, True),
        ("training.micro_batch_size", 2, True),
        ("parallel.tensor", 2, True),
        ("model.gdn.head_k_dim", 8, True),
        ("memory.recompute_cheap", True, True),
        ("training.steps", 77, False),
        ("optimizer.lr", 1.0, False),
        ("run_dir", "elsewhere", False),
        ("training.global_batch_size", 8, False),
    ],
)
def test_a_stamp_is_for_what_kernels_depend_on(field: str, value: Any, matters: bool) -> None:
    before = stamp.stamp_file(Path("c"), stamp.facts_of(tiny_config(), "sm_90"))
    config: Any = tiny_config()
    owner = config
    *path, name = field.split(".")
    for part in path:
        owner = getattr(owner, part)
    assert getattr(owner, name) != value
    setattr(owner, name, value)
    after = stamp.stamp_file(Path("c"), stamp.facts_of(config, "sm_90"))
    assert (before != after) == matters
    assert before != stamp.stamp_file(Path("c"), stamp.facts_of(tiny_config(), "sm_80"))


def test_a_stamp_is_for_versions_and_tuned_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    def name() -> Path:
        return stamp.stamp_file(Path("c"), stamp.facts_of(tiny_config(), "sm_90"))

    first = name()
    table = TunedTable("sm_90")
    table.put("fla.x:y", [1], {"kwargs": {}, "num_warps": 4}, 1.0)
    table.save(stamp.own_file("sm_90"))
    second = name()
    monkeypatch.setattr(stamp, "_version", lambda distribution: "9.9")
    assert len({first, second, name()}) == 3


class Compiler:
    """Stands for collecting and compiling; counts how often it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.complaint, self.left, self.failures = 0, "", 0, []
        self.tunings: list[autotuners.Tuning] = []
        monkeypatch.setattr(fill, "collect", self.collect)
        monkeypatch.setattr(compile_ahead, "compile_all", self.compile_all)
        monkeypatch.setattr(fill, "architecture", lambda: "sm_90")

    def collect(self, tuning: autotuners.Tuning, walk: Any) -> tuple[list[Any], str]:
        self.tunings.append(tuning)
        return [1, 2], self.complaint

    def compile_all(self, variants: Any, workers: int, **unused: Any) -> compile_ahead.Compiled:
        self.count += 1
        time.sleep(0.3)
        return compile_ahead.Compiled(2 - self.left, self.failures, self.left, 0.3)


def warm(cache: Path, *, force: bool = False) -> int:
    return fill.warm(tiny_config(), cache, 2, force=force, deadline=float("inf"))


def test_a_second_run_has_nothing_to_do(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler = Compiler(monkeypatch)
    assert warm(own_cache) == 0 and compiler.count == 1
    assert capsys.readouterr().out.splitlines()[-1].startswith("warmup: 2 kernels in ")
    assert warm(own_cache) == 0 and compiler.count == 1
    assert "already" in capsys.readouterr().out
    assert warm(own_cache, force=True) == 0 and compiler.count == 2
    (only,) = (own_cache / "warm").iterdir()
    assert json.loads(only.read_text())["facts"]["architecture"] == "sm_90"


def test_two_at_once_compile_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = Compiler(monkeypatch)
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(warm(own_cache))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [0, 0, 0] and compiler.count == 1


def test_a_holder_of_the_lock_is_not_waited_for_forever(own_cache: Path) -> None:
    with stamp.one_at_a_time(own_cache):
        started = time.monotonic()
        with stamp.one_at_a_time(own_cache, wait_s=0.3):
            assert 0.2 < time.monotonic() - started < 5


@pytest.mark.parametrize("complaint, left", [("the walk ended", 0), ("", 1)])
def test_what_is_not_whole_gets_no_stamp(
    complaint: str, left: int, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    compiler.complaint, compiler.left = complaint, left
    assert warm(own_cache) == 1
    assert not (own_cache / "warm").exists()


def test_without_a_table_all_candidates_are_compiled(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = Compiler(monkeypatch)
    tables = [TunedTable("sm_90"), TunedTable("sm_90")]
    tables[1].put("fla.x:y", [1], {"kwargs": {}, "num_warps": 4}, 1.0)
    for table in tables:
        monkeypatch.setattr(fill, "known_table", lambda architecture, table=table: table)
        warm(own_cache, force=True)
    assert [tuning.all_candidates for tuning in compiler.tunings] == [True, False]


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """As if there was a GPU: what `before_training` does is noted."""
    seen = SimpleNamespace(commands=[], tunings=[], code=0)

    def start(command: list[str], **unused: Any) -> Any:
        seen.commands.append(command)
        seen.text = Path(command[-1]).read_text()
        return SimpleNamespace(returncode=seen.code)

    table = TunedTable("sm_90")
    table.put("fla.x:y", [1], {"kwargs": {}, "num_warps": 4}, 1.0)
    monkeypatch.setattr(platform, "has_gpu", lambda: True)
    monkeypatch.setattr("megatron_lt2.kernels.backend.resolve_backend", lambda choice, kind: "fla")
    monkeypatch.setattr(warmup, "architecture", lambda: "sm_90")
    monkeypatch.setattr(warmup, "known_table", lambda architecture: table)
    monkeypatch.setattr(warmup.subprocess, "run", start)
    monkeypatch.setattr(autotuners, "supported", lambda: True)
    monkeypatch.setattr(autotuners, "install", seen.tunings.append)
    return seen


def test_the_first_rank_of_a_node_compiles(
    on_gpu: SimpleNamespace, own_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tiny_config()
    warmup.before_training(config, 1)
    assert not on_gpu.commands and len(on_gpu.tunings) == 1
    on_gpu.code = 1
    warmup.before_training(config, 0)  # a failure costs time, not the run
    assert on_gpu.commands[0][1:4] == ["-m", "megatron_lt2.warmup", "--resolved"]
    assert "head_k_dim: 6" in on_gpu.text
    assert "the first step compiles the rest" in capsys.readouterr().out
    facts = stamp.facts_of(config, "sm_90")
    stamp.write_stamp(stamp.stamp_file(own_cache, facts), facts)
    warmup.before_training(config, 0)
    assert len(on_gpu.commands) == 1 and len(on_gpu.tunings) == 3


def test_warmup_off_leaves_fla_alone(on_gpu: SimpleNamespace) -> None:
    config = tiny_config()
    config.precision.warmup = "off"
    warmup.before_training(config, 0)
    assert not on_gpu.commands and not on_gpu.tunings


def test_other_versions_are_left_alone(
    on_gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autotuners, "supported", lambda: False)
    warmup.before_training(tiny_config(), 0)
    assert not on_gpu.commands and not on_gpu.tunings
    with pytest.raises(ConfigError, match=r"written for fla-core 0\.6\.0 and Triton 3\.8"):
        warmup.check_can_compile(tiny_config())


def test_tuning_keeps_what_it_has_whatever_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    active: list[Any] = [None]
    output = tmp_path / "t.json"
    mixers: list[str] = []

    def steps(config: RunConfig, parts: str, **unused: Any) -> None:
        mixers.append(parts)
        if parts == "kda":
            raise RuntimeError("illegal memory access")
        config_of = {"kwargs": {}, "num_warps": 4, "num_stages": 3, "num_ctas": 1}
        active[0].found.put(f"fla.ops.{parts}:kernel", [1], config_of, 0.1)
        active[0].kept()

    def install(tuning: Any) -> None:
        active[0] = tuning

    for name in ("start", "stop", "free"):
        monkeypatch.setattr(rehearsal, name, lambda *unused: None)
    monkeypatch.setattr(rehearsal, "build", lambda config: config.model.pattern[0])
    monkeypatch.setattr(rehearsal, "steps", steps)
    monkeypatch.setattr(search, "architecture", lambda: "sm_90")
    monkeypatch.setattr(search, "collect", lambda tuning, walk: ([], ""))
    monkeypatch.setattr(search.compile_ahead, "compile_all", lambda *unused, **more: None)
    monkeypatch.setattr(search.autotuners, "install", install)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    assert search.tune(tiny_config(), ["gdn", "kda", "gla"], [128], output, workers=1) == 1
    table = load_table(output, "sm_90")
    assert table is not None and set(table.entries) == {"fla.ops.gdn:kernel", "fla.ops.gla:kernel"}
    assert "kda: RuntimeError: illegal memory access" in capsys.readouterr().err
    mixers.clear()
    late = time.monotonic() - 1
    assert search.tune(tiny_config(), ["gdn", "gla"], [128], output, workers=1, deadline=late) == 0
    assert not mixers and load_table(output, "sm_90") == table


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(),
        ParallelConfig(tensor=2, sequence=True),
        ParallelConfig(context=2),
        ParallelConfig(tensor=2, context=2),
        ParallelConfig(pipeline=3),
    ],
)
def test_one_process_goes_through_a_ranks_steps(
    parallel: ParallelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LT2_FORCE_CPU", "1")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    exchange = torch.distributed.all_to_all_single
    config = tiny_config(parallel=parallel)
    config.model.pattern = ["gdn", "window", "gdn"]
    small = rehearsal.one_of_each(config)
    assert small.model.pattern == ["gdn", "window"] and small.parallel.pipeline == 1
    lengths: list[int] = []
    rehearsal.start(small.parallel)
    try:
        parts = rehearsal.build(small)
        width = parts.model.decoder.layers[0].self_attention.in_proj.weight.shape
        rehearsal.steps(
            small, parts, lengths=(24, 16), before=lambda n: lengths.append(n) is None and n > 20
        )
    finally:
        rehearsal.stop()
    assert lengths == [24, 16]  # asked before the second, which was then left out
    assert torch.distributed.all_to_all_single is exchange
    whole = tiny_config()
    whole.model.pattern = ["gdn"] * 3
    assert width[0] * parallel.tensor == _rows_of_gdn(whole)


def _rows_of_gdn(config: RunConfig) -> int:
    small = rehearsal.only(config, "gdn", 61)
    rehearsal.start(small.parallel)
    try:
        parts = rehearsal.build(small)
        return int(parts.model.decoder.layers[0].self_attention.in_proj.weight.shape[0])
    finally:
        rehearsal.stop()
