"""Which keys a query may see: those of its document from the first one up to the query itself.

Sparse attention serves packed rows, rows padded on the left, rows whose first keys come from a
cache, and context-parallel shards whose first keys come from other ranks. All of them are the same
to it: S = earlier + T keys, of which query t sees those from `first` on up to its own place,
earlier + t.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from .documents import document_bounds, document_ids


class Reach(NamedTuple):
    """The visible keys of T queries.

    first: place of the first key of each query's document, int64 [B or 1, T].
    earlier: keys before the first query; they belong to its document from `first` on.
    """

    first: Tensor
    earlier: int

    @property
    def length(self) -> int:
        """Queries T."""
        return self.first.shape[1]

    @property
    def keys(self) -> int:
        """Keys S."""
        return self.earlier + self.length

    def places(self, start: int, stop: int) -> Tensor:
        """Places of queries [start, stop) among the keys, int64 [stop - start]."""
        return torch.arange(self.earlier + start, self.earlier + stop, device=self.first.device)

    def visible(self, start: int, stop: int) -> Tensor:
        """Which keys the queries [start, stop) see, bool [B or 1, stop - start, S]."""
        keys = torch.arange(self.keys, device=self.first.device)
        place = self.places(start, stop)
        return (keys >= self.first[:, start:stop, None]) & (keys <= place[:, None])

    def first_of_keys(self) -> Tensor:
        """Place of the first key of each key's document, int64 [B or 1, S]; keys before the first
        query's document get their own place."""
        places = torch.arange(self.earlier, device=self.first.device)
        return torch.cat([torch.minimum(self.first[:, :1], places), self.first], dim=1)


def reach_of_documents(
    length: int, cu_seqlens: Tensor | None, earlier: int, device: torch.device, batch: int = 1
) -> Reach:
    """The reach of T queries in packed documents, or in rows of one document each.

    Args:
        length: queries T.
        cu_seqlens: document borders of the queries (one packed row); None: a row is a document.
        earlier: keys before the first query, all of its document.
        device: of the result.
        batch: rows, to check the borders.

    Raises:
        ValueError: the borders do not describe such a row.
    """
    if cu_seqlens is None:
        return Reach(torch.zeros(1, length, dtype=torch.long, device=device), earlier)
    document_bounds(cu_seqlens, batch, length)
    borders = cu_seqlens.to(device=device, dtype=torch.long)
    document = document_ids(borders, length)
    first = borders[document]
    return Reach(torch.where(first > 0, first + earlier, first)[None], earlier)


def reach_of_rows(real_BS: Tensor | None, past: int, new: int, device: torch.device) -> Reach:
    """The reach of new tokens behind `past` ones in rows that may be padded on the left.

    Args:
        real_BS: bool [B, past + new], False where a position is padding; None: no padding.
        past: keys of earlier calls.
        new: queries T.
        device: of the result.
    """
    places = torch.arange(past, past + new, device=device)
    if real_BS is None:
        return Reach(torch.zeros(1, new, dtype=torch.long, device=device), past)
    # A padded query looks at itself: a row of the softmax with nothing in it would be NaN.
    first = real_BS.long().argmax(-1, keepdim=True)
    return Reach(torch.minimum(first, places), past)
