"""Head and cross entropy over chunks of tokens, with a choice of kernel.

The logits of 16,384 tokens over a vocabulary of 128,256 are 4 GB in bf16, and the usual loss makes
an fp32 copy of them and keeps that for the backward pass. Here the logits of a chunk exist at a
time. The backward pass computes them again, a third more work in the head, and nothing as wide as
the vocabulary is kept.

What is here knows one rank's columns of the vocabulary; `megatron_lt2.parallel.vocab_loss` makes a
loss over all of them.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ..ops import linear_cross_entropy as ops
from .backend import check_device, use_fla

CHUNK_BYTES = 2**29
"""Bytes of a chunk's logits. The gradients of a chunk are added to the fp32 gradient of the weight,
which is read and written for each: a much smaller chunk waits for that."""

MIN_CHUNK = 128
"""Tokens of a chunk at least, and of which it is a multiple: rows of a matrix product's tiles."""

TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def chunk_tokens(vocabulary: int, value_bytes: int) -> int:
    """Tokens a chunk.

    Args:
        vocabulary: columns of this rank.
        value_bytes: of a logit.
    """
    fitting = CHUNK_BYTES // (vocabulary * value_bytes)
    return max(MIN_CHUNK, fitting // MIN_CHUNK * MIN_CHUNK)


def head_statistics(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    *,
    real: int,
    backend: str,
    chunk: int | None = None,
) -> Tensor:
    """`ops.row_statistics` of the logits hidden W^T, a chunk of them at a time.

    Args:
        hidden_ND: [n, d].
        weight_VD: [v, d], this rank's rows.
        targets_N: [n] columns of this rank; negative: another's.
        real: columns that are no padding.
        backend: "fla" (Triton kernels of our own) or "torch".
        chunk: tokens a chunk, default `chunk_tokens`.

    Returns:
        [3, n] fp32 (fp64 for fp64): maximum, sum of exponentials, the target's logit.
    """
    out = hidden_ND.new_empty(3, len(hidden_ND), dtype=ops.wide_dtype(hidden_ND.dtype))
    for part, logits in _chunks(hidden_ND, weight_VD, chunk):
        if real and _use_triton(logits, backend):
            from .linear_cross_entropy_triton import launch_statistics

            launch_statistics(logits, targets_N[part], real, out[:, part])
        else:
            out[:, part] = ops.row_statistics(logits, targets_N[part], real)
    return out


def head_gradients(
    hidden_ND: Tensor,
    weight_VD: Tensor,
    targets_N: Tensor,
    lse_N: Tensor,
    weights_N: Tensor,
    *,
    real: int,
    backend: str,
    chunk: int | None = None,
    for_hidden: bool = True,
    add: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor | None:
    """The gradients of `sum_i weights_i loss_i`; arguments as `head_statistics`, and:

    Args:
        lse_N: [n] log of the sum of exponentials over all ranks' columns.
        weights_N: [n] gradient of each token's loss.
        for_hidden: whether that of the hidden states is wanted.
        add: takes dz [m, v] and x [m, d] of a chunk and adds dz^T x to the weight's gradient before
            it returns or on the current stream, for dz is overwritten; None: it is not wanted.

    Returns:
        This rank's part of the gradient of the hidden states [n, d]: to be summed over ranks.
    """
    d_hidden = torch.empty_like(hidden_ND) if for_hidden else None
    for part, logits in _chunks(hidden_ND, weight_VD, chunk):
        given = targets_N[part], lse_N[part], weights_N[part]
        if _use_triton(logits, backend):
            from .linear_cross_entropy_triton import launch_gradients

            launch_gradients(logits, *given, real)
        else:
            ops.logits_to_gradients(logits, *given, real)
        if d_hidden is not None:
            torch.mm(logits, weight_VD, out=d_hidden[part])
        if add is not None:
            add(logits, hidden_ND[part])
    return d_hidden


def _chunks(hidden: Tensor, weight: Tensor, chunk: int | None) -> Iterator[tuple[slice, Tensor]]:
    """Which tokens, and their logits, all in the same place."""
    tokens = len(hidden)
    size = min(tokens, chunk or chunk_tokens(len(weight), hidden.element_size()))
    buffer = hidden.new_empty(size, len(weight))
    for start in range(0, tokens, size or 1):
        part = slice(start, min(tokens, start + size))
        logits = buffer[: part.stop - part.start]
        yield part, torch.mm(hidden[part], weight.t(), out=logits)


def _use_triton(logits: Tensor, backend: str) -> bool:
    if not use_fla(backend) or logits.dtype not in TRITON_DTYPES:
        return False
    check_device(logits.device.type)
    return True
