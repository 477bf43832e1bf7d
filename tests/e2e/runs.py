"""Runs of the trainer as their users start them, and what they leave behind.

`command` starts a real `python -m ...`. `launch` forks the ranks from a server that has imported
megatron-core once and calls the same `main` with the same arguments in a process of its own, so
that a run costs its steps and not its imports; its ranks can be signalled one by one.
"""

import json
import multiprocessing as mp
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from pathlib import Path
from typing import Any

import psutil
import yaml

from megatron_lt2.tools.spawn import free_port

# The server of tests/ranks.py: a process has one.
_context = mp.get_context("forkserver")
_context.set_forkserver_preload(["tests.ranks_preload"])

ROOT = Path(__file__).parents[2]
STEPS = 12
CHECKPOINT_INTERVAL = 4
KEEP = 2

TINY = {
    "model": {
        "num_layers": 3,
        "hidden_size": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "ffn_hidden_size": 48,
        "pattern": "gdn+full",
        "loops": 2,
        "gdn": {"head_k_dim": 6},
    },
    "data": {"sequence_length": 32, "split": "90,10,0", "num_workers": 0},
    "training": {
        "steps": STEPS,
        "global_batch_size": 8,
        "micro_batch_size": 2,
        "eval_interval": 6,
        "eval_batches": 1,
    },
    "optimizer": {"lr": 0.01, "schedule": "wsd", "warmup_steps": 2, "decay_steps": 4},
    "checkpoint": {"interval": CHECKPOINT_INTERVAL, "keep": KEEP},
    "logging": {"interval": 1},
}


def write_config(path: Path, data_prefix: Path) -> Path:
    """TINY on these token files, as a YAML file."""
    sections = {**TINY, "data": {**TINY["data"], "path": str(data_prefix)}}
    path.write_text(yaml.safe_dump(sections))
    return path


@dataclass(frozen=True)
class Ended:
    """A run that has ended: exit code of each rank (or of the command), and its texts."""

    codes: list[int]
    out: str
    err: str

    def expect(self, code: int) -> "Ended":
        """Itself, if every code is `code`."""
        assert set(self.codes) == {code}, f"exit codes {self.codes}\n{self.out}\n{self.err}"
        return self

    @property
    def error_lines(self) -> list[str]:
        """The lines of stderr that say what is wrong."""
        return [line for line in self.err.splitlines() if line.startswith("error:")]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LT2_FORCE_CPU": "1"}


def command(*arguments: Any, ranks: int | None = None) -> list[str]:
    """The command line of the trainer; with `ranks`, started by megatron_lt2.tools.spawn."""
    train = ["-m", "megatron_lt2.train", *map(str, arguments)]
    if ranks is not None:
        train = ["-m", "megatron_lt2.tools.spawn", "--nproc", str(ranks), "--", *train]
    return [sys.executable, *train]


def start(argv: list[str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        argv,
        env=_environment(),
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        process_group=0,
    )


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    """Return as soon as `condition` holds, which must be before the process ends."""
    while not condition():
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=0.005)
            raise AssertionError(f"it ended too early:\n{process.communicate()}")


def call(argv: list[str], timeout: float = 120) -> Ended:
    """Run a command to its end."""
    process = start(argv)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    return Ended([process.returncode], out, err)


def _rank(argv: list[str], out: Path, err: Path, environment: dict[str, str]) -> None:
    os.setpgid(0, 0)  # so that the processes that it starts can be told
    os.environ.update(environment)
    for descriptor, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    import torch

    from megatron_lt2.train import main

    torch.set_num_threads(1)
    sys.argv[1:] = argv
    sys.exit(main(argv))


def _members(group: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Launch:
    """Ranks of the trainer that are running."""

    def __init__(self, texts: Path, arguments: Sequence[Any], ranks: int) -> None:
        texts.mkdir(parents=True, exist_ok=True)
        self._texts, argv = [texts / "out", texts / "err"], [str(a) for a in arguments]
        for path in self._texts:
            path.write_text("")
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        shared.update(WORLD_SIZE=str(ranks), LT2_FORCE_CPU="1")
        self.ranks = [
            _context.Process(
                target=_rank,
                args=(argv, *self._texts, {**shared, "RANK": str(i), "LOCAL_RANK": str(i)}),
            )
            for i in range(ranks)
        ]
        for rank in self.ranks:
            rank.start()

    def wait_until(self, condition: Callable[[], bool], timeout: float = 60) -> None:
        """Return as soon as `condition` holds, which must be before the run ends."""
        for _ in range(int(timeout / 0.005)):
            if condition():
                return
            ended = wait_for_any([rank.sentinel for rank in self.ranks], timeout=0.005)
            assert not ended, "the run ended too early:\n" + "".join(
                path.read_text() for path in self._texts
            )
        raise AssertionError(f"nothing happened in {timeout} s")

    def kill(self) -> None:
        """SIGKILL to every rank; what they started must end by itself."""
        for rank in self.ranks:
            rank.kill()
        for rank in self.ranks:
            rank.join()
        helpers = [p for rank in self.ranks for p in _members(rank.pid)]
        _, left = psutil.wait_procs(helpers, timeout=20)
        for helper in left:
            helper.kill()
        assert not left, f"outlived the ranks: {left}"

    def end(self, timeout: float = 120) -> Ended:
        """Wait for every rank."""
        try:
            for rank in self.ranks:
                rank.join(timeout)
            codes = [rank.exitcode for rank in self.ranks]
        finally:
            self.kill()
        return Ended(codes, *(path.read_text() for path in self._texts))


def launch(run: Path, *arguments: Any, ranks: int = 1) -> Launch:
    """Start the trainer with `--run_dir run` and further arguments."""
    texts = run.parent / f"{run.name}.texts"
    return Launch(texts, [*arguments, "--run_dir", run], ranks)


def train(run: Path, *arguments: Any, ranks: int = 1) -> Ended:
    """Run the trainer to its end."""
    return launch(run, *arguments, ranks=ranks).end()


def records(run: Path, kind: str) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl of one kind; none if the file is not there yet."""
    path = run / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [line for line in lines if line["kind"] == kind]


def curve(run: Path) -> dict[int, tuple[float, float, float]]:
    """Loss, gradient norm and learning rate by step; what was written last counts."""
    return {r["step"]: (r["loss"], r["grad_norm"], r["lr"]) for r in records(run, "train")}


def last_step(run: Path) -> int:
    """The step that was reported last."""
    return max(curve(run), default=0)


def checkpoint_names(run: Path) -> list[str]:
    """What lies in the checkpoints folder."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def assert_same_run(run: Path, whole: Path) -> None:
    """`run` has the losses and the final checkpoint of the undisturbed run `whole`, bit for bit."""
    import torch

    from checkpoints_tools.plain_checkpoint import PlainCheckpoint

    assert curve(run) == curve(whole)
    final = f"iter_{STEPS:07d}"
    ours, theirs = (PlainCheckpoint(r / "checkpoints" / final) for r in (run, whole))
    assert set(ours) == set(theirs)
    assert any(name.startswith(("optimizer.", "chained_")) for name in ours)
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name
