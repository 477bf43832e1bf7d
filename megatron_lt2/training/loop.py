"""The training loop: steps, evaluation, reports, checkpoints, and leaving early in good order."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lt2.atomic import write_text_atomic
from megatron_lt2.config.checks import data_parallel_size
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.datasets import build_datasets, data_checksums, micro_batches
from megatron_lt2.data.statistics import unigram_entropy
from megatron_lt2.data.tokenizer import Tokenizer
from megatron_lt2.model.counting import training_flops_per_token
from megatron_lt2.parallel import platform
from megatron_lt2.parallel.start import first_rank_says
from megatron_lt2.selftest import check_kernels
from megatron_lt2.training.checkpoint import Checkpointer
from megatron_lt2.training.data_watch import DataWatch
from megatron_lt2.training.environment import apex_note
from megatron_lt2.training.fault_finder import RecordingFeed, find_fault
from megatron_lt2.training.garbage import Collections
from megatron_lt2.training.guard import DivergedError, StepGuard
from megatron_lt2.training.heartbeat import Heartbeat
from megatron_lt2.training.indexers import indexer_means
from megatron_lt2.training.metrics import RunLog
from megatron_lt2.training.peaks import peak_tflops
from megatron_lt2.training.setup import TrainingParts, build_parts
from megatron_lt2.training.signals import EXIT_DONE, EXIT_NOT_SAVED, EXIT_SAVED, ExitRequest
from megatron_lt2.training.steps import (
    DataFeed,
    evaluate_batch,
    exit_means,
    mean_over_ranks,
    run_backward,
    train_step,
)

FINISHED = "finished"
"""File of the run folder with the steps of a run that is complete: chains of jobs end there."""
SAVE_TRIES = 3
SAVE_PAUSE_S = 20.0


class Trainer:
    """One run on one rank; `run` returns the exit code.

    Args:
        config: resolved and checked.
        tokenizer: whose EOS ends the documents.
        log: reports, active on rank 0.
        exit_request: asks for an early end.
        heartbeat: is told what the run is about to do.
    """

    def __init__(
        self,
        config: RunConfig,
        tokenizer: Tokenizer,
        log: RunLog,
        exit_request: ExitRequest,
        heartbeat: Heartbeat,
    ) -> None:
        from megatron.core import parallel_state

        self.config, self.tokenizer, self.log = config, tokenizer, log
        self.exit_request, self.heartbeat = exit_request, heartbeat
        self.rank = parallel_state.get_data_parallel_rank()
        self.replicas = data_parallel_size(config, dist.get_world_size())
        training = config.training
        self.micro_batches = training.global_batch_size // (
            training.micro_batch_size * self.replicas
        )
        self.eod = tokenizer.eos_id
        self.train_data, self.valid_data = self.datasets()
        self.parts = self.build()
        if config.precision.selftest and self.parts.kernels == "fla":
            check_kernels(config, self.parts.dtype, platform.device())
        self.guard = StepGuard(training, self.parts)
        self.evaluated, self.fault = 0, ""
        self.checkpoints = Checkpointer(
            config, self.parts, log, tuple(data_checksums(config)), self._progress
        )
        self.data_watch = DataWatch(config.data.prefixes, config.run_dir)
        self.unigram = self._unigram()
        self.first_step = 0

    def datasets(self) -> tuple[Any, Any]:
        """Training and validation samples."""
        return build_datasets(self.config, self.tokenizer)

    def build(self) -> TrainingParts:
        """What is trained."""
        return build_parts(self.config)

    def restore(self) -> None:
        """Take over the run's newest checkpoint, if there is one and the config asks for it.

        Raises:
            ConfigError: it belongs to another model.
        """
        self.first_step = 0
        self._refuse(self.data_watch.changed_since_last_start)
        if self.config.checkpoint.resume:
            self.first_step = self.checkpoints.load_newest()
            self.evaluated = self.first_step
            if self.checkpoints.loaded_progress:
                self.guard.restore(self.checkpoints.loaded_progress["guard"])
                self.evaluated = int(self.checkpoints.loaded_progress["evaluated"])
        else:
            self.checkpoints.refuse_used_folder()
            self.checkpoints.start()

    def evaluate_newest(self) -> None:
        """The validation loss of the newest checkpoint.

        Raises:
            ConfigError: there is none, or no validation data.
        """
        if self.valid_data is None or not self.config.training.eval_batches:
            raise ConfigError("training.eval_batches is 0; give the number of global batches")
        step = self.checkpoints.load_newest(tidy=False)
        if not step:
            raise ConfigError(f"{self.checkpoints.folder}: no complete checkpoint to evaluate")
        self._evaluate(step)

    def _progress(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loop itself."""
        return {"guard": self.guard.state(), "evaluated": self.evaluated}

    def _refuse(self, complaint: Any) -> None:
        """Raise on every rank what rank 0 has to say against going on."""
        said = first_rank_says((complaint() or "") if self.log.active else "")
        if said:
            self.checkpoints.finish_pending(blocking=True)
            raise ConfigError(said)

    def run(self) -> int:
        """Train to the last step, or until asked to stop."""
        config, training, step = self.config, self.config.training, self.first_step
        self._describe(step)
        feed = self._feed(self.train_data, range(step, training.steps), config.data.num_workers)
        try:
            step, stopping = self._steps(step, feed)
        finally:
            feed.close()
        return self._finish(step, stopping)

    def _steps(self, step: int, feed: DataFeed) -> tuple[int, bool]:
        """Steps up to the last one or a request to stop; the step reached, and whether asked to."""
        config, training = self.config, self.config.training
        meter = _Meter(self)
        self.log.start_bar(step)
        self.parts.ddp.train()
        last = min(training.steps, training.stop_step or training.steps)
        recorder = RecordingFeed(feed)
        stopping = step < last and self.exit_request.agreed()
        if step < last and not stopping and self._evaluation_is_due(step):
            stopping = not self._evaluate(step)  # an early end left it out
        with Collections() as collections:
            while step < last and not stopping:
                self.heartbeat.beat("train", step)
                recorder.kept.clear()
                result = train_step(
                    config, self.parts, recorder, self.micro_batches, self.guard.accepts
                )
                step += 1
                collections.after_step()
                self.log.advance()
                meter.add(result, feed, counts=not self.guard.why)
                if self.guard.why:
                    self._skipped(step, recorder)
                if step % config.logging.interval == 0 or step == last:
                    meter.report(step)
                self.checkpoints.finish_pending(blocking=False)
                stopping = self.exit_request.agreed()
                if step < last and not stopping and self._evaluation_is_due(step):
                    stopping = not self._evaluate(step)
                    meter.restart()
                interval = config.checkpoint.interval
                due = interval and step % interval == 0 and step < last and not stopping
                if due and not self._nothing_to_save(step):
                    self._refuse(self.data_watch.changed)
                    self.checkpoints.save(step, background=config.checkpoint.async_save)
        return step, stopping

    def _skipped(self, step: int, recorder: RecordingFeed) -> None:
        """Report a step that did not reach the weights; end the run after too many."""
        guard, most = self.guard, self.config.training.max_bad_steps
        fault = ""
        if guard.in_a_row == 1 and "median" not in guard.why:
            again = iter(list(recorder.kept))
            fault = find_fault(
                self.parts.model,
                self.config.model.loops,
                lambda: run_backward(self.config, self.parts, again, self.micro_batches),
            )
        text = f"warning: step {step} was skipped: {guard.why} ({guard.in_a_row} of {most} in a row"
        text += f", {guard.total} in all)" + (f"; {fault}" if fault else "")
        self.log.event("skipped", text, step=step, in_a_row=guard.in_a_row, fault=fault)
        self.fault = fault if guard.in_a_row == 1 else self.fault
        if guard.in_a_row >= most:
            self.checkpoints.finish_pending(blocking=True)
            raise DivergedError(
                f"training.max_bad_steps {most}: that many steps in a row were skipped, up to step "
                f"{step}: {guard.why}"
                + (f"; {self.fault}" if self.fault else "")
                + "; lower optimizer.lr or go back to an earlier checkpoint"
            )

    def _finish(self, step: int, stopping: bool) -> int:
        done = step >= self.config.training.steps
        if done:
            done = self._evaluate(step)
        elif stopping:
            self.log.say(f"stopping after step {step}: {self.exit_request.reason}")
        self.heartbeat.beat("stop", step)
        self._refuse(self.data_watch.changed)
        if not self._save_last(step):
            text = (
                "error: the last checkpoint could not be written; free some space and start again"
            )
            self.log.event("end", text, step=step, exit_code=EXIT_NOT_SAVED)
            return EXIT_NOT_SAVED
        self.checkpoints.close()
        if done and self.log.active:
            write_text_atomic(Path(self.config.run_dir) / FINISHED, f"{step}\n")
        code = EXIT_DONE if done else EXIT_SAVED
        text = "training is complete" if done else "saved; start the same command again to continue"
        self.log.event("end", text, step=step, exit_code=code)
        self.heartbeat.beat("finished" if code == EXIT_DONE else "saved", step)
        return code

    def _nothing_to_save(self, step: int) -> bool:
        """Before the first step that reached the weights the optimizer has no state to write."""
        return self.guard.total >= step

    def _save_last(self, step: int) -> bool:
        """Save in the foreground, again after a while if the disk was full."""
        if self._nothing_to_save(step):
            self.log.say("no step is done yet, so there is nothing to save")
            return True
        for attempt in range(SAVE_TRIES):
            if attempt:
                self.log.say(f"trying again in {SAVE_PAUSE_S:.0f} s to write the last checkpoint")
                time.sleep(SAVE_PAUSE_S)
            if self.checkpoints.save(step, background=False):
                return True
        return False

    def _evaluation_is_due(self, step: int) -> bool:
        interval = self.config.training.eval_interval
        return bool(interval) and step > 0 and step % interval == 0 and self.evaluated != step

    def _evaluate(self, step: int) -> bool:
        """The same validation sequences every time; whether it came to its end.

        A request to stop ends it between two batches; the next start begins it again.
        """
        training = self.config.training
        if not training.eval_batches or self.valid_data is None:
            return True
        feed = self._feed(self.valid_data, range(training.eval_batches), 0)
        sums: Any = 0.0
        self.parts.ddp.eval()
        for batch in range(training.eval_batches):
            self.heartbeat.beat("evaluate", step)
            if batch and self.exit_request.agreed():
                self.parts.ddp.train()
                self.log.say(f"the evaluation at step {step} is left for the next start")
                return False
            sums = sums + evaluate_batch(self.config, self.parts, feed, self.micro_batches)
        self.parts.ddp.train()
        self.evaluated = step
        self.log.evaluation(
            step,
            mean_over_ranks(sums[0], sums[-1]),
            self.unigram,
            exit_means(sums[1:-1], sums[-1], self.parts.model.part_names),
        )
        return True

    def _feed(self, dataset: Any, steps: range, num_workers: int) -> DataFeed:
        training = self.config.training
        source = micro_batches(
            dataset,
            steps,
            global_batch=training.global_batch_size,
            micro_batch=training.micro_batch_size,
            rank=self.rank,
            replicas=self.replicas,
            num_workers=num_workers,
        )
        return DataFeed(source, self.config, self.eod)

    def _unigram(self) -> float | None:
        """Entropy of the validation labels one by one: what a model without context can reach."""
        training = self.config.training
        if self.valid_data is None or not training.eval_batches or not self.log.active:
            return None
        count = training.eval_batches * training.global_batch_size
        labels = [np.asarray(self.valid_data[i]["labels"]) for i in range(count)]
        return unigram_entropy(np.concatenate(labels))

    def _describe(self, step: int) -> None:
        from megatron_lt2.model.counting import count_parameters

        config, model = self.config, self.config.model
        flops = training_flops_per_token(model, config.data.sequence_length)
        note = apex_note()
        if note is not None:
            self.log.say(note)
        if model.exit_gate and model.loss != "exits":
            self.log.say(
                f"note: model.loss {model.loss!r} does not train the exit gate: it stays as it is"
            )
        self.log.say(
            f"{count_parameters(model):,} parameters, {model.num_layers} layers x {model.loops} "
            f"loops, {flops / 1e9:.3g} GFLOP a token, {self.parts.dtype}, "
            f"{self.parts.kernels} kernels, {dist.get_world_size()} ranks "
            f"({self.replicas} data-parallel), "
            f"{self.micro_batches} micro-batches of {config.training.micro_batch_size} a step"
        )
        self.log.record(
            "start",
            step,
            parameters=count_parameters(model),
            gflop_per_token=flops / 1e9,
            ranks=dist.get_world_size(),
            valid_unigram_nats=self.unigram,
            run_dir=str(Path(config.run_dir)),
        )


