"""How attention sees the tokens of other context-parallel ranks.

Two ways, both exact. By heads: an all-to-all gives each rank all tokens of some heads, attention
runs as on one rank, a second all-to-all goes back. Every rank has the same work, and what travels
a layer and rank is its own queries, keys, values and outputs, whatever the number of ranks. It
needs query and key/value heads that the ranks divide.

By keys: queries stay, and each rank is sent the earlier keys and values that its tokens can see. A
document that began d tokens before the rank's first token costs d keys, with a window at most
window - 1; one that begins there costs nothing. Everybody works these counts out from the borders,
so one all-to-all of unequal pieces does it: it is the halo of a sliding window over as many ranks
as it reaches, and for a single long document it is a gather to the ranks behind. Later ranks then
have more work than earlier ones (at most twice the mean).
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lt2.parallel.collectives import all_to_all
from megatron_lt2.parallel.sequence import SequenceShard


def heads_divide(query: Tensor, key: Tensor, ranks: int) -> bool:
    """Whether the heads of [s, b, heads, d] can be spread over the ranks."""
    return query.shape[2] % ranks == 0 and key.shape[2] % ranks == 0


def to_heads(query: Tensor, key: Tensor, value: Tensor, group: Any) -> tuple[Tensor, ...]:
    """This rank's tokens of all heads -> all tokens of this rank's heads.

    Args:
        query, key, value: [s, b, heads, d]; the ranks divide the heads, of which keys and values
            may have fewer.
        group: context-parallel process group.

    Returns:
        Each as [ranks * s, b, heads / ranks, d]; query heads keep their key heads.
    """
    ranks = group.size()
    parts = [x.unflatten(2, (ranks, -1)) for x in (query, key, value)]
    heads = [part.shape[3] for part in parts]
    together = torch.cat(parts, dim=3).flatten(2, 3)
    return all_to_all(together, group, split_dim=2, join_dim=0).split(heads, dim=2)


def to_tokens(x: Tensor, group: Any) -> Tensor:
    """The way back: [ranks * s, b, heads / ranks, d] -> [s, b, heads, d]."""
    return all_to_all(x, group, split_dim=0, join_dim=2)


def with_earlier_keys(
    x: Tensor, shard: SequenceShard, group: Any, window: int | None = None
) -> Tensor:
    """This rank's tokens behind those of earlier ranks that they can see.

    Args:
        x: [s, b, ...], keys or values of this rank's tokens.
        shard: where they lie.
        group: context-parallel process group.
        window: tokens that a query sees, itself included; None: all of its document so far.

    Returns:
        [e + s, b, ...]: the last e tokens before this rank's first one, all of its document.
    """
    needs = _first_keys(shard, window)
    if all(need == rank * shard.length for rank, need in enumerate(needs)):
        return x
    ranks = range(shard.size)
    sent = tuple(_overlap(shard.length, shard.rank, needs, other) for other in ranks)
    received = tuple(_overlap(shard.length, other, needs, shard.rank) for other in ranks)
    return _EarlierKeys.apply(x, sent, received, group)


def _first_keys(shard: SequenceShard, window: int | None) -> list[int]:
    """The first token that each rank's first token can see."""
    needs = []
    for start in range(0, shard.total, shard.length):
        need = shard.document_start(start)
        needs.append(need if window is None else max(need, start - window + 1))
    return needs


def _overlap(length: int, sender: int, needs: list[int], receiver: int) -> int:
    """How many of its last tokens `sender` sends to `receiver`."""
    if sender >= receiver:
        return 0
    stop = (sender + 1) * length
    return max(0, stop - max(needs[receiver], stop - length))


class _EarlierKeys(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: tuple[int, ...], received: tuple[int, ...], group: Any
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        out = x.new_empty(sum(received) + len(x), *x.shape[1:])
        earlier, own = out[: sum(received)], out[sum(received) :]
        own.copy_(x)
        leaving = torch.cat([x[len(x) - count :] for count in sent])
        _unequal_exchange(earlier, leaving, received, sent, group)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        earlier, own = dy.split([sum(ctx.received), len(dy) - sum(ctx.received)])
        arriving = dy.new_empty(sum(ctx.sent), *dy.shape[1:])
        _unequal_exchange(arriving, earlier.contiguous(), ctx.sent, ctx.received, ctx.group)
        dx = own.to(torch.promote_types(dy.dtype, torch.float32), copy=True)
        for piece in arriving.split(ctx.sent):
            dx[len(dx) - len(piece) :] += piece
        return dx.to(dy.dtype), None, None, None


def _unequal_exchange(
    arriving: Tensor, leaving: Tensor, counts_in: Any, counts_out: Any, group: Any
) -> None:
    """Consecutive pieces of `leaving` go to the ranks; theirs come in rank order."""
    dist.all_to_all_single(arriving, leaving, list(counts_in), list(counts_out), group=group)
