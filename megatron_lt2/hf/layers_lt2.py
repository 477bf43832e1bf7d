"""The layers of an LT2 model: attention, SwiGLU, and the block around them.

Shape suffixes: B batch, T new tokens, S past and new tokens, H heads, D channels, d width of the
stream. The linear mixers are in linear_lt2.py.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.norms import rms_norm
from ..ops.rope import apply_rope
from .cache_lt2 import LinearSlot, WindowSlot
from .configuration_lt2 import ATTENTION, SPARSE, LT2Config
from .linear_lt2 import LT2LinearMixer
from .masks_lt2 import Tokens
from .sparse_lt2 import LT2SparseAttention
from .sparse_slots_lt2 import SparseSlot


class LT2RMSNorm(nn.Module):
    """RMS norm over the last dimension."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def _sigmoid(x: Tensor) -> Tensor:
    """Sigmoid of a gate in fp32 (fp64 if x is), as in training."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).sigmoid()


def eager_attention(
    module: nn.Module,
    q_BHTD: Tensor,
    k_BHSD: Tensor,
    v_BHSD: Tensor,
    mask: Tensor | None,
    scaling: float,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Softmax attention written out, for `attn_implementation="eager"`.

    Args:
        mask: bool, broadcast to [B, H, T, S], True where a query may look; None: plain causal.

    Returns:
        Output [B, T, H, D] and weights [B, H, T, S].
    """
    groups = q_BHTD.shape[1] // k_BHSD.shape[1]
    k, v = (x.repeat_interleave(groups, dim=1) for x in (k_BHSD, v_BHSD))
    scores = (q_BHTD @ k.transpose(-1, -2)) * scaling
    if mask is None:
        new, seen = scores.shape[-2:]
        mask = torch.ones(new, seen, dtype=torch.bool, device=scores.device).tril(seen - new)
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1).to(v.dtype)
    return (weights @ v).transpose(1, 2), weights


class LT2GateProjection(nn.Linear):
    """The output gate's projection: a class of its own because it starts at zero."""


class LT2Attention(nn.Module):
    """Causal softmax attention with rotary positions, grouped keys and an optional output gate.

    Args:
        config: of the model.
        layer_index: of the layer, whose windows config.window_of says.
    """

    is_causal = True

    def __init__(self, config: LT2Config, layer_index: int) -> None:
        super().__init__()
        self.config = config
        self.layer_index = layer_index
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        query_width = config.num_attention_heads * config.head_dim
        key_width = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_width, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, key_width, bias=False)
        self.g_proj = (
            LT2GateProjection(config.hidden_size, query_width, bias=False)
            if config.attention_output_gate
            else None
        )
        self.o_proj = nn.Linear(query_width, config.hidden_size, bias=False)

    def forward(
        self, x_BTd: Tensor, tokens: Tokens, slot: DynamicLayer | WindowSlot | None, loop: int = 0
    ) -> Tensor:
        """[B, T, d] -> [B, T, d]; `slot` takes in the new keys and values."""
        rope, masks = tokens.rope, tokens.masks
        assert rope is not None and masks is not None
        mask = masks[self.config.window_of(loop, self.layer_index)]
        q, k, v = (
            proj(x_BTd).unflatten(-1, (-1, self.head_dim))
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (apply_rope(x, *rope, interleaved=self.config.rope_interleaved) for x in (q, k))
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if slot is not None:
            k, v = slot.update(k, v)
        attend: Callable = eager_attention
        if self.config._attn_implementation not in (None, "eager"):
            attend = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        out, _ = attend(self, q, k, v, mask, dropout=0.0, scaling=self.head_dim**-0.5)
        out = out.flatten(-2)
        if self.g_proj is not None:
            out = (out * _sigmoid(self.g_proj(x_BTd))).to(out.dtype)
        return self.o_proj(out)


class LT2MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: LT2Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class LT2Block(GradientCheckpointingLayer):
    """h = h + mixer(norm(h)); h = h + SwiGLU(norm(h)); "sandwich" norms what is added as well."""

    def __init__(self, config: LT2Config, mixer: str, layer_index: int) -> None:
        super().__init__()
        self.input_layernorm = LT2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = (
            LT2Attention(config, layer_index)
            if mixer in ATTENTION
            else LT2SparseAttention(config, mixer)
            if mixer in SPARSE
            else LT2LinearMixer(config, mixer, layer_index)
        )
        self.post_attention_layernorm = LT2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LT2MLP(config)
        self.input_layernorm_2 = self.post_attention_layernorm_2 = None
        if config.norm_mode == "sandwich":
            width, eps = config.hidden_size, config.rms_norm_eps
            self.input_layernorm_2 = LT2RMSNorm(width, eps)
            self.post_attention_layernorm_2 = LT2RMSNorm(width, eps)

    def forward(
        self,
        h_BTd: Tensor,
        tokens: Tokens,
        slot: DynamicLayer | WindowSlot | SparseSlot | LinearSlot | None,
        loop: int = 0,
    ) -> Tensor:
        out = self.mixer(self.input_layernorm(h_BTd), tokens, slot, loop)
        h_BTd = h_BTd + (self.input_layernorm_2(out) if self.input_layernorm_2 else out)
        out = self.mlp(self.post_attention_layernorm(h_BTd))
        behind = self.post_attention_layernorm_2
        return h_BTd + (behind(out) if behind else out)