class _Meter:
    """Averages between two reports."""

    def __init__(self, trainer: Trainer) -> None:
        config = trainer.config
        self.trainer = trainer
        self.tokens_per_step = config.training.global_batch_size * config.data.sequence_length
        self.flops = training_flops_per_token(config.model, config.data.sequence_length)
        known, _ = peak_tflops(trainer.parts.dtype)
        self.peak = config.logging.peak_tflops or known
        self.restart()

    def restart(self) -> None:
        """Forget the interval so far, as after an evaluation."""
        self.started = time.perf_counter()
        self.steps = 0
        self.waited = 0.0
        self.loss_sum: Any = torch.zeros((), dtype=torch.double, device=platform.device())
        self.tokens: Any = self.loss_sum
        self.grad_norm = 0.0
        self.exit_sums: Any = 0.0

    def add(self, result: Any, feed: DataFeed, *, counts: bool = True) -> None:
        """Count one step; one that was skipped has no loss."""
        self.steps += 1
        self.waited += feed.waited_s
        feed.waited_s = 0.0
        if not counts:
            return
        self.grad_norm = result.grad_norm
        self.loss_sum = self.loss_sum + result.loss_sum
        self.tokens = self.tokens + result.tokens
        self.exit_sums = self.exit_sums + result.exit_sums

    def report(self, step: int) -> None:
        """Report the interval that ends with `step`; a collective call."""
        trainer = self.trainer
        loss = mean_over_ranks(self.loss_sum, self.tokens)
        torch.cuda.synchronize()
        step_s = (time.perf_counter() - self.started) / self.steps
        speed = self.tokens_per_step / step_s
        tflops = speed * self.flops / dist.get_world_size() / 1e12
        trainer.log.train(
            step,
            {
                "loss": loss,
                **exit_means(self.exit_sums, self.tokens, trainer.parts.model.part_names),
                **indexer_means(trainer.config, trainer.parts.model),
                "grad_norm": self.grad_norm,
                "lr": trainer.parts.lr,
                "tokens": step * self.tokens_per_step,
                "tokens_per_s": speed,
                "tflops": tflops,
                "mfu": tflops / self.peak if self.peak else None,
                "memory_gb": _peak_memory_gb(),
                "data_wait_s": self.waited / self.steps,
                "step_s": step_s,
                "eta_s": (trainer.log.total_steps - step) * step_s,
            },
        )
        self.restart()


def _peak_memory_gb() -> float:
    """Peak memory of this rank: on the device, or resident on the CPU."""
    if platform.has_gpu():
        return torch.cuda.max_memory_allocated() / 1e9
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
