"""Kill a run at random moments, start it again, and compare the end with the undisturbed run.

    python ci/kill_campaign.py [--kills 20] [--ranks 2] [--seed 0] [--keep DIR]

SIGKILL goes to one random rank each time (its launcher then ends the others) or, one time in four,
to the launcher with all its ranks. The moments go round what a run does: start and data building,
first step, warm-up, training, evaluation, writing a checkpoint, the last save; within each they are
random. After the kills the run is started until it is done. Exit code 0: final weights, optimizer
and loss curve are bit for bit those of the run that nobody disturbed, no checkpoint was lost, and
no start resumed from anything but the newest complete one.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import tests.e2e.runs as runs  # noqa: E402
from megatron_lt2.training.checkpoint_files import newest_complete  # noqa: E402
from tests.e2e.conftest import _documents  # noqa: E402

STEPS = 40
SETTINGS = {
    "--training.steps": STEPS,
    "--training.eval_interval": 8,
    "--training.eval_batches": 2,
    "--optimizer.warmup_steps": 6,
    "--optimizer.decay_steps": 10,
    "--checkpoint.interval": 5,
    "--logging.tensorboard": "false",
}
PHASES = ("start", "first step", "warm-up", "training", "evaluation", "checkpoint", "end")


def main() -> int:
    """Run the campaign; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: a temporary one")
    args = parser.parse_args()
    folder = args.keep or Path(tempfile.mkdtemp(prefix="lt2-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return campaign(folder, args.kills, args.ranks, random.Random(args.seed))
    finally:
        if args.keep is None:
            shutil.rmtree(folder, ignore_errors=True)


def campaign(folder: Path, kills: int, ranks: int, pick: random.Random) -> int:
    """All of it below `folder`."""
    config = corpus(folder)
    quiet, run = folder / "quiet", folder / "killed"
    started = time.monotonic()
    assert start(config, quiet, ranks).wait() == 0
    phases: Counter[str] = Counter()
    resumed_wrong = lost = 0
    durable = 0
    done = 0
    while done < kills:
        wanted = PHASES[done % len(PHASES)]
        earlier = len(start_texts(run))
        process = start(config, run, ranks)
        ended_early = not wait_for(wanted, run, process, pick)
        if not ended_early:
            kill(process, pick)
            done += 1
            phases[wanted] += 1
        code = process.wait(timeout=120)
        before, durable = durable, durable_step(run)
        lost += durable < before
        resumed_wrong += not resumed_at(start_texts(run)[earlier:], before)
        print(f"{done:3d} {wanted:<10} code {code:4d} durable step {durable}", flush=True)
        if (
            durable >= STEPS and code == 0
        ):  # done before all kills: go on with a new run of the rest
            compare(run, quiet)
            shutil.rmtree(run)
            durable = 0
    while start(config, run, ranks).wait() != 0:
        pass
    compare(run, quiet)
    result = {
        "kills": done,
        "ranks": ranks,
        "phases": dict(phases),
        "checkpoints_lost": lost,
        "wrong_resumes": resumed_wrong,
        "seconds": round(time.monotonic() - started),
    }
    print(json.dumps(result))
    return int(bool(lost or resumed_wrong))


def corpus(folder: Path) -> Path:
    """Token files and the tiny configuration; the config's path."""
    from data_prep.build import tokenize_files
    from tests.unit.tiny_text import request, write_jsonl, write_tokenizer

    tokenizer = write_tokenizer(folder / "tokenizer", 300)
    source = write_jsonl(folder / "corpus.jsonl", _documents(60))
    tokenize_files(request([source], tokenizer, folder / "corpus"))
    return runs.write_config(folder / "config.yaml", folder / "corpus")


def start(config: Path, run: Path, ranks: int) -> "subprocess.Popen[bytes]":
    """The run under its launcher; output goes to a file beside the run folder."""
    options = [str(word) for pair in SETTINGS.items() for word in pair]
    argv = runs.command("--config", config, "--run_dir", run, *options, ranks=ranks)
    with open(run.parent / f"{run.name}.log", "ab") as log:
        return subprocess.Popen(
            argv, env=runs._environment(), cwd=ROOT, stdout=log, stderr=log, process_group=0
        )


def wait_for(
    phase: str, run: Path, process: "subprocess.Popen[bytes]", pick: random.Random
) -> bool:
    """Return in the midst of `phase`; False if the run ended before."""
    if phase == "start":
        time.sleep(pick.uniform(0.5, 6.0))
        return process.poll() is None
    first = runs.last_step(run)

    def heartbeat(name: str) -> bool:
        with suppress(OSError, ValueError):
            beat = json.loads((run / "heartbeat.json").read_text())
            return beat["phase"] == name and beat["pid"] in ranks_of(process)
        return False

    def writing() -> bool:
        return any((run / "checkpoints").glob("iter_*.tmp"))

    reached: dict[str, Callable[[], bool]] = {
        "first step": lambda: heartbeat("train"),
        "warm-up": lambda: runs.last_step(run) > min(first, 3),
        "training": lambda: runs.last_step(run) > first + 2,
        "evaluation": lambda: heartbeat("evaluate"),
        "checkpoint": writing,
        "end": lambda: heartbeat("stop"),
    }
    condition = reached[phase]
    while process.poll() is None:
        if condition():
            time.sleep(pick.uniform(0.0, 0.05))
            return process.poll() is None
        time.sleep(0.002)
    return False


def ranks_of(process: "subprocess.Popen[bytes]") -> list[int]:
    """Process ids of the ranks under a launcher."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process.pid).children()]
    return []


def kill(process: "subprocess.Popen[bytes]", pick: random.Random) -> None:
    """SIGKILL to a random rank, or to the launcher's whole group."""
    ranks = ranks_of(process)
    with suppress(ProcessLookupError):
        if ranks and pick.random() < 0.75:
            os.kill(pick.choice(ranks), signal.SIGKILL)
        else:
            os.killpg(process.pid, signal.SIGKILL)


def durable_step(run: Path) -> int:
    """Step of the newest complete checkpoint."""
    newest = newest_complete(run / "checkpoints")
    return 0 if newest is None else int(newest.name.removeprefix("iter_"))


def start_texts(run: Path) -> list[str]:
    """What the starts of a run said about where they begin."""
    return [r["message"] for r in runs.records(run, "start") if "message" in r]


def resumed_at(texts: list[str], step: int) -> bool:
    """Whether a start, if it came so far, took up the run after `step`."""
    expected = f"resuming at step {step}," if step else "starting from scratch"
    return all(text.startswith(expected) for text in texts)


def compare(run: Path, quiet: Path) -> None:
    """Losses and every tensor of the last checkpoint, bit for bit."""
    runs.STEPS = STEPS
    runs.assert_same_run(run, quiet)
    print("    final weights, optimizer and losses are those of the undisturbed run", flush=True)


if __name__ == "__main__":
    sys.exit(main())
