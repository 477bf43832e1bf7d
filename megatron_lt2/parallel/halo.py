"""The inputs before a rank's first token that a causal convolution looks back at.

A convolution of W taps needs the W - 1 inputs before a token. Where a document goes on from one
rank to the next, the last W - 1 inputs of the rank before are sent on, those of all sections in one
message a pass whose size does not depend on the length of the sequence. The backward pass sends
their gradient back.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.parallel.collectives import attach, send_to_next


def exchange_halo(
    pieces: Sequence[Tensor],
    history: int,
    group: Any,
    *,
    last: int,
    continues: bool,
    documents: int,
) -> tuple[list[Tensor], list[Tensor | None]]:
    """Send this rank's last inputs on and receive those before its first token.

    Args:
        pieces: inputs of the convolutions [B, T, D_i].
        history: inputs that they look back at, W - 1; at most T.
        group: context-parallel process group.
        last: first token of the last piece of a document: what lies before it is not sent.
        continues: the first piece began on an earlier rank.
        documents: pieces on this rank (B if rows are not packed).

    Returns:
        The inputs, to be used instead of `pieces`, and the convolutions' initial states
        [documents, D_i, history], None where the first piece begins on this rank.
    """
    length = pieces[0].shape[1]
    assert history <= length
    sent = min(history, length - last)
    tail = torch.cat([x[:, length - sent :] for x in pieces], -1)
    received = send_to_next(F.pad(tail, (0, 0, history - sent, 0)), group)
    pieces = list(pieces)
    if not continues:
        pieces[0] = attach(pieces[0], received)
        return pieces, [None] * len(pieces)
    states = received.transpose(1, 2)
    if documents > len(states):
        # All other pieces of the packed row begin on this rank.
        states = torch.cat([states, states.new_zeros(documents - 1, *states.shape[1:])])
    return pieces, list(states.split([x.shape[-1] for x in pieces], dim=1))
