"""What the losses look at: passes through a teacher's mixers and layers, beside the student's.

A pass is one layer in one loop, numbered p = loop * layers + layer. Student and teacher have as
many passes, and pass p of one is compared with pass p of the other, also where the student has
fewer physical layers and more loops.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.mixers.attention import loop_number

Inputs = tuple[Tensor, dict[str, Any]]
"""The hidden states that a module was called with, and the other arguments."""

Look = Callable[[int, Inputs, Tensor], None]
"""Given the pass, what the module took, and its output [s, b, d]."""


@contextmanager
def looking_at(model: Any, part: str, look: Look) -> Iterator[None]:
    """While it is open, `look` sees every pass through the layers of `model` (LT2Model).

    part: "mixer", behind the norm before it and without the residual add; or "layer".
    """
    layers = list(model.decoder.layers)

    def watch(index: int) -> Callable[..., None]:
        def hook(module: Any, args: Any, options: dict[str, Any], out: Any) -> None:
            given = dict(options)
            hidden = args[0] if args else given.pop("hidden_states")
            loop = loop_number(given["attention_mask"])
            look(loop * len(layers) + index, (hidden, given), out[0])

        return hook

    modules = [layer.self_attention if part == "mixer" else layer for layer in layers]
    handles = [
        module.register_forward_hook(watch(index), with_kwargs=True)
        for index, module in enumerate(modules)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_again(modules: Any, index: int, inputs: Inputs, loop: int) -> Tensor:
    """Output of a student's mixer or layer on what the teacher's took, in loop `loop`."""
    hidden, options = inputs
    given = {**options, "attention_mask": torch.tensor(loop)}
    out: Tensor = modules[index](hidden_states=hidden.detach(), **given)[0]
    return out


def stream(
    model: Any, tokens: Tensor, positions: Tensor, packing: Any, watch: Any = None
) -> Tensor:
    """The normed states [s, b, d] behind the last loop of an LT2Model; others as LT2Model.forward.

    `watch` sees the end of every loop but the last.
    """
    hidden = model.embedding(input_ids=tokens, position_ids=positions)
    out: Tensor = model.decoder(
        hidden,
        rotary_pos_emb=model._rotary(positions, packing),
        packed_seq_params=packing,
        watch=watch,
    )
    return out


def loop_states(
    model: Any, tokens: Tensor, positions: Tensor, packing: Any, wanted: set[int]
) -> dict[int, Tensor]:
    """Normed states behind the loops in `wanted` (from 0), the last always among them."""
    last = model.decoder.loops - 1
    found: dict[int, Tensor] = {}

    def keep(loop: int, normed: Tensor, h: Tensor) -> Tensor:
        if loop in wanted:
            found[loop] = normed
        return h

    early = keep if wanted - {last} else None
    found[last] = stream(model, tokens, positions, packing, early)
    return found
