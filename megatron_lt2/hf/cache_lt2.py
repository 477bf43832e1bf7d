"""The cache of an LT2 model: one slot per (loop, layer).

The weights of a layer are shared between loops, what it remembers is not: loop t of layer i reads
and writes slot t * num_hidden_layers + i and no other. A slot of full attention is transformers'
own growing key/value layer; one of window attention keeps the keys and values that later tokens can
still see; those of sparse attention are in sparse_slots_lt2.py; one of a linear mixer keeps its
recurrent state and the last inputs of its convolution.

The cache also remembers which of the past positions were padding, so that a later call need not
repeat it. Tensors in it are replaced, never written to: what was taken out of a cache stays as it
was.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .configuration_lt2 import ATTENTION, SPARSE, LT2Config
from .sparse_slots_lt2 import SPARSE_SLOTS


class LinearSlot(CacheLayerMixin):
    """What one linear mixer remembers in one loop.

    state is a tuple of tensors [B, H, ...] (fp32, or fp64 in an fp64 model), as many as the mixer
    has; conv_state holds the last taps - 1 inputs of its convolution, [B, channels, taps - 1].
    Both start as None, and conv_state stays None in a mixer without a convolution.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    conv_state: Tensor | None
    state: tuple[Tensor, ...] | None
    seen: int

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is allocated ahead: the first update brings the tensors."""

    def update(
        self, conv_state: Tensor | None, state: tuple[Tensor, ...], tokens: int, **_: Any
    ) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """Replace both by those after `tokens` more tokens, and return them."""
        self.conv_state, self.state = conv_state, tuple(state)
        self.seen += tokens
        self.is_initialized = True
        return self.conv_state, self.state

    def get_seq_length(self) -> int:
        """Tokens taken in so far, padding included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask for the next `query_length` tokens covers."""
        return self.seen + query_length, 0

    def get_max_length(self) -> int:
        """-1: a recurrent state takes any number of tokens."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reset(self) -> None:
        """Forget everything."""
        self.conv_state = None
        self.state = None
        self.seen = 0
        self.is_initialized = False

    def _replace(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.conv_state is not None:
            self.conv_state = change(self.conv_state)
        if self.state is not None:
            self.state = tuple(change(x) for x in self.state)

    def offload(self) -> None:
        """Move the states to the CPU."""
        if self.state is not None:
            self.device = self.state[0].device
            self._replace(lambda x: x.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move the states back to where they were before `offload`."""
        if self.state is not None:
            device = getattr(self, "device", self.state[0].device)
            self._replace(lambda x: x.to(device, non_blocking=True))

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse to go back in time.

        Raises:
            ValueError: anything is to be removed.
        """
        if tokens_to_remove != 0:
            raise ValueError("the state of a linear mixer cannot be cropped")

    crop = check_crop

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows `beam_idx` of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        self._replace(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        self._replace(lambda x: x.repeat_interleave(repeats, dim=0))


class WindowSlot(DynamicLayer):
    """Keys and values of window attention that the next token can see: the last size - 1.

    transformers' own sliding layer is not used: it keeps everything in a window of one token.
    """

    is_sliding = True
    is_croppable = False
    keys: Any
    values: Any
    is_initialized: bool

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.seen = size, 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Take in new keys and values [B, heads, T, channels].

        Returns:
            The kept ones with the new ones behind them, for `masks_lt2.window_mask_for`.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys = torch.cat([self.keys, key_states], dim=-2)
        values = torch.cat([self.values, value_states], dim=-2)
        self.seen += key_states.shape[-2]
        drop = max(keys.shape[-2] - (self.size - 1), 0)
        # Copies, because a view would keep a whole prompt alive.
        self.keys, self.values = (x[..., drop:, :].clone() for x in (keys, values))
        return keys, values

    def get_seq_length(self) -> int:
        """Tokens taken in so far, those that left the window included."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of what a mask for the next `query_length` tokens covers."""
        kept = min(self.seen, self.size - 1)
        return kept + query_length, self.seen - kept

    def get_max_length(self) -> int:
        """-1: any number of tokens can be taken in."""
        return -1

    get_max_cache_shape = get_max_length

    def reset(self) -> None:
        """Forget everything."""
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = 0

    def check_crop(self, tokens_to_remove: int) -> None:
        """Refuse to go back to where keys are needed that are gone.

        Raises:
            ValueError: something is to be removed and the window has moved on.
        """
        if tokens_to_remove != 0 and self.seen > self.size - 1:
            raise ValueError(
                "the cache of window attention cannot be cropped: keys that left the window are "
                "gone"
            )

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens."""
        self.check_crop(tokens_to_remove)
        if tokens_to_remove != 0 and self.is_initialized:
            super().crop(tokens_to_remove)
            self.seen = self.keys.shape[-2]


def _slot(config: LT2Config, loop: int, layer: int) -> CacheLayerMixin:
    mixer = config.mixers[layer]
    if mixer in SPARSE:
        return SPARSE_SLOTS[mixer]()
    if mixer not in ATTENTION:
        return LinearSlot()
    window = config.window_of(loop, layer)
    return DynamicLayer() if window is None else WindowSlot(window)


class LT2Cache(Cache):
    """loops * num_hidden_layers slots, and the padding mask of the tokens they have seen.

    Args:
        config: of the model.
        loops: that every call with this cache runs; default: config.loops.
    """

    def __init__(self, config: LT2Config, loops: int | None = None) -> None:
        self.loops = config.loops if loops is None else loops
        super().__init__(
            layers=[
                _slot(config, loop, layer)
                for loop in range(self.loops)
                for layer in range(config.num_hidden_layers)
            ]
        )
        self.num_layers = config.num_hidden_layers
        self.real: Tensor | None = None
        """[B, seen] bool, False where a past position was padding; None: no padding so far."""

    def slot(self, loop: int, layer: int) -> CacheLayerMixin:
        """The slot that layer `layer` uses in loop `loop`."""
        return self.layers[loop * self.num_layers + layer]

    def reset(self) -> None:
        """Forget everything."""
        for layer in self.layers:
            layer.reset()
            if isinstance(layer, DynamicLayer):  # earlier transformers only zeroed the past here
                layer.keys = layer.values = None
                layer.is_initialized = False
        self.real = None

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -tokens_to_remove tokens, from all slots or from none.

        Raises:
            ValueError: a slot cannot go back.
        """
        if tokens_to_remove == 0:  # earlier transformers would remove everything
            return
        for layer in self.layers:
            if isinstance(layer, LinearSlot | WindowSlot):
                layer.check_crop(tokens_to_remove)
        super().crop(tokens_to_remove)
        if self.real is not None:
            self.real = self.real[:, : self.get_seq_length()]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows `beam_idx` of the batch."""
        super().reorder_cache(beam_idx)
        if self.real is not None:
            self.real = self.real[beam_idx.to(self.real.device)]

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        if self.real is not None:
            self.real = self.real[indices.to(self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.real is not None:
            self.real = self.real.repeat_interleave(repeats, dim=0)
