"""A student whose loss comes from a teacher: LT2Model with another `forward` in training.

Every loss is one of a token, so that masks, packed documents, micro-batches and data and context
parallelism are those of any run.

    mixer    mean over passes of |student mixer(x) - teacher mixer(x)|, x the teacher's, so that
             layers learn apart from each other
    hidden   mean over passes of |student's stream - teacher's stream| behind the layer
    logits   a CE + b tau^2 sum_t w_t KL(teacher's loop t || student's loop t)

The teacher is no submodule: DDP, checkpoints and train() do not see it.
"""

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from torch import Tensor

from megatron_lt2.distill.settings import LossSettings
from megatron_lt2.distill.student import MASKED
from megatron_lt2.distill.taps import Inputs, looking_at, loop_states, run_again, stream
from megatron_lt2.model.lt2_model import LT2Model
from megatron_lt2.parallel.distillation_loss import (
    Heads,
    TopLogits,
    distillation_losses,
    top_distillation_losses,
    top_logits,
)

TINY = 1e-12
"""Added under the root of a mean square, which has no gradient at 0."""


@dataclass(frozen=True)
class Objective:
    """What a stage trains for.

    teacher: LT2Model in evaluation mode, of the same layout; None: its logits come from a cache,
        by `DistilledModel.know`.
    kind: mixer, hidden or logits.
    loss: its settings.
    mixers: of the student's layers.
    steps: of the stage, for weights that change on the way.
    """

    teacher: Any
    kind: str
    loss: LossSettings
    mixers: list[str]
    steps: int


