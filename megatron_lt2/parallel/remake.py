"""Tensors that know how they were made, so that whoever needs them later need not keep them.

A norm or an activation costs little time and its output much memory: it is as large as what it
came from, which is kept anyway. `remakable` marks such an output; the matrix product behind it then
keeps the inputs and makes the output again in its backward pass, with the same kernel, bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Recipe:
    """inputs: tensors that are kept anyway; make: gives the marked tensor from them."""

    inputs: tuple[Tensor, ...]
    make: Callable[..., Tensor]


def remakable(y: Tensor, inputs: tuple[Tensor, ...], make: Callable[..., Tensor]) -> Tensor:
    """Mark y = make(*inputs); the mark is lost on views of y."""
    if torch.is_grad_enabled():
        y.lt2_recipe = Recipe(inputs, make)  # type: ignore[attr-defined]  # tensors take attributes
    return y


class Keeping:
    """What a backward pass keeps of its input x: x itself, or what it is made from."""

    def __init__(self, x: Tensor) -> None:
        self._recipe: Recipe | None = getattr(x, "lt2_recipe", None)
        self.tensors: tuple[Tensor, ...] = (x,) if self._recipe is None else self._recipe.inputs
        # Only the function: the tensors are kept by autograd, which knows when to let go of them.
        self._make: Any = None if self._recipe is None else self._recipe.make
        self._recipe = None

    def again(self, tensors: tuple[Tensor, ...]) -> Tensor:
        """x, from what `tensors` holds now."""
        if self._make is None:
            return tensors[0]
        x: Tensor = self._make(*(t.detach() for t in tensors))
        return x
