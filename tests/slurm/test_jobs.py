"""The launch scripts under a real Slurm: signals, preemption, lost nodes, failures, chains."""

import re
import time
from pathlib import Path

import pytest

from megatron_lt2.training.checkpoint_files import newest_complete
from tests.e2e.runs import curve, last_step
from tests.slurm.cluster import ROOT, Cluster, copy_checkout
from tests.slurm.conftest import STEPS

SCRIPT = "launchers/pretrain_lt2_1b3.sh"
TWO_BY_TWO = ("--nodes=2", "--ntasks-per-node=2")
ONE = ("--nodes=1", "--ntasks-per-node=1")


def durable_step(run: Path) -> int:
    newest = newest_complete(run / "checkpoints")
    return 0 if newest is None else int(newest.name.removeprefix("iter_"))


def output(cwd: Path, job: int) -> str:
    return (cwd / f"lt2_1b3-{job}.out").read_text()


@pytest.fixture(scope="module")
def pair(
    cluster: Cluster, settings: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, str, int]]:
    """Two jobs at once on the same four nodes: run folder, joined log and restarts of each.

    One is left alone. The other is submitted from another folder than its checkout, whose path has
    a space like that of the run folder, and gets the signal of the time limit.
    """
    top = tmp_path_factory.mktemp("pair")
    checkout = copy_checkout(top / "a checkout")
    here, there = top / "here", top / "other place"
    quiet, disturbed = top / "quiet", top / "a run"
    jobs = {
        "quiet": cluster.submit(
            *(ROOT / SCRIPT, "--run_dir", quiet),
            **{"cwd": here, "flags": TWO_BY_TWO, "LT2_CONFIG": settings, "LT2_ROOT": ROOT},
        ),
        "disturbed": cluster.submit(
            *(checkout / SCRIPT, "--run_dir", disturbed),
            **{"cwd": there, "flags": TWO_BY_TWO, "LT2_CONFIG": settings, "LT2_ROOT": checkout},
        ),
    }
    cluster.until(lambda: last_step(disturbed) >= 2, 150, "the first steps")
    cluster.call("scancel", "--batch", "-s", "USR1", jobs["disturbed"])
    found = {}
    for name, cwd, run in (("quiet", here, quiet), ("disturbed", there, disturbed)):
        ended = cluster.wait(jobs[name])
        text = output(cwd, jobs[name])
        assert (ended.JobState, ended.code) == ("COMPLETED", 0), text
        found[name] = (run, text, int(ended.Restarts))
    return found


def test_two_nodes_with_two_ranks_each(pair) -> None:
    run, text, restarts = pair["quiet"]
    assert restarts == 0
    assert "4 ranks (4 data-parallel)" in text
    assert "starting from scratch; job" in text
    assert sorted(curve(run)) == list(range(1, STEPS + 1))
    (logs,) = (run / "logs").glob("job-*.0")
    assert {path.name for path in logs.glob("rank-*.log")} == {f"rank-{i}.log" for i in range(4)}
    for name in ("config.yaml", "command.txt", "job.txt"):
        assert (logs / name).stat().st_size > 0
    assert (run / "finished").read_text() == f"{STEPS}\n"
    events = (run / "events.jsonl").read_text().splitlines()
    assert len(events) == 2 and '"event": "end"' in events[1] and '"code": 0' in events[1]


def test_usr1_saves_requeues_resumes_and_changes_no_bit(pair) -> None:
    run, text, restarts = pair["disturbed"]
    assert restarts == 1
    assert "asked the ranks to save and leave" in text
    step = re.search(r"resuming at step (\d+), .*; job \d+, restart 1", text)
    assert step and 2 <= int(step.group(1)) < STEPS
    assert curve(run) == curve(pair["quiet"][0])


