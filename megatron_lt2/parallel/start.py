"""Starting the ranks: torchrun, srun and a bare `python` all end in the same state.

torchrun sets RANK, WORLD_SIZE and LOCAL_RANK. Under srun they come from the SLURM_* variables of
the step. With neither, this is one rank that talks to nobody.
"""

import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform


@dataclass(frozen=True)
class RankInfo:
    """Where this process stands among the ranks."""

    rank: int
    world_size: int
    local_rank: int


def rank_info() -> RankInfo:
    """Read the rank from torchrun's variables, else from an srun step, else be the only rank.

    A batch shell or `salloc` has SLURM_NTASKS too, but no SLURM_STEP_ID: python started there
    is one rank.
    """
    env = os.environ
    if "RANK" in env and "WORLD_SIZE" in env:
        rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
        return RankInfo(rank, world, int(env.get("LOCAL_RANK", rank)))
    if "SLURM_PROCID" in env and env.get("SLURM_STEP_ID", "").isdigit():
        return RankInfo(
            int(env["SLURM_PROCID"]),
            int(env.get("SLURM_STEP_NUM_TASKS") or env["SLURM_NTASKS"]),
            int(env.get("SLURM_LOCALID", "0")),
        )
    return RankInfo(0, 1, 0)


def start_ranks(parallel: ParallelConfig, seed: int) -> RankInfo:
    """Join the process group and build megatron-core's model-parallel groups.

    Raises:
        ConfigError: MASTER_ADDR is missing with more than one rank.
    """
    info = rank_info()
    # megatron-core falls back to SLURM_* by itself and would see the whole job from a batch shell.
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(info.rank), str(info.world_size)
    os.environ["LOCAL_RANK"] = str(info.local_rank)
    if info.world_size > 1 and "MASTER_ADDR" not in os.environ:
        raise ConfigError(
            f"{info.world_size} ranks need MASTER_ADDR and MASTER_PORT; "
            "start them with torchrun or a script in launchers/"
        )
    if platform.has_gpu():
        torch.cuda.set_device(info.local_rank % torch.cuda.device_count())
    if not dist.is_initialized():
        if info.world_size > 1:
            dist.init_process_group(platform.backend(), rank=info.rank, world_size=info.world_size)
        else:
            # A store in memory: no port to find free and lose to another process.
            dist.init_process_group(
                platform.backend(), store=dist.HashStore(), rank=0, world_size=1
            )
    build_groups(parallel, seed)
    return info


def build_groups(parallel: ParallelConfig, seed: int) -> None:
    """megatron-core's tensor, pipeline, context and data-parallel groups, and its RNG tracker."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
    )
    # Pipeline stages draw different numbers, as in Megatron.
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def regroup(parallel: ParallelConfig, seed: int) -> RankInfo:
    """`start_ranks` for a further model on these ranks, with another layout; the ranks stay."""
    from megatron.core import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    return start_ranks(parallel, seed)


def first_rank_says(text: str) -> str:
    """`text` of rank 0, on every rank; a collective call."""
    said = [text]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def stop_ranks() -> None:
    """Leave the process group."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
