"""Native sparse attention (Yuan et al. 2025, arXiv 2502.11089) in plain PyTorch.

    o = g_cmp o_cmp + g_slc o_slc + g_win o_win

A document is cut into blocks of keys, counted from its first token. o_cmp attends to the mean key
and value of every block that lies wholly in the past (nothing: zero). A block's importance is the
softmax weight of its mean key, averaged over the query heads of a key head; o_slc attends to the
tokens of the `count` most important blocks, among which the document's first block, the query's own
and the one before it always are. o_win attends to the last `window` tokens. Gradients do not flow
through the choice.
"""

import torch
from torch import Tensor

from .gathered import (
    Choice,
    attend,
    block_spans,
    recent_keys,
    scores,
    softmax_over,
    wide,
)
from .reach import Reach


def check_nsa(q: Tensor, k: Tensor, v: Tensor, block: int, count: int, reach: Reach) -> None:
    """Refuse inputs that do not belong together.

    Raises:
        ValueError: in one sentence, naming the numbers.
    """
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(f"Sparse attention needs [B, T, heads, channels], not {shapes}.")
    if k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2]:
        raise ValueError(f"The shapes of sparse attention do not fit together: {shapes}.")
    if (reach.length, reach.keys) != (q.shape[1], k.shape[1]):
        raise ValueError(f"The reach is of {reach.length} queries and {reach.keys} keys: {shapes}.")
    if block < 1 or count < 3:
        raise ValueError(
            f"{count} blocks of {block} tokens are too few: the first, the last and the one before "
            "it are always among them."
        )


