"""The last of a student's first weights, from one step's text and the teacher's activations.

Output gates. A gate is act(W x) without a bias, so it cannot be constant. But the normed inputs x
of a layer have a mean m that is large beside their spread, and W = c m^T / |m|^2 makes W x close to
c. So every row of W starts there, with c such that act(c) is near one, plus a tenth of the usual
random values.

Scale. The output map of a mixer is multiplied by the number a that minimises
|a student(x) - teacher(x)|^2 over the batch, so that no mixer starts farther from the teacher's
than an output of zero would be.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.distill.student import MASKED, OUTPUT_GATES
from megatron_lt2.distill.taps import Inputs, looking_at, run_again, stream
from megatron_lt2.parallel.sums import sum_over_tokens

TARGETS = {"silu": 1.28, "sigmoid": 2.0}
"""c of an activation: act(c) is 1.0 and 0.88."""

SMALLEST = 0.02
"""The scale is at least this, or a mixer would hardly learn."""


@torch.no_grad()
def calibrate(
    student: Any, teacher: Any, mixers: list[str], batches: Callable[[], Iterable[Any]]
) -> None:
    """Set gates and scales of the student's (LT2Model of this rank) mixers; a collective call.

    Args:
        mixers: of its layers.
        batches: gives this rank's micro-batches of a step (data/batch.py's Batch), every time anew.
    """
    layers = list(student.decoder.layers)
    own = [i for i, name in enumerate(mixers) if name not in MASKED]
    cut = student.config.sequence_parallel
    means: dict[int, Tensor] = {}

    def add_inputs(index: int, inputs: Inputs, out: Tensor) -> None:
        layer = index % len(layers)
        x = inputs[0].flatten(0, 1).double()
        found = torch.cat([x.sum(0), x.new_tensor([len(x)])])
        means[layer] = means[layer] + found if layer in means else found

    with looking_at(teacher, "mixer", add_inputs):
        for batch in batches():
            stream(teacher, batch.tokens, batch.positions, batch.packing)
    for layer in own:
        sums = sum_over_tokens(means[layer], cut)
        _open_gates(layers[layer].self_attention, sums[:-1] / sums[-1])

    products: dict[int, Tensor] = {}

    def add_products(index: int, inputs: Inputs, target: Tensor) -> None:
        layer = index % len(layers)
        if layer not in own:
            return
        mixer = [layer_.self_attention for layer_ in layers]
        y = run_again(mixer, layer, inputs, index // len(layers)).double()
        found = torch.stack([(y * target).sum(), (y * y).sum()])
        products[layer] = products[layer] + found if layer in products else found

    was = student.training
    student.eval()
    with looking_at(teacher, "mixer", add_products):
        for batch in batches():
            stream(teacher, batch.tokens, batch.positions, batch.packing)
    student.train(was)
    for layer in own:
        shared, power = sum_over_tokens(products[layer], cut).tolist()
        scale = shared / power if power else 1.0
        scale = max(abs(scale), SMALLEST) * (1 if scale >= 0 else -1)
        layers[layer].self_attention.out_proj.weight.mul_(scale)


def _open_gates(mixer: Any, mean: Tensor) -> None:
    layout, start = mixer.layout, 0
    for section in layout.sections:
        rows = layout.rows(section) // mixer.tp_size
        if section in OUTPUT_GATES and section not in layout.low_rank_names:
            target = TARGETS[layout.gate_activation]
            row = target * mean / mean.square().sum().clamp_min(1e-12)
            part = mixer.in_proj.weight[start : start + rows]
            part.add_(row.to(part.dtype))
        start += rows
