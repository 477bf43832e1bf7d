"""A micro-batch as the model takes it: tokens, labels, loss mask, positions, documents."""

from dataclasses import dataclass

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """A micro-batch in one of two layouts.

    Rows: b sequences of s tokens, packing is None. Packed: all documents of the micro-batch in one
    row [1, b * s], with their boundaries in `packing`; positions restart at each document.

    tokens, labels, positions: int64 [rows, length].
    loss_mask: fp32 [rows, length], 0 leaves a token out.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    positions: Tensor
    packing: PackedSeqParams | None


def make_batch(
    tokens: Tensor, labels: Tensor, loss_mask: Tensor, *, eod: int, isolate_documents: bool
) -> Batch:
    """Lay sequences out for the model.

    Args:
        tokens, labels, loss_mask: [b, s] on the device of the model.
        eod: id that ends a document.
        isolate_documents: restart everything after each `eod` and at each sequence; else documents
            that share a sequence see each other.
    """
    rows, length = tokens.shape
    if not isolate_documents:
        positions = torch.arange(length, device=tokens.device).expand(rows, length)
        return Batch(tokens, labels, loss_mask, positions, None)
    starts = document_starts(tokens, eod)
    flat = torch.arange(rows * length, device=tokens.device)
    bounds = torch.cat([flat[starts], flat.new_tensor([rows * length])])
    positions = flat - bounds[torch.bucketize(flat, bounds, right=True) - 1]
    longest = int(positions.max()) + 1
    bounds = bounds.to(torch.int32)
    packing = PackedSeqParams(
        # Not "thd": hidden states keep megatron-core's [s, b, d] with b = 1, and rotary angles
        # come per token.
        qkv_format="sbhd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )
    tokens, labels, loss_mask, positions = (
        x.reshape(1, -1) for x in (tokens, labels, loss_mask, positions)
    )
    return Batch(tokens, labels, loss_mask, positions, packing)


def document_starts(tokens: Tensor, eod: int) -> Tensor:
    """Bool [b * s]: true where a document begins, at each row's start and after each `eod`."""
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    starts[:, 0] = True
    starts[:, 1:] = tokens[:, :-1] == eod
    return starts.flatten()
