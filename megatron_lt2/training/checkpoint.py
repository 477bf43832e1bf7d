"""Saving and loading the whole state of a run with megatron-core's dist_checkpointing.

A checkpoint holds the model, the optimizer (in the form that any tensor- and data-parallel size can
read back), the schedule, the RNG states and the position in the data. The tensors can be written in
the background; a checkpoint exists once its manifest does (checkpoint_files.py).
"""

import functools
import multiprocessing
import os
import platform as host_platform
import random
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from multiprocessing.managers import SyncManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

import megatron_lt2
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.load import load_saved, to_yaml
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.orphans import die_with_parent
from megatron_lt2.training import checkpoint_files as files
from megatron_lt2.training import initial_weights, resume
from megatron_lt2.training.checkpoint_write import attempt, finalize, first_problem, room_problem
from megatron_lt2.training.environment import job_note
from megatron_lt2.training.metrics import RunLog
from megatron_lt2.training.optimizer_state import finish_load, keeping_padding, prepare_for_load
from megatron_lt2.training.setup import TrainingParts

HELPERS_IGNORE = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
METADATA = {"distrib_optim_sharding_type": "fully_reshardable"}


class Checkpointer:
    """Writes and reads the checkpoints of one run.

    Args:
        config: the resolved config; a copy lies in every checkpoint.
        parts: what is saved.
        log: where events are reported.
        data: checksums of the token files, to notice when others lie there on resume.
        progress: what the loop itself wants to have kept.
    """

    def __init__(
        self,
        config: RunConfig,
        parts: TrainingParts,
        log: RunLog,
        data: tuple[str, ...] = (),
        progress: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self.config, self.parts, self.log = config, parts, log
        self.data = list(data)
        self.folder = Path(config.run_dir) / "checkpoints"
        self._queue = AsyncCallsQueue()
        self._began = 0.0
        self.saved_step: int | None = None
        self.started_from: dict[str, Any] | None = None
        """Whose weights the run began with."""
        self.first_weights: Callable[[], dict[str, Any]] | None = None
        """Fills a new model instead of `checkpoint.init_from`; says `from` what and its `step`."""
        self.size = 0
        """Bytes of the newest checkpoint that this process wrote or read; 0: none yet."""
        self.progress = progress
        self.loaded_progress: Mapping[str, Any] = {}

    def save(self, step: int, *, background: bool) -> bool:
        """Save the state after `step` steps; with `background`, write it behind training.

        A disk that is full ends nothing: the half checkpoint goes, the older ones stay, and the
        next interval tries again. In the background nothing waits for a slow disk either: while
        the last checkpoint is still being written, this one is left out.

        Returns:
            Whether it is saved, or with `background` on its way.
        """
        self.finish_pending(blocking=not background)
        if step == self.saved_step:
            return True
        if background and self._queue.get_num_unfinalized_calls():
            self.log.event(
                "checkpoint_late",
                f"warning: no checkpoint at step {step}: the last one is still being written after "
                f"{time.monotonic() - self._began:.0f} s; a larger checkpoint.interval or a faster "
                "disk",
                step=step,
            )
            return False
        started = self._began = time.monotonic()
        temporary = self.folder / (files.folder_name(step) + ".tmp")
        problem = attempt(lambda: self._begin(temporary)) if dist.get_rank() == 0 else None
        if problem is None and dist.get_rank() == 0:
            problem = room_problem(temporary, self.size)
        problem = first_problem(problem)
        if problem is not None:
            self._give_up(step, temporary, problem)
            return False
        _start_results_queue()
        request = dist_checkpointing.save(
            self._state(step, loading=False),
            str(temporary),
            async_sharded_save=True,
            async_strategy="mcore",
        )
        facts = self._facts(step)

        steps = list(request.finalize_fns)

        def publish() -> None:
            problem = finalize(steps)
            if problem is None and dist.get_rank() == 0:
                problem = attempt(lambda: self._publish(temporary, step, facts, started))
            problem = first_problem(problem)
            if problem is not None:
                self._give_up(step, temporary, problem)

        self.saved_step = step
        request = _ending_with_this_process(request)._replace(finalize_fns=[publish])
        # In the foreground too: the writing process tells of a full disk, an own write would raise
        # on one rank only.
        self._queue.schedule_async_request(request)
        if background:
            self.log.say(f"checkpoint {files.folder_name(step)} is being written")
        else:
            self.finish_pending(blocking=True)
        return self.saved_step == step

    def _begin(self, temporary: Path) -> None:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        (temporary / "run_config.yaml").write_text(to_yaml(self.config))

    def _publish(self, temporary: Path, step: int, facts: dict[str, Any], started: float) -> None:
        final = files.publish(temporary, step, facts)
        self.size = sum(files.read_manifest(final)["files"].values())
        removed = files.prune(self.folder, self.config.checkpoint.keep)
        self.log.event(
            "checkpoint",
            f"checkpoint {final.name} is durable ({time.monotonic() - started:.1f} s)"
            + (f", removed {', '.join(removed)}" if removed else ""),
            step=step,
            seconds=time.monotonic() - started,
        )

    def _give_up(self, step: int, temporary: Path, problem: str) -> None:
        """Away with half a checkpoint; the run goes on and says so loudly."""
        self.saved_step = None
        if dist.get_rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)
        self.log.event(
            "checkpoint_failed",
            f"WARNING: NO CHECKPOINT at step {step}: {problem}. Training goes on, earlier "
            "checkpoints are intact, and the next interval tries again",
            step=step,
        )

    def finish_pending(self, *, blocking: bool) -> None:
        """Publish a background checkpoint whose files are written; with `blocking`, wait for it."""
        self._queue.maybe_finalize_async_calls(blocking=blocking)

    def close(self) -> None:
        """Wait for background work and end it."""
        self.finish_pending(blocking=True)
        self._queue.close()

    def load_newest(self, *, tidy: bool = True) -> int:
        """Restore the newest complete checkpoint of the run; returns its step, 0 without one.

        Args:
            tidy: remove what a killed run left behind; not while another run may be writing.

        Raises:
            ConfigError: it belongs to another model.
        """
        folder = self._choose(tidy)
        if folder is None:
            self.start()
            return 0
        manifest = files.read_manifest(folder)
        self.started_from = manifest.get("init_from")
        self._check_same_run(folder, manifest)
        self._load(folder, manifest)
        step = int(manifest["step"])
        self.saved_step = step
        self.size = sum(manifest["files"].values())
        self.log.event(
            "start",
            f"resuming at step {step}, {manifest['tokens']:,} tokens, from {folder.name}"
            + job_note(),
            step=step,
        )
        return step

    def start(self) -> None:
        """Begin at step 0, with the weights of `checkpoint.init_from` if it is set.

        Raises:
            ConfigError: no checkpoint is there, or it belongs to another model.
        """
        message = "starting from scratch"
        if self.first_weights is not None:
            self.started_from = self.first_weights()
        elif self.config.checkpoint.init_from is not None:
            self.started_from = initial_weights.take_over(self.config, self.parts, METADATA)
        if self.started_from is not None:
            message = "starting from the weights of {from}, step {step}".format(**self.started_from)
        self.log.event("start", message + job_note(), step=0)

    def _choose(self, tidy: bool) -> Path | None:
        """The newest complete checkpoint as rank 0 sees it; tidies up after a kill."""
        chosen: list[Path | None] = [None]
        if dist.get_rank() == 0:
            for name in files.remove_leftovers(self.folder) if tidy else []:
                self.log.say(f"removed {name}, which an interrupted run left behind")
            good, bad = files.complete_checkpoints(self.folder)
            for complaint in bad:
                self.log.say(f"warning: skipping an incomplete checkpoint: {complaint}")
            chosen = [good[-1] if good else None]
        dist.broadcast_object_list(chosen, src=0)
        return chosen[0]

    def refuse_used_folder(self) -> None:
        """Before a run that does not resume: its checkpoints would mix with those of another run.

        Raises:
            ConfigError: the run folder has checkpoints.
        """
        if files.complete_checkpoints(self.folder)[0]:
            raise ConfigError(
                f"{self.folder}: has checkpoints, and checkpoint.resume is false; choose another "
                "run_dir or set checkpoint.resume true"
            )

    def _check_same_run(self, folder: Path, manifest: dict[str, Any]) -> None:
        if manifest.get("weights_only"):
            raise ConfigError(
                f"{folder}: holds weights only, so no run can go on from it; name it in "
                "checkpoint.init_from and choose another run_dir"
            )
        saved = load_saved(folder / "run_config.yaml")
        complaint = resume.refusal(saved, self.config)
        dtype = str(self.parts.dtype)
        if complaint is None and manifest["dtype"] != dtype:
            complaint = (
                f"holds a {manifest['dtype']} model, this run is {dtype}; set precision.dtype as "
                "it was, or another run_dir for a new run"
            )
        if complaint is not None:
            raise ConfigError(f"{folder}: {complaint}")
        for note in resume.notes(saved, self.config, manifest.get("data", []), self.data):
            self.log.say(note)

    def _load(self, folder: Path, manifest: dict[str, Any]) -> None:
        prepare_for_load(self.parts.optimizer)
        template = self._state(int(manifest["step"]), loading=True)
        same_layout = manifest["layout"] == self._layout()
        if not same_layout:
            template.pop("rng")
            self.log.say(
                f"the checkpoint was written as {manifest['layout']}, this run is "
                f"{self._layout()}: weights and optimizer are resharded, random states start anew"
            )
        state = dist_checkpointing.load(template, str(folder))
        with torch.no_grad():
            self.parts.model.load_state_dict(state["model"])
            self.parts.optimizer.load_state_dict(state["optimizer"])
        settings = self.config.optimizer
        finish_load(self.parts.optimizer, betas=settings.betas, eps=settings.eps)
        self.parts.scheduler.load_state_dict(state["scheduler"])
        self.loaded_progress = state.get("progress", {})
        if same_layout:
            _restore_rng(state["rng"])

    def _layout(self) -> dict[str, int]:
        parallel = self.config.parallel
        return {
            "ranks": dist.get_world_size(),
            "tensor": parallel.tensor,
            "pipeline": parallel.pipeline,
            "context": parallel.context,
        }

    def _facts(self, step: int) -> dict[str, Any]:
        sequences = step * self.config.training.global_batch_size
        return {
            "tokens": sequences * self.config.data.sequence_length,
            "sequences": sequences,
            "layout": self._layout(),
            "data": self.data,
            "dtype": str(self.parts.dtype),
            **({"init_from": self.started_from} if self.started_from else {}),
            "time": time.time(),
            "versions": {
                "megatron_lt2": megatron_lt2.__version__,
                "torch": torch.__version__,
                "python": host_platform.python_version(),
            },
        }

    def _state(self, step: int, *, loading: bool) -> dict[str, Any]:
        metadata = {
            **METADATA,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        }
        if not loading:
            self.parts.gather_parameters()
        model = self.parts.model.sharded_state_dict(metadata=metadata)
        with keeping_padding(self.parts.optimizer):
            optimizer = self.parts.optimizer.sharded_state_dict(
                model, is_loading=loading, metadata=metadata
            )
        rank, world = dist.get_rank(), dist.get_world_size()
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": self.parts.scheduler.state_dict(),
            "rng": ShardedObject("rng", _rng_state(), (world,), (rank,)),
            "step": step,
            "progress": dict(self.progress()),
        }


def _start_results_queue() -> None:
    """megatron-core 0.19.2 starts this process itself, but it would outlive a killed rank."""
    if filesystem_async._results_queue is None:
        manager = SyncManager(ctx=multiprocessing.get_context("spawn"))
        # It inherits the mask, so a signal that comes before it ignores them does not end it.
        masked = signal.pthread_sigmask(signal.SIG_BLOCK, HELPERS_IGNORE)
        try:
            manager.start(initializer=_start_as_helper, initargs=(os.getpid(),))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, masked)
        filesystem_async._results_queue = manager.Queue()


def _start_as_helper(parent: int) -> None:
    """Slurm signals every process of a step; only the rank itself decides when to stop."""
    for number in HELPERS_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)


def _ending_with_this_process(request: Any) -> Any:
    """The same request, whose writing process is killed when this rank is."""
    if request.async_fn is None:
        return request
    write = functools.partial(_write_as_child, os.getpid(), request.async_fn)
    return request._replace(async_fn=write)


def _write_as_child(parent: int, write: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    die_with_parent(parent)
    write(*args, **kwargs)


def _rng_state() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),
        "torch": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _restore_rng(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    torch.cuda.set_rng_state(state["device"])
    get_cuda_rng_tracker().set_states(state["tracker"])
