"""A micro-batch as the model takes it: tokens, labels, loss mask, positions, documents."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_lt2.parallel.sequence import (
    packed_sequence,
    packing_to,
    shard_sequence,
    shard_span,
)


@dataclass(frozen=True)
class Batch:
    """A micro-batch in one of two layouts, or a context-parallel rank's part of it.

    Rows: b sequences of s tokens, packing is None. Packed: all documents of the micro-batch in one
    row [1, b * s], with their boundaries in `packing`; positions restart at each document.

    Of P context-parallel ranks, rank r has the tokens [r L/P, (r+1) L/P) of the (of each) row of L
    tokens. Its positions are those in the whole document, and `packing`, then always a
    ShardedSequence, says where its tokens lie.

    tokens, labels, positions: int64 [rows, length].
    loss_mask: fp32 [rows, length], 0 leaves a token out.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    packing: PackedSeqParams | None

    def to(self, device: torch.device) -> "Batch":
        """The same batch on `device`; copies to a GPU run behind the host's back."""

        def move(x: Tensor) -> Tensor:
            if device.type == "cuda" and x.device.type == "cpu":
                x = x.contiguous().pin_memory()
            return x.to(device, non_blocking=True)

        return Batch(
            tokens=move(self.tokens),
            labels=move(self.labels),
            loss_mask=move(self.loss_mask),
            positions=move(self.positions),
            packing=None if self.packing is None else packing_to(self.packing, move),
        )


def make_batch(
    tokens: Tensor,
    labels: Tensor,
    loss_mask: Tensor,
    *,
    eod: int,
    isolate_documents: bool,
    rank: int = 0,
    size: int = 1,
) -> Batch:
    """Lay sequences out for the model.

    Call it with tensors on the host: borders are read as numbers, for which a GPU would have to be
    waited for.

    Args:
        tokens, labels, loss_mask: [b, s], the same on all context-parallel ranks.
        eod: id that ends a document.
        isolate_documents: restart everything after each `eod` and at each sequence; else documents
            that share a sequence see each other.
        rank, size: this rank among the context-parallel ranks.

    Raises:
        ValueError: `size` ranks cannot share the row evenly.
    """
    rows, length = tokens.shape
    packing: PackedSeqParams | None = None
    if not isolate_documents:
        start, stop = shard_span(length, rank, size)
        positions = torch.arange(start, stop, device=tokens.device).expand(rows, -1)
        if size > 1:
            packing = shard_sequence(length, rank, size)
    else:
        total = rows * length
        start, stop = shard_span(total, rank, size)
        starts = document_starts(tokens, eod).nonzero().flatten()
        bounds = torch.cat([starts, starts.new_tensor([total])])
        flat = torch.arange(start, stop, device=tokens.device)
        positions = (flat - bounds[torch.bucketize(flat, bounds, right=True) - 1])[None]
        bounds = bounds.to(torch.int32)
        packing = packed_sequence(bounds)
        if size > 1:
            packing = shard_sequence(total, rank, size, bounds)
        tokens, labels, loss_mask = (x.reshape(1, -1) for x in (tokens, labels, loss_mask))
    tokens, labels, loss_mask = (x[:, start:stop] for x in (tokens, labels, loss_mask))
    return Batch(tokens, labels, loss_mask, positions, packing)


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Bool [b * s]: true where a document begins, at each row's start and after each `eod`."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 0] = True
    starts[:, 1:] = tokens[:, :-1] == eod
    return starts.flatten()
