"""DeepSeek sparse attention with a choice of kernel: Triton kernels of our own, or plain torch.

The kernels want one key head for all query heads, whose first channels are its value ("shared" in
`model.dsa.kv`). With several key heads ("grouped") attention and loss are plain torch on every
device; the selection of keys has its kernels in both forms.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops import dsa as ops
from ..ops.gathered import all_keys, attend, listed_keys
from ..ops.reach import Reach
from . import dsa_attention, dsa_indexer
from .backend import check_device, use_fla
from .guards import check_dtypes

MAX_HEADS = 32
MAX_CHANNELS = 640
MAX_INDEX_CHANNELS = 256
DTYPES = (torch.bfloat16, torch.float32)


class Attention(NamedTuple):
    """Attention of a layer to the keys that it sees.

    q: [B, T, H, K], this rank's heads.
    k: [B, S, G, K].
    v: [B, S, G, V]; with `shared` the first channels of k.
    reach: which keys a query may see.
    chosen: int32 [B, T, J], which of these it does see, -1: none; None: all.
    scale: factor on q^T k.
    shared: whether there is one key head, whose first channels are its value.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    reach: Reach
    chosen: Tensor | None
    scale: float
    shared: bool


def kernel_problem(heads: int, channels: int, index_channels: int) -> str | None:
    """What the kernels do not take of a geometry with one shared key head, or None.

    Args:
        heads: query heads of a rank.
        channels: of a key.
        index_channels: of an indexer's head.
    """
    for name, count, most in (
        ("query heads a rank", heads, MAX_HEADS),
        ("channels of a key", channels, MAX_CHANNELS),
        ("channels of an indexer's head", index_channels, MAX_INDEX_CHANNELS),
    ):
        if count > most:
            return f"{count} {name}, where the kernels of sparse attention take up to {most}"
    return None


def select_keys(
    q_BTHK: Tensor, w_BTH: Tensor, k_BSK: Tensor, reach: Reach, count: int, *, backend: str
) -> Tensor:
    """As `megatron_lt2.ops.dsa.select_keys`, and:

    Args:
        backend: "fla" (Triton kernels of ours) or "torch".

    Raises:
        ValueError: the kernels do not take these inputs.
    """
    if not use_fla(backend):
        return ops.select_keys(q_BTHK, w_BTH, k_BSK, reach, count)
    _guard(1, 1, q_BTHK.shape[-1], q=q_BTHK, w=w_BTH, k=k_BSK)
    return dsa_indexer.select_keys((q_BTHK, w_BTH, k_BSK), reach, count)


def sparse_attention(given: Attention, *, backend: str) -> tuple[Tensor, Tensor | None]:
    """Softmax attention to the keys that are seen.

    Args:
        given: see there.
        backend: as `select_keys`; several key heads are plain torch.

    Returns:
        Output [B, T, H, V], and what `indexer_loss` wants to know.

    Raises:
        ValueError: the kernels do not take these inputs.
    """
    q, k, v = given.q, given.k, given.v
    if not (use_fla(backend) and given.shared):
        choice = all_keys(given.reach) if given.chosen is None else listed_keys(given.chosen)
        return attend(q, k, v, choice, given.scale), None
    _guard(q.shape[2], q.shape[3], 1, q=q, k=k)
    values = v.shape[-1]
    if given.chosen is None:
        one = k.squeeze(2).contiguous()
        return dsa_attention.attend_all(q.contiguous(), one, given.reach, values, given.scale)
    out, lse = dsa_attention.attend_chosen(
        q.flatten(0, 1).contiguous(),
        k.flatten(0, 2).contiguous(),
        places_of_all_rows(given.chosen, k.shape[1]),
        values,
        given.scale,
    )
    return out.unflatten(0, q.shape[:2]), lse


def indexer_loss(
    index: tuple[Tensor, Tensor, Tensor],
    given: Attention,
    lse: Tensor | None,
    reduce: Callable[[Tensor], Tensor] = lambda x: x,
) -> Tensor:
    """As `megatron_lt2.ops.dsa.indexer_loss`, over the keys that attention sees.

    Args:
        index: the indexer's queries [B, T, heads, channels], weights [B, T, heads] and keys
            [B, S, channels].
        given, lse: what `sparse_attention` took and gave, which decides about the kernel.
        reduce: sum over the ranks that hold other heads.

    Raises:
        ValueError: the kernels do not take these inputs.
    """
    q, k, chosen = given.q.detach(), given.k.detach(), given.chosen
    if lse is None:
        choice = all_keys(given.reach) if chosen is None else listed_keys(chosen)
        return ops.indexer_loss(index, q, k, choice, scale=given.scale, reduce=reduce)
    _guard(q.shape[2], q.shape[3], index[0].shape[-1], q=index[0], w=index[1], k=index[2])
    if chosen is None:
        one = k.squeeze(2).contiguous()
        return dsa_indexer.dense_loss(
            index, q.contiguous(), one, lse, given.reach, scale=given.scale, reduce=reduce
        )
    return dsa_indexer.chosen_loss(
        index,
        q.flatten(0, 1).contiguous(),
        k.flatten(0, 2).contiguous(),
        lse,
        places_of_all_rows(chosen, k.shape[1]),
        values=given.v.shape[-1],
        scale=given.scale,
        reduce=reduce,
    )


def places_of_all_rows(chosen_BTJ: Tensor, keys: int) -> Tensor:
    """Places in a row of `keys` as places among the keys of all rows, [B T, J]."""
    if len(chosen_BTJ) == 1:
        return chosen_BTJ[0].contiguous()
    before = torch.arange(len(chosen_BTJ), device=chosen_BTJ.device, dtype=torch.int32) * keys
    moved = chosen_BTJ + before[:, None, None]
    return torch.where(chosen_BTJ >= 0, moved, -1).flatten(0, 1)


def _guard(heads: int, channels: int, index_channels: int, **tensors: Tensor) -> None:
    """Conditions of the kernels.

    Raises:
        ValueError: one is not met.
    """
    check_device(next(iter(tensors.values())).device.type)
    check_dtypes(**tensors)
    dtype = next(iter(tensors.values())).dtype
    if dtype not in DTYPES:
        raise ValueError(
            f"The kernels of sparse attention take bf16 and fp32, not {dtype}; use"
            " precision.kernels=torch."
        )
    if problem := kernel_problem(heads, channels, index_channels):
        raise ValueError(f"Sparse attention has {problem}; use precision.kernels=torch.")
