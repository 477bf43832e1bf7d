"""Start the ranks of one machine.

    python -m megatron_lt2.tools.spawn --nproc 2 -- -m megatron_lt2.train --config FILE

What torchrun does for one machine, with four differences that a run depends on:

- The exit code is the ranks' own. Under torchrun every non-zero code becomes 1 behind a traceback,
  so that 75 ("saved, go on") and 2 ("a setting is wrong") cannot be told from a crash.
- SIGUSR1, SIGTERM and the first Ctrl-C all reach the ranks as SIGUSR1 ("finish the step, save,
  exit"), and the ranks get the time they need; torchrun kills them 30 s after SIGTERM. A second
  Ctrl-C ends them at once.
- A rank that fails is named at once, also one that was killed and could say nothing, and the others
  are ended half a minute later at most.
- When this process dies, the kernel ends the ranks (Linux), so that a killed run leaves nobody who
  still writes into its folder.

Nothing heavier than the standard library is imported: the ranks pay for torch, this process does
not.
"""

import argparse
import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType

from megatron_lt2.orphans import die_with_parent

# Below Linux's ephemeral range (32768-60999), where a port may be taken at random.
PORTS = range(20000, 30000)
# How long the other ranks may take to end by themselves once one has failed.
GRACE_S = 15.0
# A rank that is still importing torch ignores the request to stop, so it is repeated.
REPEAT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command on every rank; returns the exit code that stands for all of them."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.tools.spawn", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this machine")
    parser.add_argument(
        "--with-parent", action="store_true", help="end at once when the calling process dies"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="-- arguments of python")
    args = parser.parse_args(argv)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if args.nproc < 1 or not command:
        parser.error("needs --nproc of at least 1 and a command after --")
    if args.with_parent:
        die_with_parent()
    return run_ranks([sys.executable, *command], args.nproc)


def run_ranks(command: Sequence[str], nproc: int) -> int:
    """Start `nproc` copies of `command` as ranks 0..nproc-1 and wait for all of them.

    Returns:
        0 if every rank returned 0, else the code of the rank that failed first (128 + signal number
        for one that a signal ended). When one fails, the others get SIGTERM after GRACE_S, then
        SIGKILL.
    """
    ranks: list[subprocess.Popen[bytes]] = []
    interrupts = 0
    repeat_at = [float("inf")]

    def forward(number: int, frame: FrameType | None) -> None:
        nonlocal interrupts
        # Only a person who presses Ctrl-C again means "now"; schedulers repeat TERM and USR1.
        interrupts += number == signal.SIGINT
        _send(ranks, signal.SIGKILL if interrupts > 1 else signal.SIGUSR1)
        repeat_at[0] = time.monotonic() + REPEAT_S

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, forward)
    environment = _shared_environment(nproc)
    for rank in range(nproc):
        ranks.append(
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                # A group of its own: Ctrl-C in the terminal comes only here, and goes on as USR1.
                process_group=0,
                preexec_fn=_rank_preparation(),
            )
        )
    if repeat_at[0] < float("inf"):  # a signal came while they were being started
        _send(ranks, signal.SIGUSR1)
    return _wait(ranks, repeat_at)


def free_port() -> int:
    """A port of PORTS that nobody listens on; MASTER_PORT overrides it."""
    if os.environ.get("MASTER_PORT"):
        return int(os.environ["MASTER_PORT"])
    for port in random.sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise RuntimeError(f"no free port found in {PORTS.start}-{PORTS.stop - 1}; set MASTER_PORT")


def _shared_environment(nproc: int) -> dict[str, str]:
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    return {
        # Each rank would otherwise take every core, and they would fight for them.
        "OMP_NUM_THREADS": str(threads),
        "MASTER_ADDR": "127.0.0.1",
        **os.environ,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(nproc),
        # For the ranks' record of how they were started.
        "LT2_SPAWNED": f"{os.path.basename(sys.executable)} -m megatron_lt2.tools.spawn "
        f"--nproc {nproc} --",
        "LOCAL_WORLD_SIZE": str(nproc),
    }


def _rank_preparation() -> Callable[[], None]:
    parent = os.getpid()

    def prepare() -> None:
        # Until the trainer has its handler, USR1 would end the rank; ignoring is inherited by exec.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)

    return prepare


def _send(ranks: Sequence[subprocess.Popen[bytes]], number: int) -> None:
    for rank in ranks:
        if rank.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                rank.send_signal(number)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], repeat_at: list[float]) -> int:
    result, deadline, urge = 0, float("inf"), signal.SIGTERM
    while running := [rank for rank in ranks if rank.poll() is None]:
        failed = next((r.returncode for r in ranks if r.returncode), 0)
        if failed and not result:
            result, deadline = failed, time.monotonic() + GRACE_S
            _name_failed(ranks)
        if time.monotonic() > deadline:
            _send(running, urge)
            deadline, urge = time.monotonic() + GRACE_S, signal.SIGKILL
        if time.monotonic() > repeat_at[0]:
            _send(running, signal.SIGUSR1)
            repeat_at[0] = time.monotonic() + REPEAT_S
        _wait_for_any(running, 0.2)
    if not result:
        result = next((r.returncode for r in ranks if r.returncode), 0)
        _name_failed(ranks)
    return result if result >= 0 else 128 - result


def _wait_for_any(running: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until one of them ends, so that a failure is told before the others fail for it."""
    if not hasattr(os, "pidfd_open"):
        with contextlib.suppress(subprocess.TimeoutExpired):
            running[0].wait(timeout=seconds)
        return
    with contextlib.ExitStack() as stack:
        handles = []
        for rank in running:
            with contextlib.suppress(ProcessLookupError):
                handles.append(os.pidfd_open(rank.pid))
                stack.callback(os.close, handles[-1])
        select.select(handles, [], [], seconds)


QUIET = (0, 2, 75)
"""Codes that need no word more: done; a refusal, which was told; saved and left."""


def _name_failed(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """Say which ranks have failed so far, and how, before the rest fails because of them."""
    done = [number for number, rank in enumerate(ranks) if rank.returncode == 0]
    others = f"; the others get {GRACE_S:.0f} s to end" if len(ranks) > 1 else ""
    if done:  # one that leaves too early makes the others fail
        others += f"; with exit code 0 ended before: {', '.join(map(str, done))}"
    for number, rank in enumerate(ranks):
        code = rank.returncode
        if code is None or code in QUIET:
            continue
        how = f"signal {-code} ({signal.strsignal(-code)})" if code < 0 else f"exit code {code}"
        # Written in one piece: the ranks share this output.
        os.write(2, f"rank {number} ended with {how}{others}\n".encode())


if __name__ == "__main__":
    sys.exit(main())
