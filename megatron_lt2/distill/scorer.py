"""Scores of a selection by forward passes: no step is made."""

from typing import Any

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.distill.selection import ALONE, EXIT_SAVED, write_score
from megatron_lt2.distill.trainer import StageTrainer
from megatron_lt2.training.steps import evaluate_batch, mean_over_ranks

KL = 2
"""Row of the divergence in what `DistilledModel` returns."""


class Scorer(StageTrainer):
    """Evaluates the student with one layer restored at a time.

    Args:
        layers: to be scored, in this order; ALONE: none restored.
        Others as StageTrainer.
    """

    def __init__(self, layers: list[int], *given: Any) -> None:
        self.layers = layers
        super().__init__(*given)
        if self.valid_data is None:
            raise ConfigError(
                f"data.split {self.config.data.split!r} has no validation part to score layers on; "
                "give it one"
            )

    def _prepare(self, model: Any) -> None:
        super()._prepare(model)
        for name, parameter in model.named_parameters():  # no gradient buffers but for one norm
            parameter.requires_grad_("final_layernorm" in name)

    def run(self) -> int:
        """Score every layer, or as many as there is time for."""
        for layer in self.layers:
            if self.exit_request.agreed():
                self.log.say(f"stopping before layer {layer}: {self.exit_request.reason}")
                return EXIT_SAVED
            score = self._score(layer)
            if self.log.active:
                write_score(self.stage, layer, score)
        return 0

    def _score(self, layer: int) -> float:
        student = self.parts.model.decoder.layers
        own = None
        if layer != ALONE:
            own = student[layer].self_attention
            student[layer].self_attention = self.teacher.decoder.layers[layer].self_attention
        try:
            return self._divergence()
        finally:
            if own is not None:
                student[layer].self_attention = own

    def _divergence(self) -> float:
        """KL on the validation text, nat a token."""
        count = self.config.training.eval_batches
        feed = self._feed(self.valid_data, range(count), 0)
        self.parts.ddp.eval()
        sums: Any = 0.0
        for _ in range(count):
            self.heartbeat.beat("evaluate", 0)
            sums = sums + evaluate_batch(self.config, self.parts, feed, self.micro_batches)
        self.parts.ddp.train()
        return mean_over_ranks(sums[KL], sums[-1])