def test_preemption(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--nodes=2", "--ntasks-per-node=1")
    job = cluster.submit(
        *(ROOT / SCRIPT, "--run_dir", run),
        **{"cwd": tmp_path, "flags": flags, "LT2_CONFIG": settings, "LT2_ROOT": ROOT},
    )
    cluster.until(lambda: last_step(run) >= 2, 150, "the first steps")
    urgent = tmp_path / "urgent.sh"
    urgent.write_text("#!/bin/bash\nsleep 1\n")
    other = cluster.submit(
        urgent, cwd=tmp_path, flags=("-p", "high", "--nodes=4", "--exclusive", "--output=u.out")
    )
    assert cluster.wait(other).code == 0
    ended = cluster.wait(job)
    text = output(tmp_path, job)
    assert (ended.JobState, ended.code, int(ended.Restarts)) == ("COMPLETED", 0, 1), text
    assert "resuming at step" in text
    assert sorted(curve(run)) == list(range(1, STEPS + 1))


def test_a_node_that_goes(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = ("--nodes=2", "--ntasks-per-node=1")
    job = cluster.submit(
        *(ROOT / SCRIPT, "--run_dir", run),
        **{"cwd": tmp_path, "flags": flags, "LT2_CONFIG": settings, "LT2_ROOT": ROOT},
    )
    cluster.until(lambda: durable_step(run) >= 10, 150, "a checkpoint")
    nodes = cluster.call("scontrol", "show", "hostnames", cluster.job(job).NodeList).split()
    cluster.kill_node(nodes[-1])
    try:
        ended = cluster.wait(job)
    finally:
        cluster.start_node(nodes[-1])
    text = output(tmp_path, job)
    assert (ended.JobState, ended.code, int(ended.Restarts)) == ("COMPLETED", 0, 1), text
    assert nodes[-1] not in ended.NodeList
    assert "resuming at step" in text
    assert sorted(curve(run)) == list(range(1, STEPS + 1))


FAULT = """

import os as _os

_reads, _next = [], DataFeed.__next__


def _fails(self):
    _reads.append(None)
    if _os.environ["RANK"] == "1" and len(_reads) == {reads}:
        raise RuntimeError("a worm in the tape")
    return _next(self)


DataFeed.__next__ = _fails
"""


def test_a_rank_that_fails(cluster: Cluster, settings: Path, tmp_path: Path) -> None:
    """It ends the job soon, its traceback is in the joined log, and the retries are counted."""
    checkout, run = copy_checkout(tmp_path / "checkout"), tmp_path / "run"
    with (checkout / "megatron_lt2/training/steps.py").open("a") as file:
        file.write(FAULT.format(reads=60))
    flags = ("--nodes=2", "--ntasks-per-node=1")
    job = cluster.submit(
        *(checkout / SCRIPT, "--run_dir", run),
        **{"cwd": tmp_path, "flags": flags, "LT2_CONFIG": settings, "LT2_ROOT": checkout},
        LT2_MAX_RETRIES=1,
    )
    ended = cluster.wait(job)
    text = output(tmp_path, job)
    assert (ended.JobState, int(ended.Restarts)) == ("FAILED", 1), text
    assert ended.code not in (0, 2, 75)
    assert text.count("RuntimeError: a worm in the tape") == 2, text
    assert "failure 1, LT2_MAX_RETRIES=1" in text and "failure 2 of this job" in text
    for start in (0, 1):
        failed = re.findall(
            r"rank 1 failed at ([0-9.]+)", (run / f"logs/job-{job}.{start}/rank-1.log").read_text()
        )
        ends = [line for line in (run / "events.jsonl").read_text().splitlines() if '"end"' in line]
        took = float(re.search(r'"time": (\d+)', ends[start]).group(1)) - float(failed[0])
        assert took < 70


def test_a_chain_and_an_array_end_at_the_finished_flag(
    cluster: Cluster, settings: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    where = {"cwd": tmp_path, "LT2_CONFIG": settings, "LT2_ROOT": ROOT}
    job = cluster.submit(ROOT / SCRIPT, "--run_dir", run, flags=ONE, LT2_CHAIN=3, **where)
    cluster.until(lambda: last_step(run) >= 2, 150, "the first steps")
    followers = (run / "logs" / f"chain-{job}").read_text().split()
    assert len(followers) == 3
    cluster.call("scancel", "--batch", "-s", "USR1", job)
    assert int(cluster.wait(job).Restarts) == 0
    assert cluster.wait(followers[0]).JobState == "COMPLETED"
    assert "resuming at step" in output(tmp_path, int(followers[0]))
    assert sorted(curve(run)) == list(range(1, STEPS + 1))
    for number in followers[1:]:
        assert cluster.wait(number).JobState == "CANCELLED"

    started = time.monotonic()
    flags = (*ONE, "--array=1-2%1", "--output=array-%a.out")
    array = cluster.submit(ROOT / SCRIPT, "--run_dir", run, flags=flags, **where)
    for element in (1, 2):
        assert cluster.wait(f"{array}_{element}").JobState == "COMPLETED"
        assert "is finished" in (tmp_path / f"array-{element}.out").read_text()
    assert time.monotonic() - started < 40


@pytest.mark.parametrize("number", ["2", "1"])
def test_the_node_list_is_scontrols(cluster: Cluster, number: str, tmp_path: Path) -> None:
    """Where the ranks meet is the first host that Slurm itself names."""
    script = tmp_path / "meet.sh"
    script.write_text(
        f'#!/bin/bash\nLT2_ROOT="{ROOT}"; . "{ROOT}/launchers/lib.sh"\nlt2_rendezvous\n'
        'echo "$MASTER_ADDR $MASTER_PORT $SLURM_JOB_ID"\nsrun hostname\n'
    )
    job = cluster.submit(
        script, cwd=tmp_path, flags=(f"--nodes={number}", "--output=m.out", "--wait")
    )
    address, port, number_of_job, *hosts = (tmp_path / "m.out").read_text().split()
    assert int(number_of_job) == job
    assert int(port) == 20000 + job % 10000
    assert len(address) > 0
    if len(set(hosts)) > 1 or hosts[0].startswith("lt2t"):
        assert address in hosts
