"""The training loop: steps, evaluation, reports, checkpoints, and leaving early in good order."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from megatron_lt2.config.checks import data_parallel_size
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.datasets import build_datasets, data_checksums, micro_batches
from megatron_lt2.data.statistics import unigram_entropy
from megatron_lt2.data.tokenizer import Tokenizer
from megatron_lt2.model.counting import training_flops_per_token
from megatron_lt2.parallel import platform
from megatron_lt2.selftest import check_kernels
from megatron_lt2.training.checkpoint import Checkpointer
from megatron_lt2.training.environment import apex_note
from megatron_lt2.training.metrics import RunLog
from megatron_lt2.training.peaks import peak_tflops
from megatron_lt2.training.setup import build_parts
from megatron_lt2.training.signals import EXIT_DONE, EXIT_SAVED, ExitRequest
from megatron_lt2.training.steps import DataFeed, evaluate, mean_over_ranks, train_step


class Trainer:
    """One run on one rank; `run` returns the exit code.

    Args:
        config: resolved and checked.
        tokenizer: whose EOS ends the documents.
        log: reports, active on rank 0.
    """

    def __init__(
        self, config: RunConfig, tokenizer: Tokenizer, log: RunLog, exit_request: ExitRequest
    ) -> None:
        from megatron.core import parallel_state

        self.config, self.tokenizer, self.log = config, tokenizer, log
        self.exit_request = exit_request
        self.rank = parallel_state.get_data_parallel_rank()
        self.replicas = data_parallel_size(config, dist.get_world_size())
        training = config.training
        self.micro_batches = training.global_batch_size // (
            training.micro_batch_size * self.replicas
        )
        self.train_data, self.valid_data = build_datasets(config, tokenizer)
        self.parts = build_parts(config)
        if config.precision.selftest and self.parts.kernels == "fla":
            check_kernels(config, self.parts.dtype, platform.device())
        self.checkpoints = Checkpointer(config, self.parts, log, tuple(data_checksums(config)))
        self.unigram = self._unigram()
        self.first_step = 0

    def restore(self) -> None:
        """Take over the run's newest checkpoint, if there is one and the config asks for it.

        Raises:
            ConfigError: it belongs to another model.
        """
        self.first_step = 0
        if self.config.checkpoint.resume:
            self.first_step = self.checkpoints.load_newest()
        else:
            self.checkpoints.refuse_used_folder()

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
        stopping = step < last and self.exit_request.agreed()
        while step < last and not stopping:
            result = train_step(config, self.parts, feed, self.micro_batches)
            step += 1
            self.log.advance()
            meter.add(result, feed)
            if step % config.logging.interval == 0 or step == last:
                meter.report(step)
            self.checkpoints.finish_pending(blocking=False)
            if training.eval_interval and step % training.eval_interval == 0 and step < last:
                self._evaluate(step)
                meter.restart()
            stopping = self.exit_request.agreed()
            interval = config.checkpoint.interval
            if interval and step % interval == 0 and step < last and not stopping:
                self.checkpoints.save(step, background=config.checkpoint.async_save)
        return step, stopping

    def _finish(self, step: int, stopping: bool) -> int:
        done = step >= self.config.training.steps
        if done:
            self._evaluate(step)
        elif stopping:
            self.log.say(f"stopping after step {step}: {self.exit_request.reason}")
        self.checkpoints.save(step, background=False)
        self.checkpoints.close()
        code = EXIT_DONE if done else EXIT_SAVED
        text = "training is complete" if done else "saved; start the same command again to continue"
        self.log.event("end", text, step=step, exit_code=code)
        return code

    def _evaluate(self, step: int) -> None:
        """The same validation sequences every time."""
        training = self.config.training
        if not training.eval_batches or self.valid_data is None:
            return
        feed = self._feed(self.valid_data, range(training.eval_batches), 0)
        count = self.micro_batches * training.eval_batches
        loss = evaluate(self.config, self.parts, feed, count)
        self.log.evaluation(step, loss, self.unigram)

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
        return DataFeed(source, self.config, self.tokenizer.eos_id)

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
        self.loss_sum: Any = 0.0
        self.tokens: Any = 0.0

    def add(self, result: Any, feed: DataFeed) -> None:
        """Count one step."""
        self.steps += 1
        self.waited += feed.waited_s
        feed.waited_s = 0.0
        self.grad_norm = result.grad_norm
        self.loss_sum = self.loss_sum + result.loss_sum
        self.tokens = self.tokens + result.tokens

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