class DistilledModel(LT2Model):
    """An LT2Model with an `Objective`, given by `pursue`; without labels it is as any other."""

    _objective: Objective | None = None
    _step = 0
    _known: TopLogits | None = None

    def pursue(self, objective: Objective) -> None:
        """Have this objective from now on."""
        object.__setattr__(self, "_objective", objective)  # not a submodule's owner

    @property
    def objective(self) -> Objective:
        """What is trained for."""
        assert self._objective is not None, "pursue an objective first"
        return self._objective

    def know(self, top: TopLogits) -> None:
        """The teacher's likeliest tokens of the micro-batch that comes next."""
        object.__setattr__(self, "_known", top)

    def begin_step(self, step: int) -> None:
        """See LT2Model."""
        self._step = step

    @property
    def part_names(self) -> list[str]:
        """See LT2Model."""
        loops = [f"loop_{t + 1}" for t in range(self.decoder.loops)]
        if self.objective.kind == "logits":
            both = self.decoder.loops > 1 and self._both_have_loops()
            return ["ce", "kl", *([f"kl_{loop}" for loop in loops] if both else [])]
        layers = [f"align_layer_{i}" for i in range(len(self.decoder.layers))]
        return [*layers, *([f"align_{loop}" for loop in loops] if len(loops) > 1 else [])]

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As LT2Model; with `labels` and `parts` the objective's loss of every token and, without
        gradient, what it is made of: [1 + len(part_names), b, s]."""
        if not kwargs.get("parts") or kwargs.get("labels") is None or self._objective is None:
            return super().forward(*args, **kwargs)
        names = ("input_ids", "position_ids")
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        batch = given["input_ids"], given["position_ids"], given.get("packed_seq_params")
        if self.objective.kind == "logits":
            return self._end_to_end(batch, given["labels"])
        if self.objective.kind == "hidden" and self.objective.loss.feed == "student":
            return self._along(batch)
        return self._apart(batch)

    # Layers.

    def _apart(self, batch: tuple[Tensor, Tensor, Any]) -> Tensor:
        """Every mixer or layer on what the teacher's takes."""
        objective, layers = self.objective, self.decoder.layers
        part = "mixer" if objective.kind == "mixer" else "layer"
        modules = [layer.self_attention if part == "mixer" else layer for layer in layers]
        learns = torch.is_grad_enabled()
        found: dict[int, Tensor] = {}

        def compare(index: int, inputs: Inputs, target: Tensor) -> None:
            layer = index % len(layers)
            if part == "mixer" and objective.mixers[layer] in MASKED:
                return
            with torch.set_grad_enabled(learns):
                out = run_again(modules, layer, inputs, index // len(layers))
                found[index] = self._distance(out, target)

        with torch.no_grad(), looking_at(objective.teacher, part, compare):
            stream(objective.teacher, *batch)
        return self._over_passes(found)

    def _along(self, batch: tuple[Tensor, Tensor, Any]) -> Tensor:
        """Every layer's output in the student's own stream."""
        targets: dict[int, Tensor] = {}
        found: dict[int, Tensor] = {}
        layers = len(self.decoder.layers)

        def keep(index: int, inputs: Inputs, out: Tensor) -> None:
            targets[index] = out

        with torch.no_grad(), looking_at(self.objective.teacher, "layer", keep):
            stream(self.objective.teacher, *batch)

        def compare(loop: int, index: int, out: Tensor) -> None:
            at = loop * layers + index
            found[at] = self._distance(out, targets.pop(at))

        self.decoder.each_layer = compare
        try:
            stream(self, *batch)
        finally:
            self.decoder.each_layer = None
        return self._over_passes(found)

    def _distance(self, out: Tensor, target: Tensor) -> Tensor:
        """[s, b, d] of this rank's tokens to [s, b]."""
        wide = torch.promote_types(out.dtype, torch.float32)
        square = (out.to(wide) - target.to(wide)).square().mean(-1)
        measure = self.objective.loss.measure
        if measure == "l2":
            return (square + TINY).sqrt()
        if measure == "relative":
            return square / (target.to(wide).square().mean(-1) + TINY)
        return square

    def _over_passes(self, found: dict[int, Tensor]) -> Tensor:
        """Mean over passes; then means by layer and, with loops, by loop."""
        loops, layers = self.decoder.loops, len(self.decoder.layers)
        if not found:
            raise ValueError("no layer of the student has a mixer of its own to align")
        grid = torch.stack([found[p] for p in sorted(found)])
        rows = [grid.mean(0)]
        zero = torch.zeros_like(rows[0])
        for layer in range(layers):
            own = [found[p].detach() for p in found if p % layers == layer]
            rows.append(torch.stack(own).mean(0) if own else zero)
        for loop in range(loops if loops > 1 else 0):
            own = [found[p].detach() for p in found if p // layers == loop]
            rows.append(torch.stack(own).mean(0))
        every = torch.stack(rows)
        if self.config.sequence_parallel:
            # Every rank makes the same loss of all tokens: its own part of the gradient is whole.
            every = tensor_parallel.gather_from_sequence_parallel_region(
                every.transpose(0, 1).contiguous(),
                tensor_parallel_output_grad=False,
                group=self.pg_collection.tp,
            ).transpose(0, 1)
        return every.transpose(1, 2)

    # The head.

    def _both_have_loops(self) -> bool:
        teacher = self.objective.teacher
        return teacher is not None and bool(teacher.decoder.loops == self.decoder.loops)

    def loop_weights(self) -> dict[int, float]:
        """Weight of each loop's divergence in the current step; they add up to one."""
        loops, loss = self.decoder.loops, self.objective.loss
        over = self._step >= loss.final_from * self.objective.steps
        if loss.loops == "final" or over or not self._both_have_loops():
            return {loops - 1: 1.0}
        raw = [1.0 if loss.loops == "uniform" else t + 1.0 for t in range(loops)]
        return {t: w / sum(raw) for t, w in enumerate(raw)}

    def _end_to_end(self, batch: tuple[Tensor, Tensor, Any], labels: Tensor) -> Tensor:
        objective, loss = self.objective, self.objective.loss
        teacher = objective.teacher
        weights = self.loop_weights()
        last = self.decoder.loops - 1
        ahead: dict[int, Tensor] = {}
        if teacher is not None:
            teacher_last = teacher.decoder.loops - 1
            with torch.no_grad():
                ahead = loop_states(
                    teacher, *batch, {teacher_last if t == last else t for t in weights}
                )
            ahead[last] = ahead[teacher_last]
        own = loop_states(self, *batch, set(weights))
        ce, parts = None, {}
        for loop, weight in sorted(weights.items()):
            ce, kl = self._head_losses(own[loop], ahead.get(loop), labels)
            parts[loop] = (weight, kl)
        assert ce is not None, "the last loop is always among them"
        divergence = torch.stack([weight * kl for weight, kl in parts.values()]).sum(0)
        total = loss.ce * ce + loss.kl * loss.temperature**2 * divergence
        rows = [total, ce.detach(), divergence.detach()]
        if len(self.part_names) > 2:
            zero = torch.zeros_like(ce)
            rows += [parts[t][1].detach() if t in parts else zero for t in range(last + 1)]
        return torch.stack(rows)

    def _head_losses(
        self, own: Tensor, other: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Cross entropy and divergence [b, s] of normed states; without the teacher's, from what
        is known."""
        teacher, loss = self.objective.teacher, self.objective.loss
        heads = Heads(
            self.pg_collection.tp,
            self.config.sequence_parallel,
            self.real_vocab_size,
            loss.temperature,
        )

        def losses(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            if other is None:
                top = self._known
                assert top is not None, "the feed gives the logits of the batch"
                return top_distillation_losses(hidden, weight, labels, top, heads, loss.over)
            tied = teacher._tied_weight()
            teacher_weight = teacher.output_layer.weight if tied is None else tied
            if loss.top_k is None:
                return distillation_losses(hidden, weight, labels, other, teacher_weight, heads)
            top = top_logits(other, teacher_weight, loss.top_k, heads)
            return top_distillation_losses(hidden, weight, labels, top, heads, loss.over)

        found: tuple[Tensor, Tensor] = self.output_layer(
            own, weight=self._tied_weight(), losses=losses
        )
        return found
