"""Jobs on the local Slurm of ci/slurm_local: submit, watch, signal, wait."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
START, STOP = (ROOT / "ci" / "slurm_local" / name for name in ("start.sh", "stop.sh"))
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL")


def missing_tools() -> list[str]:
    """The programs of Slurm that are not installed."""
    return [name for name in TOOLS if shutil.which(name, path=PATH) is None]


@dataclass(frozen=True)
class Job:
    """What scontrol says of a job."""

    facts: dict[str, str]

    def __getattr__(self, name: str) -> str:
        return self.facts[name]

    @property
    def code(self) -> int:
        """Exit code of its script."""
        return int(self.facts["ExitCode"].split(":")[0])


class Cluster:
    """One running local Slurm."""

    def __init__(self, folder: Path, nodes: int = 4) -> None:
        self.folder, self.folders = folder, set[Path]()
        options = ["--nodes", str(nodes), "--slurmd-timeout", "6", "--kill-wait", "5"]
        options += ["--requeue-delay", "5", "--grace", "25", "--prefix", "lt2t"]
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("LT2_", "SLURM_"))},
            "PATH": PATH,
        }
        self._call("bash", str(START), "--dir", str(folder), *options, timeout=60)
        self.environment["SLURM_CONF"] = str(folder / "slurm.conf")
        # A test process that is killed cannot stop it.
        alive = f"while kill -0 {os.getpid()} 2>/dev/null; do sleep 2; done"
        self.guard = subprocess.Popen(
            ["bash", "-c", f'{alive}; bash "$1" --dir "$2"', "guard", str(STOP), str(folder)],
            env=self.environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def stop(self) -> None:
        """End it, with everything that it runs."""
        self.guard.kill()
        self.guard.wait()
        self._call("bash", str(STOP), "--dir", str(self.folder), timeout=60)

    def _call(self, *words: str, timeout: float = 30, **options: Any) -> str:
        options.setdefault("env", self.environment)
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=timeout, check=False, **options
        )
        assert done.returncode == 0, (words, done.stdout, done.stderr)
        return done.stdout

    def call(self, *words: Any) -> str:
        """Output of one of Slurm's commands."""
        return self._call(*map(str, words))

    def submit(
        self,
        script: Path,
        *arguments: Any,
        cwd: Path,
        flags: tuple[str, ...] = (),
        **variables: Any,
    ) -> int:
        """Job id of a launch script with these flags of sbatch, arguments and variables."""
        settings = {
            **{"LT2_VENV": sys.prefix, "LT2_FORCE_CPU": "1", "OMP_NUM_THREADS": "1"},
            **{"LT2_SMOKE": "0", "LT2_LOGGING__TENSORBOARD": "false"},
            **{name: str(value) for name, value in variables.items()},
        }
        cwd.mkdir(parents=True, exist_ok=True)
        self.folders.add(cwd)
        output = self._call(
            *("sbatch", "--parsable", *flags, str(script), *map(str, arguments)),
            cwd=cwd,
            env={**self.environment, **settings},
        )
        return int(output.split(";")[0])

    def job(self, number: int | str) -> Job:
        """State of a job now."""
        text = self.call("scontrol", "show", "job", number, "-o")
        return Job(dict(re.findall(r"(\w+)=(\S*)", text.splitlines()[0])))

    def wait(self, number: int | str, timeout: float = 300) -> Job:
        """The job when it has ended."""
        self.until(lambda: self.job(number).JobState in ENDED, timeout, f"job {number} to end")
        return self.job(number)

    def until(self, condition: Callable[[], Any], timeout: float, what: str) -> None:
        """Wait for something."""
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, f"waited {timeout} s for {what}\n{self.report()}"
            time.sleep(0.05)

    def report(self) -> str:
        """Queue, nodes and the ends of the logs, for a failed test."""
        texts = [self.call("squeue"), self.call("sinfo", "-N", "-l")]
        outputs = sorted(path for cwd in self.folders for path in cwd.glob("*.out"))
        texts += [f"{path}:\n{path.read_text()[-1500:]}" for path in outputs]
        texts += [path.read_text()[-1500:] for path in sorted(self.folder.glob("log/slurmctld*"))]
        return "\n".join(texts)

    def kill_node(self, name: str) -> None:
        """A node goes down: SIGKILL to its slurmd and to what ran under it."""
        daemon = int((self.folder / "run" / f"slurmd.{name}.pid").read_text())
        import psutil

        children = psutil.Process(daemon).children(recursive=True)
        steps = [
            p
            for p in psutil.process_iter(["name", "environ"])
            if (p.info["environ"] or {}).get("SLURMD_NODENAME") == name
            and (p.info["environ"] or {}).get("SLURM_CONF") == self.environment["SLURM_CONF"]
        ]
        os.kill(daemon, signal.SIGKILL)
        for process in [*children, *steps]:
            if process.is_running():
                process.kill()

    def start_node(self, name: str) -> None:
        """Bring a killed node back."""
        self.call("slurmd", "-N", name, "-f", self.environment["SLURM_CONF"])


def copy_checkout(target: Path) -> Path:
    """The files that a job needs, at another place."""
    for name in ("launchers", "megatron_lt2", "ci", "data_prep", "checkpoints_tools"):
        shutil.copytree(ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", target)
    return target
