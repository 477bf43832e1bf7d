"""Where the first value that is no number comes up: a step is run once more, with hooks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_lt2.training.guard import not_finite


@dataclass(frozen=True, order=True)
class Finding:
    """A value that is no number. The earliest sorts first: weights, forward pass, backward pass."""

    stage: int
    order: int
    rank: int
    where: str


class RecordingFeed:
    """A feed that keeps the micro-batches of the current step, to run them again."""

    def __init__(self, feed: Any) -> None:
        self.feed, self.kept = feed, []  # type: ignore[var-annotated]

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        batch = next(self.feed)
        self.kept.append(batch)
        return batch


def find_fault(model: Any, loops: int, run_again: Callable[[], Any]) -> str:
    """The rank and the layer where the first NaN or infinity appears, in words; a collective call.

    Args:
        model: LT2Model, on a pipeline the layers of this stage.
        loops: passes through the layers a micro-batch.
        run_again: the forward and backward pass of the step, on the same micro-batches.
    """
    mine = _bad_weights(model)
    with _watching(model, loops, mine):
        run_again()
    first = min(mine) if mine else None
    everyone: list[Finding | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, first)
    found = sorted(finding for finding in everyone if finding is not None)
    if not found:
        return (
            "the same micro-batches gave finite numbers when they were run again: suspect the "
            "hardware"
        )
    return f"first on rank {found[0].rank}: {found[0].where}"


def _bad_weights(model: Any) -> list[Finding]:
    rank = dist.get_rank()
    for name, parameter in model.named_parameters():
        if bool(not_finite(parameter.detach())):
            return [Finding(0, 0, rank, f"the weight {name}")]
    return []


@contextmanager
def _watching(model: Any, loops: int, found: list[Finding]) -> Iterator[None]:
    """Hooks on the modules of `model` that add to `found` what they see first."""
    rank, seen, handles = dist.get_rank(), [0], []
    staged = getattr(model, "pre_process", True) is False or not getattr(
        model, "post_process", True
    )

    def note(stage: int, where: str) -> None:
        if not any(finding.stage == stage for finding in found):
            found.append(Finding(stage, seen[0], rank, where))

    def hook(name: str, per_pass: int) -> Callable[..., None]:
        calls = [0]

        def after(module: Any, inputs: Any, output: Any) -> None:
            seen[0] += 1
            pass_ = ""
            if per_pass > 1:
                # On a pipeline, micro-batches take turns: which call is which loop is not known.
                pass_ = (
                    f", pass {calls[0] + 1}"
                    if staged
                    else f", loop {calls[0] % per_pass + 1} of micro-batch "
                    f"{calls[0] // per_pass + 1}"
                )
            calls[0] += 1
            value = output[0] if isinstance(output, tuple) else output
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                return
            if bool(not_finite(value.detach())):
                note(1, f"the output of {name}{pass_}")
            if value.requires_grad:
                value.register_hook(lambda grad, at=pass_: gradient(name, at, grad))

        return after

    def gradient(name: str, at: str, grad: torch.Tensor) -> None:
        seen[0] += 1
        if bool(not_finite(grad)):
            note(2, f"the gradient of the output of {name}{at}")

    layers = model.decoder.layers
    for layer in layers:
        number = layer.layer_number
        mixer = type(layer.self_attention).__name__
        handles.append(
            layer.self_attention.register_forward_hook(
                hook(f"the mixer {mixer} of layer {number}", loops)
            )
        )
        handles.append(layer.register_forward_hook(hook(f"layer {number}", loops)))
    for name in ("embedding", "output_layer"):
        module = getattr(model, name, None)
        if isinstance(module, torch.nn.Module):
            handles.append(module.register_forward_hook(hook(f"the {name.replace('_', ' ')}", 1)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
