"""The cache of an LT2 model: one slot per (loop, layer).

The weights of a layer are shared between loops, what it remembers is not: loop t of layer i reads
and writes slot t * num_hidden_layers + i and no other. A slot of full attention is transformers'
own growing key/value layer; a slot of Gated DeltaNet is its recurrent state and the last inputs of
its short convolution.

The cache also remembers which of the past positions were padding, so that a later call need not
repeat it.
"""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

from .configuration_lt2 import LT2Config


class GatedDeltaSlot(CacheLayerMixin):
    """State of one Gated DeltaNet layer in one loop.

    recurrent_state is [B, H, K, V] (fp32, or fp64 in an fp64 model); conv_state holds the last
    taps - 1 inputs of the convolution, [B, channels, taps - 1]. Both start as None.
    """

    is_sliding = False
    is_compileable = False
    supports_early_init = False
    conv_state: torch.Tensor | None
    recurrent_state: torch.Tensor | None
    seen: int

    def __init__(self) -> None:
        super().__init__()
        self.reset()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is allocated ahead: the first update brings the tensors."""

    def update(
        self, conv_state: torch.Tensor, recurrent_state: torch.Tensor, tokens: int, **_: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace both states by those after `tokens` more tokens, and return them."""
        self.conv_state, self.recurrent_state = conv_state, recurrent_state
        self.seen += tokens
        self.is_initialized = True
        return conv_state, recurrent_state

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
        self.recurrent_state = None
        self.seen = 0
        self.is_initialized = False

    def offload(self) -> None:
        """Move the states to the CPU."""
        if self.conv_state is not None and self.recurrent_state is not None:
            self.device = self.conv_state.device
            self.conv_state = self.conv_state.to("cpu", non_blocking=True)
            self.recurrent_state = self.recurrent_state.to("cpu", non_blocking=True)

    def prefetch(self) -> None:
        """Move the states back to where they were before `offload`."""
        if self.conv_state is not None and self.recurrent_state is not None:
            device = getattr(self, "device", self.conv_state.device)
            self.conv_state = self.conv_state.to(device, non_blocking=True)
            self.recurrent_state = self.recurrent_state.to(device, non_blocking=True)

    def crop(self, tokens_to_remove: int) -> None:
        """A recurrent state cannot be rolled back; only crop(0) is possible."""
        if tokens_to_remove != 0:
            raise ValueError("the state of a Gated DeltaNet layer cannot be cropped")

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows `beam_idx` of the batch."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        if self.conv_state is not None and self.recurrent_state is not None:
            self.conv_state = self.conv_state[indices.to(self.conv_state.device)]
            self.recurrent_state = self.recurrent_state[indices.to(self.recurrent_state.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        if self.conv_state is not None and self.recurrent_state is not None:
            self.conv_state = self.conv_state.repeat_interleave(repeats, dim=0)
            self.recurrent_state = self.recurrent_state.repeat_interleave(repeats, dim=0)


class LT2Cache(Cache):
    """loops * num_hidden_layers slots, and the padding mask of the tokens they have seen."""

    def __init__(self, config: LT2Config) -> None:
        super().__init__(
            layers=[
                DynamicLayer() if mixer == "full" else GatedDeltaSlot()
                for _ in range(config.loops)
                for mixer in config.mixers
            ]
        )
        self.num_layers = config.num_hidden_layers
        self.real: torch.Tensor | None = None
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

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Take the rows `beam_idx` of the batch."""
        super().reorder_cache(beam_idx)
        if self.real is not None:
            self.real = self.real[beam_idx.to(self.real.device)]

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep the rows `indices` of the batch."""
        super().batch_select_indices(indices)
        if self.real is not None:
            self.real = self.real[indices.to(self.real.device)]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of the batch `repeats` times."""
        super().batch_repeat_interleave(repeats)
        if self.real is not None:
            self.real = self.real.repeat_interleave(repeats, dim=0)
