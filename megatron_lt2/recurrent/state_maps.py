"""What a stretch of tokens does to a recurrent state: S_out = M S_in + B, for each row and head.

M is what the tokens keep of the state that they find, B what they write into an empty one. Two
stretches in a row are one map again, (M2, B2) after (M1, B1) = (M2 M1, M2 B1 + B2), and this is
associative: a long sequence may be put together from its parts in any grouping.

Nothing is ever divided by a decay, because a product of decays may underflow to zero; and all of it
stays in fp32 at least, because rounding M and B to 16 bits at each of many stretches would add up.

Shapes: N rows or documents, H heads, K key and V value channels.
"""

from dataclasses import dataclass, fields
from typing import Protocol, Self

import torch
from torch import Tensor

from .base import State


class StateMap(Protocol):
    """What the maps here have in common."""

    @property
    def written(self) -> State:
        """The state that an empty one becomes."""

    def tensors(self) -> tuple[Tensor, ...]:
        """Everything that the map consists of, in the order of its constructor."""

    def apply(self, state: State) -> State:
        """The state after these tokens, from the one before them."""

    def after(self, earlier: Self) -> Self:
        """The map of the tokens of `earlier` followed by these."""


class _Fields:
    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, field.name) for field in fields(self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class DiagonalMap(_Fields):
    """A decay for every key channel, or one for all.

    decay: [N, H, K or 1, 1].
    state: B [N, H, K, V].
    """

    decay: Tensor
    state: Tensor

    @property
    def written(self) -> State:
        return (self.state,)

    def apply(self, state: State) -> State:
        return (torch.addcmul(self.state, self.decay, state[0]),)

    def after(self, earlier: "DiagonalMap") -> "DiagonalMap":
        return DiagonalMap(self.decay * earlier.decay, *self.apply(earlier.written))


@dataclass(frozen=True)
class DenseMap(_Fields):
    """A product of matrices: the delta rules.

    matrix: M [N, H, K, K]. Keys of length 1 and write strengths up to 2 keep its norm at most 1.
    state: B [N, H, K, V].
    """

    matrix: Tensor
    state: Tensor

    @property
    def written(self) -> State:
        return (self.state,)

    def apply(self, state: State) -> State:
        return (self.state + self.matrix @ state[0],)

    def after(self, earlier: "DenseMap") -> "DenseMap":
        return DenseMap(self.matrix @ earlier.matrix, *self.apply(earlier.written))


@dataclass(frozen=True)
class ScaledMap(_Fields):
    """A decay a head, and a state that is kept as S = [C | n] e^{-m}: the mLSTM.

    m is any number that keeps S in range; nothing depends on it but rounding, so it is a constant
    for the backward pass (`megatron_lt2/ops/mlstm.py`).

    log_decay: [N, H], -inf where nothing is kept.
    state: S written [N, H, K, V + 1].
    m: its m [N, H].
    """

    log_decay: Tensor
    state: Tensor
    m: Tensor

    @property
    def written(self) -> State:
        return self.state, self.m.detach()

    def apply(self, state: State) -> State:
        before, own = state[1].detach(), self.m.detach()
        m = torch.maximum(before + self.log_decay.detach(), own)
        kept = (before + self.log_decay - m).exp()[..., None, None]
        return kept * state[0] + (own - m).exp()[..., None, None] * self.state, m

    def after(self, earlier: "ScaledMap") -> "ScaledMap":
        return ScaledMap(self.log_decay + earlier.log_decay, *self.apply(earlier.written))
