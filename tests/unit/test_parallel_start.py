"""Which rank a process is, by launcher; and the stand-ins for CUDA on CPU ranks."""

import pytest
import torch
from torch.overrides import _get_current_function_mode_stack

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform
from megatron_lt2.parallel.start import RankInfo, rank_info, start_ranks

platform.install()

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SRUN = {
    "SLURM_JOB_ID": "77",
    "SLURM_NTASKS": "16",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "12",
}
on_cpu = pytest.mark.skipif(platform.has_gpu(), reason="CUDA is left as it is")


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, RankInfo(0, 1, 0)),
        (TORCHRUN, RankInfo(5, 8, 1)),
        ({"RANK": "5", "WORLD_SIZE": "8"}, RankInfo(5, 8, 5)),
        # The step's size counts, not the job's.
        (SRUN, RankInfo(6, 12, 2)),
        # torchrun under srun: its own variables say more.
        (SRUN | TORCHRUN, RankInfo(5, 8, 1)),
        # A shell of `salloc`, or a batch script: tasks are allocated, but no step runs.
        ({"SLURM_JOB_ID": "77", "SLURM_NTASKS": "16"}, RankInfo(0, 1, 0)),
        ({"SLURM_NTASKS": "16", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, RankInfo(0, 1, 0)),
        ({"RANK": "5"}, RankInfo(0, 1, 0)),
    ],
    ids=[
        "bare",
        "torchrun",
        "torchrun without a local rank",
        "srun",
        "torchrun under srun",
        "salloc",
        "batch script",
        "half of torchrun",
    ],
)
def test_rank_info(monkeypatch, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert rank_info() == expected


def test_many_ranks_need_a_meeting_point(monkeypatch):
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="8 ranks need MASTER_ADDR and MASTER_PORT; start them"):
        start_ranks(ParallelConfig(), 1)


@on_cpu
def test_cuda_means_the_cpu():
    assert platform.device() == torch.device("cpu")
    assert platform.backend() == "gloo"
    assert torch.empty(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    tensor = torch.ones(2)
    assert tensor.cuda() is tensor
    assert tensor.to("cuda:1").device.type == "cpu"
    assert torch.tensor([1, 2], device=torch.cuda.current_device()).tolist() == [1, 2]
    assert torch.ones(3, pin_memory=True).sum() == 3


@on_cpu
def test_other_calls_are_left_alone():
    assert torch.ones(2, device="meta").device.type == "meta"
    assert torch.ones(2).to(torch.float64).dtype == torch.float64
    assert torch.ones(2).to("cpu", torch.int32).dtype == torch.int32


@on_cpu
def test_streams_and_events_do_nothing():
    stream, event = torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(stream):
        stream.wait_stream(torch.cuda.current_stream())
        stream.wait_event(stream.record_event(event))
    torch.cuda.synchronize()
    assert event.query()


@on_cpu
def test_random_state_is_the_cpus():
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), first)


@on_cpu
def test_installing_twice_adds_nothing():
    depth = len(_get_current_function_mode_stack())
    assert depth >= 1
    platform.install()
    assert len(_get_current_function_mode_stack()) == depth


@on_cpu
def test_torch_compile_still_compiles():
    """It is switched off only while megatron-core is imported."""
    assert torch.compile.__module__ == "torch"


def test_force_cpu_wins_over_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform.has_gpu()
    monkeypatch.setenv("LT2_FORCE_CPU", "1")
    assert not platform.has_gpu()
    assert platform.backend() == "gloo"
