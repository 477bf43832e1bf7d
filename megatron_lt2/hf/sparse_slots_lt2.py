"""What sparse attention layers remember, one slot per (loop, layer), see cache_lt2.py.

Keys and values of all tokens (of `dsa` with one key head the keys, in which the values are); of
`dsa` also the indexer's keys, of `nsa` also the mean key and value of every block, so that a new
token does not average all blocks again.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..ops.nsa import RowBlocks
from ..ops.reach import Reach


class SparseSlot(CacheLayerMixin):
    """What one sparse attention layer remembers in one loop: tensors [B, S, ...] of all tokens.

    Keys and values, and of `dsa` the indexer's keys.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    state: tuple[Tensor, ...]

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated ahead: the first update brings the tensors."""

    def update(self, *new: Tensor) -> tuple[Tensor, ...]:
        """Put new tokens behind the ones there are, and return all."""
        pairs = zip(self.state, new, strict=True) if self.state else ()
        self.state = tuple(torch.cat(pair, dim=1) for pair in pairs) or new
        self.is_initialized = True
        return self.state

    def get_seq_length(self) -> int:
        """Tokens taken in so far, padding included."""
        return self.state[0].shape[1] if self.state else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask for the next `query_length` tokens covers."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """-1: any number of tokens can be taken in."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.state = ()
        self.is_initialized = False

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        self.state = tuple(change(x) for x in self.state)

    def offload(self) -> None:
        """Move everything to the CPU."""
        if self.state:
            self.device = self.state[0].device
            self._replace(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move everything back to where it was before `offload`."""
        if self.state:
            device = getattr(self, "device", self.state[0].device)
            self._replace(lambda x: x.to(device, non_blocking=True))

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens."""
        if tokens_to_remove != 0:
            self._replace(lambda x: x[:, :tokens_to_remove])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows `beam_idx` of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        self._replace(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._replace(lambda x: x.repeat_interleave(repeats, dim=0))


class BlockSlot(SparseSlot):
    """Keys, values, and the mean key and value of each of a row's blocks, [B, S, ...] and
    [B, blocks, ...]; blocks are counted from the row's first token."""

    def update_blocks(self, k: Tensor, v: Tensor, reach: Reach, size: int) -> tuple[Tensor, ...]:
        """Put new tokens behind the ones there are; only what they complete is averaged.

        Args:
            k, v: of the new tokens, [B, T, ...].
            reach: of the new tokens.
            size: tokens a block.

        Returns:
            All keys and values, and the means of all blocks of both; those of blocks that are not
            whole mean nothing.
        """
        past, means = self.get_seq_length(), self.state[2:]
        if past:
            k, v = (torch.cat(pair, dim=1) for pair in zip(self.state, (k, v), strict=False))
        blocks = RowBlocks(reach, size)
        # Rows that were nothing but padding so far begin among the new tokens.
        pooled = (blocks.add(x, means[i] if past else None, past) for i, x in enumerate((k, v)))
        self.state, self.is_initialized = (k, v, *pooled), True
        return self.state

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens; blocks that they were in are averaged again
        when they are whole again."""
        if tokens_to_remove != 0 and self.state:
            k, v, *means = self.state
            self.state = (k[:, :tokens_to_remove], v[:, :tokens_to_remove], *means)


SPARSE_SLOTS: dict[str, type[SparseSlot]] = {"nsa": BlockSlot, "dsa": SparseSlot}
"""The slot of each mixer."""
