"""Packed documents: several texts in one row, none of which may see another.

A packed row has batch size 1 and comes with `cu_seqlens`, an integer tensor [N+1] of document
borders that starts with 0 and ends with T (the convention of FlashAttention and FLA). Empty
documents are allowed.

`ChunkLayout` cuts documents into chunks such that no chunk holds tokens of two documents. Chunks
are ordered by their place inside the document first ("step"), longest document first within a step:
the chunks that a recurrence can treat together are then one contiguous slice, and the loop over
steps is as long as the longest document, not as the row.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def document_bounds(cu_seqlens: Tensor, batch: int, length: int) -> list[int]:
    """The borders as Python integers, checked against the row they belong to.

    Args:
        cu_seqlens: integer tensor [N+1].
        batch: batch size of the packed row; must be 1.
        length: tokens T in the row.

    Raises:
        ValueError: the borders do not describe such a row.
    """
    if batch != 1:
        raise ValueError(f"cu_seqlens needs one packed row, but the batch size is {batch}.")
    if cu_seqlens.ndim != 1 or cu_seqlens.numel() < 2 or cu_seqlens.is_floating_point():
        raise ValueError(
            "cu_seqlens must be a one-dimensional integer tensor of at least two borders."
        )
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != length:
        raise ValueError(
            f"cu_seqlens must run from 0 to the row length {length},"
            f" not from {bounds[0]} to {bounds[-1]}."
        )
    if any(start > end for start, end in zip(bounds, bounds[1:], strict=False)):
        raise ValueError("cu_seqlens must not decrease.")
    return bounds


def document_ids(cu_seqlens: Tensor, length: int) -> Tensor:
    """Number of the document each token belongs to, int64 [T].

    Args:
        cu_seqlens: integer tensor [N+1], valid for a row of `length` tokens.
        length: tokens T in the row (given, so that no device has to be waited for).
    """
    lengths = cu_seqlens.diff().long()
    ids = torch.arange(lengths.numel(), device=cu_seqlens.device)
    return ids.repeat_interleave(lengths, output_size=length)


def document_positions(cu_seqlens: Tensor, length: int) -> Tensor:
    """Position of each token inside its document, int64 [T]; arguments as `document_ids`."""
    starts = cu_seqlens.long()[document_ids(cu_seqlens, length)]
    return torch.arange(length, device=cu_seqlens.device) - starts


@dataclass(frozen=True)
class ChunkLayout:
    """Where the tokens of a [B, T, ...] tensor go in chunks; built by `chunk_layout`."""

    batch: int
    length: int
    chunk_size: int
    active: list[int]
    """Documents that have a chunk at each step; never increases."""
    order: Tensor | None
    """Document numbers, longest first [N]; None when all documents are equally long."""
    source: Tensor | None
    """Token in every slot of every chunk [M*C]; padding repeats its document's last token."""
    filled: Tensor | None
    """1 where a slot holds a token, 0 where it is padding [M, C]."""
    slot: Tensor | None
    """Slot of every token of the row [T]."""

    def to_chunks(self, x_BTHD: Tensor, zero_padding: bool = False) -> Tensor:
        """[B, T, H, D] -> [M*H, C, D]; padding is finite, and zero if asked for."""
        heads, channels = x_BTHD.shape[2:]
        size = self.chunk_size
        if self.source is None:
            steps = len(self.active)
            x_BTHD = F.pad(x_BTHD, (0, 0, 0, 0, 0, steps * size - self.length))
            chunks = x_BTHD.view(self.batch, steps, size, heads, channels).permute(1, 0, 3, 2, 4)
        else:
            chunks = x_BTHD[0].index_select(0, self.source).view(-1, size, heads, channels)
            chunks = chunks.transpose(1, 2)
            if zero_padding:
                assert self.filled is not None
                chunks = chunks * self.filled[:, None, :, None].to(chunks.dtype)
        return chunks.reshape(-1, size, channels)

    def from_chunks(self, x_MHCD: Tensor, heads: int) -> Tensor:
        """[M*H, C, D] -> [B, T, H, D]; padding is dropped."""
        channels = x_MHCD.shape[-1]
        if self.slot is None:
            x = x_MHCD.view(len(self.active), self.batch, heads, self.chunk_size, channels)
            return x.permute(1, 0, 3, 2, 4).reshape(self.batch, -1, heads, channels)[
                :, : self.length
            ]
        x = x_MHCD.view(-1, heads, self.chunk_size, channels).transpose(1, 2)
        return x.reshape(-1, heads, channels).index_select(0, self.slot)[None]

    def sort_documents(self, x_N: Tensor) -> Tensor:
        """Put a tensor with one entry a document into the layout's order."""
        return x_N if self.order is None else x_N.index_select(0, self.order)

    def unsort_documents(self, x_N: Tensor) -> Tensor:
        """Undo `sort_documents`."""
        return x_N if self.order is None else x_N.index_select(0, self.order.argsort())


def chunk_layout(
    batch: int, length: int, chunk_size: int, cu_seqlens: Tensor | None, device: torch.device
) -> ChunkLayout:
    """Plan the chunks of a batch of equally long rows, or of one packed row.

    Raises:
        ValueError: `cu_seqlens` does not fit the row.
    """
    if cu_seqlens is None:
        steps = -(-length // chunk_size)
        return ChunkLayout(batch, length, chunk_size, [batch] * steps, None, None, None, None)
    bounds = torch.tensor(document_bounds(cu_seqlens, batch, length))
    lengths = bounds.diff()
    order = lengths.argsort(descending=True, stable=True)
    chunks_N = (lengths[order] + chunk_size - 1) // chunk_size
    active = [int((chunks_N > step).sum()) for step in range(int(chunks_N[0]))]

    step_M = torch.arange(len(active)).repeat_interleave(torch.tensor(active, dtype=torch.long))
    document_M = torch.cat([order[:0], *(order[:count] for count in active)])
    first_M = bounds[document_M] + step_M * chunk_size
    position_MC = first_M[:, None] + torch.arange(chunk_size)
    end_M1 = bounds[document_M + 1][:, None]
    filled_MC = position_MC < end_M1
    slot = torch.empty(length, dtype=torch.long)
    slot[position_MC[filled_MC]] = filled_MC.flatten().nonzero().squeeze(1)
    source = torch.minimum(position_MC, end_M1 - 1).flatten()
    order, source, filled, slot = (x.to(device) for x in (order, source, filled_MC, slot))
    return ChunkLayout(batch, length, chunk_size, active, order, source, filled, slot)
