"""A rank that dies without a word ends its world soon, and is named before those it takes along.

Under `tools.spawn` (also ranks that would never notice) and in a plain gloo world.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.ranks import run_ranks

ROOT = Path(__file__).parents[2]
DEATHS = {"exit": "os._exit(7)", "kill": "os.kill(os.getpid(), 9)"}
SAID = {"exit": "exit code 7", "kill": "signal 9"}


@pytest.mark.parametrize("way", DEATHS)
@pytest.mark.parametrize("stubborn", [False, True])
def test_spawn_ends_ranks_that_wait_for_a_dead_one(way, stubborn):
    code = "import os, signal, time\n"
    if stubborn:  # SIGTERM does not end a rank that hangs in a kernel or a C call
        code += "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    code += f"if os.environ['RANK'] == '1': {DEATHS[way]}\ntime.sleep(600)"
    spawn = "import sys; from megatron_lt2.tools import spawn; spawn.GRACE_S = 0.5; "
    spawn += "sys.exit(spawn.main(['--nproc', '3', '--', '-c', sys.argv[1]]))"
    started = time.monotonic()
    ended = subprocess.run(
        [sys.executable, "-c", spawn, code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert time.monotonic() - started < 30
    assert ended.returncode == {"exit": 7, "kill": 128 + 9}[way]
    assert ended.stderr.startswith(f"rank 1 ended with {SAID[way]}")
    assert len(ended.stderr.splitlines()) == 1


def test_spawn_names_a_rank_that_left_too_early():
    code = "import os, sys, time\nif os.environ['RANK'] == '1': os._exit(0)\n"
    code += "time.sleep(1); sys.exit(5)"
    argv = [sys.executable, "-m", "megatron_lt2.tools.spawn", "--nproc", "2", "--", "-c", code]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 5
    assert "rank 0 ended with exit code 5" in ended.stderr
    assert "with exit code 0 ended before: 1" in ended.stderr


def _dying(rank, world, way, step):
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    for i in range(1000):
        if rank == 1 and i == step:
            if way == "exit":
                os._exit(7)
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1000))


@pytest.mark.parametrize("way", DEATHS)
def test_a_plain_gloo_world_ends_and_names_the_dead_rank(way):
    started = time.monotonic()
    with pytest.raises(AssertionError) as caught:
        run_ranks(3, _dying, way, 20)
    assert str(caught.value).startswith(f"rank 1 of 3 died without a word: {SAID[way]}")
    assert time.monotonic() - started < 60


def _dead_before_it_joins(rank, world):
    import torch.distributed as dist

    if rank == 1:
        os._exit(7)
    dist.init_process_group("gloo")


def test_a_rank_that_never_joins_is_named():
    started = time.monotonic()
    with pytest.raises(AssertionError, match="rank 1 of 2 died without a word: exit code 7"):
        run_ranks(2, _dead_before_it_joins)
    assert time.monotonic() - started < 60
