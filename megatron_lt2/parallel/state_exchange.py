"""The recurrent state that a rank's tokens find, from what all ranks' tokens do to it.

Each rank has the map of its tokens, S_out = M S_in + B (`megatron_lt2/recurrent/state_maps.py`).
The state before rank r is

    S = M_(r-1) (.. (M_1 B_0 + B_1) ..) + B_(r-1)

Two ways give it, and both differentiate, because maps compose by products and sums:

- gather: one all-gather of all maps, then every rank folds those before its own. One collective a
  pass, P maps received (Sun et al. 2025, arXiv 2502.07563).
- scan: doubling steps; after step i each rank knows the map of the last 2^i ranks. 1 + log2 P
  sends of one map, and the products M M. For many ranks or large states, where P maps would take
  more memory than the activations.

Only the ranks since the one on which the document began are folded: a broken number in another
document cannot come in through 0 * nan. Volume and number of collectives do not depend on the
length of the sequence or on how many documents there are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.parallel.collectives import all_gather, attach, send_to_next
from megatron_lt2.recurrent.state_maps import State, StateMap

GATHERED_BYTES = 2**26
"""Gathered maps may take so many bytes; above, the scan is used."""


def state_before(
    own: StateMap, group: Any, anchor: Tensor, *, since: int, one_piece: bool
) -> State:
    """The state before this rank's tokens; zero if their first document begins here.

    Args:
        own: the map of this rank's tokens, of the same shapes on every rank.
        group: context-parallel process group.
        anchor: a tensor that own was computed along with, and that needs a gradient on every rank
            if it does on one: a rank whose map happens to be constant takes part in the backward
            pass all the same.
        since: rank on which the document of this rank's first token began.
        one_piece: all of this rank's tokens belong to that document.
    """
    flat = attach(pack(own), anchor)
    if flat.numel() * flat.element_size() * group.size() > GATHERED_BYTES:
        return scan(own, flat, group, since=since, one_piece=one_piece)
    gathered = all_gather(flat.unsqueeze(0), group)
    if since == group.rank():
        return _nothing(own, gathered)
    return fold([unpack(row, own) for row in gathered[since : group.rank()]])


def _nothing(like: StateMap, received: Tensor) -> State:
    """An empty state; `received` is of no use here."""
    return tuple(attach(torch.zeros_like(x), received) for x in like.written)


def fold(maps: Sequence[StateMap]) -> State:
    """The state after stretches of tokens that follow one another, starting from none."""
    state = maps[0].written
    for one in maps[1:]:
        state = one.apply(state)
    return state


def scan[Map: StateMap](
    own: Map, flat: Tensor, group: Any, *, since: int, one_piece: bool
) -> State:
    """`state_before` by doubling.

    Args:
        own: the map of this rank's tokens.
        flat: its tensors, packed.
        group, since, one_piece: as `state_before`.
    """
    rank, step = group.rank(), 1
    reaches = since if one_piece else rank
    while step < group.size():
        received = send_to_next(flat, group, step)
        if rank - step >= reaches:
            flat = pack(unpack(flat, own).after(unpack(received, own)))
        else:
            flat = attach(flat, received)
        step *= 2
    received = send_to_next(flat, group)
    return _nothing(own, received) if since == rank else unpack(received, own).written


def pack(own: StateMap) -> Tensor:
    """The numbers of a map in one row."""
    return torch.cat([x.reshape(-1) for x in own.tensors()])


def unpack[Map: StateMap](flat: Tensor, like: Map) -> Map:
    """A map of the shapes of `like` from a packed row."""
    tensors = like.tensors()
    parts = flat.split([x.numel() for x in tensors])
    return type(like)(*(part.view(x.shape) for part, x in zip(parts, tensors, strict=True)))