def nsa(
    q_BTHK: Tensor,
    k_BSGK: Tensor,
    v_BSGV: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    reach: Reach,
    *,
    block: int,
    count: int,
    window: int,
    scale: float | None = None,
    means: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The three branches and their sum, [B, T, H, V] in q's dtype.

    Args:
        q_BTHK, k_BSGK, v_BSGV: queries, keys and values; G divides H.
        gates: of the compressed, selected and window branch, [B, T, H], in (0, 1).
        reach: which keys a query may see.
        block: tokens a block.
        count: selected blocks a query, at least 3.
        window: tokens that the window branch sees, the query's own included.
        scale: factor on q^T k; default K**-0.5.
        means: mean keys and values of the blocks as `RowBlocks` counts them, where all queries of
            a row are of one document; default: they are made.

    Raises:
        ValueError: shapes or sizes that make no sense.
    """
    check_nsa(q_BTHK, k_BSGK, v_BSGV, block, count, reach)
    scale = q_BTHK.shape[-1] ** -0.5 if scale is None else scale
    table = Blocks(reach, block) if means is None else RowBlocks(reach, block)
    k_cmp, v_cmp = means or (table.pool(k_BSGK), table.pool(v_BSGV))
    with torch.no_grad():
        chosen = select_blocks(q_BTHK, k_cmp, table, count, scale)
    branches = (
        attend(q_BTHK, k_cmp, v_cmp, table.complete, scale),
        attend(q_BTHK, k_BSGK, v_BSGV, table.tokens_of(chosen), scale),
        attend(q_BTHK, k_BSGK, v_BSGV, recent_keys(reach, window), scale),
    )
    out = sum(wide(g).unsqueeze(-1) * wide(o) for g, o in zip(gates, branches, strict=True))
    assert isinstance(out, Tensor)
    return out.to(q_BTHK.dtype)


class Blocks:
    """The blocks of all documents of a row, numbered through [M].

    Args:
        reach: which keys a query may see.
        size: tokens a block.

    Attributes:
        number: block of each key, int64 [B or 1, S].
        first: block in which each query's document begins, int64 [B or 1, T].
        count: M.
    """

    def __init__(self, reach: Reach, size: int) -> None:
        self.reach, self.size = reach, size
        local = torch.arange(reach.keys, device=reach.first.device) - reach.first_of_keys()
        self.number = (local % size == 0).long().cumsum(-1) - 1
        self.first = self.number.gather(1, reach.first)
        # The most that there can be without looking at the numbers would be S.
        self.count = int(self.number[:, -1].max()) + 1

    def pool(self, x_BSGK: Tensor) -> Tensor:
        """Mean over each block, [B, M, G, K] (of whole blocks; others are never looked at)."""
        batch = x_BSGK.shape[0]
        index = self.number.expand(batch, -1)[..., None, None].expand_as(x_BSGK)
        sums = wide(x_BSGK).new_zeros(batch, self.count, *x_BSGK.shape[2:])
        return (sums.scatter_add(1, index, wide(x_BSGK)) / self.size).to(x_BSGK.dtype)

    def _in_document(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """Tokens of its document before each query, [B or 1, C, 1], and each block's number in that
        document, [B or 1, C, M]."""
        before = self.reach.places(start, stop) - self.reach.first[:, start:stop]
        blocks = torch.arange(self.count, device=before.device)
        return before.unsqueeze(-1), blocks - self.first[:, start:stop, None]

    def complete(self, start: int, stop: int) -> tuple[None, Tensor]:
        """Blocks that lie wholly in the past, the query's own token included: a `Choice`."""
        before, block = self._in_document(start, stop)
        return None, ((block >= 0) & ((block + 1) * self.size <= before + 1)).unsqueeze(2)

    def always(self, start: int, stop: int) -> Tensor:
        """Blocks that are always selected, bool [B or 1, C, M]."""
        before, block = self._in_document(start, stop)
        own = before // self.size
        return (block == 0) | (block == own) | ((block == own - 1) & (block >= 0))

    def tokens_of(self, chosen_BTGN: Tensor) -> Choice:
        """The tokens of blocks given by their number in the document; -1: none."""

        def choose(start: int, stop: int) -> tuple[Tensor, Tensor]:
            chosen = chosen_BTGN[:, start:stop].long()
            inside = torch.arange(self.size, device=chosen.device)
            first = self.reach.first[:, start:stop, None, None, None]
            index = first + chosen.unsqueeze(-1) * self.size + inside
            place = self.reach.places(start, stop)[:, None, None, None]
            seen = (chosen.unsqueeze(-1) >= 0) & (index <= place)
            return index.clamp(0, self.reach.keys - 1).flatten(3), seen.flatten(3)

        return choose


class RowBlocks(Blocks):
    """The blocks of rows of one document each, counted from its first token: a cache's.

    Padding in front of a row's document has no blocks. What a query of padding gets means nothing.
    """

    def __init__(self, reach: Reach, size: int) -> None:
        self.reach, self.size = reach, size
        self.first = torch.zeros_like(reach.first)
        self.count = -(-reach.keys // size)

    def add(self, x_BSGK: Tensor, means: Tensor | None, known: int) -> Tensor:
        """Means [B, M, G, K] of the blocks, of which only those are made that were not whole when
        there were `known` keys.

        Args:
            x_BSGK: all keys, or values.
            means: of the blocks that there were then.
            known: keys then; 0: all blocks are made.
        """
        batch, keys = x_BSGK.shape[:2]
        first = self.reach.first[:, -1:].expand(batch, 1)
        start = (known - first).clamp(min=0) // self.size
        block = start + torch.arange((keys - known) // self.size + 1, device=x_BSGK.device)
        inside = torch.arange(self.size, device=x_BSGK.device)
        place = (first + block * self.size).unsqueeze(-1) + inside
        rows = torch.arange(batch, device=x_BSGK.device)
        gathered = wide(x_BSGK[rows[:, None, None], place.clamp(max=keys - 1)])
        made = (gathered.sum(2) / self.size).to(x_BSGK.dtype)
        # One more, which takes in what lies beyond the last block.
        out = x_BSGK.new_zeros(batch, self.count + 1, *x_BSGK.shape[2:])
        if means is not None:
            kept = min(means.shape[1], self.count)
            out[:, :kept] = means[:, :kept]
        out[rows[:, None], block.clamp(max=self.count)] = made
        return out[:, : self.count]


def select_blocks(
    q_BTHK: Tensor, k_BMGK: Tensor, table: Blocks, count: int, scale: float
) -> Tensor:
    """The most important blocks of each query, by their number in its document, int32
    [B, T, G, min(count, M)]; -1 where there are not so many."""
    groups, length = k_BMGK.shape[2], q_BTHK.shape[1]
    numbers = q_BTHK.shape[0] * q_BTHK.shape[2] * table.count
    chosen = []
    for start, stop in block_spans(length, numbers):
        _, complete = table.complete(start, stop)
        q = q_BTHK[:, start:stop].unflatten(2, (groups, -1))
        weights = softmax_over(scores(wide(q) * scale, wide(k_BMGK)), complete).mean(3)
        always = table.always(start, stop).unsqueeze(2)
        # Weights are at most one; what may not be seen goes to the end.
        rank = torch.where(always, 2.0, torch.where(complete, weights, -1.0))
        # Stable, so that equal weights give the same blocks whatever lies behind them.
        value, block = rank.sort(dim=-1, descending=True, stable=True)
        value, block = value[..., :count], block[..., :count]
        block = block - table.first[:, start:stop, None, None]
        chosen.append(torch.where(value >= 0, block, -1).to(torch.int32))
    return torch.cat(chosen, dim=1)
