"""The layers of an LT2 model: mixers, SwiGLU, and the block around them.

Shape suffixes: B batch, T new tokens, S past and new tokens, H heads, D channels, d width of the
stream.

Padding is exact, not approximate: attention never looks at a padded key; Gated DeltaNet sees zero
inputs at padded positions, so that its convolution finds what it finds before a sequence starts,
and there neither writes to its state (beta 0) nor lets it decay (log decay 0).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..ops.conv import causal_conv1d, conv1d_step
from ..ops.gdn import gdn_log_decay
from ..ops.norms import gated_rms_norm, rms_norm
from ..ops.rope import apply_rope
from .cache_lt2 import GatedDeltaSlot
from .configuration_lt2 import LT2Config
from .recurrence_lt2 import gated_delta_rule


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
    """Causal softmax attention with rotary positions, grouped keys and an optional output gate."""

    is_causal = True

    def __init__(self, config: LT2Config) -> None:
        super().__init__()
        self.config = config
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
        self,
        x_BTd: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        real_BT: Tensor | None,
        slot: DynamicLayer | None,
    ) -> Tensor:
        """[B, T, d] -> [B, T, d]; keys and values are appended to `slot`."""
        assert rope is not None
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


class LT2ShortConv(nn.Module):
    """Taps of a depthwise causal convolution, [channels, 1, taps] as torch's Conv1d holds them."""

    def __init__(self, channels: int, taps: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))


class LT2GatedDeltaNet(nn.Module):
    """Gated DeltaNet (arXiv 2412.06464): short convolution, gated delta rule, gated head norm."""

    def __init__(self, config: LT2Config) -> None:
        super().__init__()
        width, heads, taps = config.hidden_size, config.gdn_heads, config.gdn_conv_size
        key_width, value_width = heads * config.gdn_head_k_dim, heads * config.gdn_head_v_dim
        self.heads = heads
        self.widths = [key_width, key_width, value_width]
        self.max_beta = 2.0 if config.gdn_allow_neg_eigval else 1.0
        self.norm_eps = config.gdn_norm_eps
        self.q_proj = nn.Linear(width, key_width, bias=False)
        self.k_proj = nn.Linear(width, key_width, bias=False)
        self.v_proj = nn.Linear(width, value_width, bias=False)
        self.g_proj = nn.Linear(width, value_width, bias=False)
        self.b_proj = nn.Linear(width, heads, bias=False)
        self.a_proj = nn.Linear(width, heads, bias=False)
        self.q_conv1d = LT2ShortConv(key_width, taps)
        self.k_conv1d = LT2ShortConv(key_width, taps)
        self.v_conv1d = LT2ShortConv(value_width, taps)
        # Decays are exponentials of these; 16 bits would change them visibly over long texts.
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.o_norm = LT2RMSNorm(config.gdn_head_v_dim, config.gdn_norm_eps)
        self.o_proj = nn.Linear(value_width, width, bias=False)

    def forward(
        self,
        x_BTd: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        real_BT: Tensor | None,
        slot: GatedDeltaSlot | None,
    ) -> Tensor:
        """[B, T, d] -> [B, T, d]; tokens that `real_BT` calls padding leave the state alone."""
        if real_BT is not None:
            x_BTd = x_BTd * real_BT[..., None].to(x_BTd.dtype)
        beta = _sigmoid(self.b_proj(x_BTd)) * self.max_beta
        g = gdn_log_decay(self.a_proj(x_BTd), self.A_log, self.dt_bias)
        if real_BT is not None:
            beta, g = (x * real_BT[..., None].to(x.dtype) for x in (beta, g))

        past_conv = slot.conv_state if slot is not None else None
        past_state = slot.recurrent_state if slot is not None else None
        qkv, conv_state = self._convolve(x_BTd, past_conv)
        q, k, v = (x.unflatten(-1, (self.heads, -1)) for x in qkv.split(self.widths, dim=-1))
        out, state = gated_delta_rule(q, k, v, g, beta, past_state)
        if slot is not None:
            slot.update(conv_state, state, x_BTd.shape[1])

        gate = self.g_proj(x_BTd).unflatten(-1, (self.heads, -1))
        return self.o_proj(gated_rms_norm(out, gate, self.o_norm.weight, self.norm_eps).flatten(-2))

    def _convolve(self, x_BTd: Tensor, past: Tensor | None) -> tuple[Tensor, Tensor]:
        """Project to q | k | v and convolve the three in one call."""
        x = torch.cat([self.q_proj(x_BTd), self.k_proj(x_BTd), self.v_proj(x_BTd)], dim=-1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        weight_DW = torch.cat([conv.weight for conv in convs]).squeeze(1)
        if past is not None and x.shape[1] == 1:
            y, state = conv1d_step(x[:, 0], weight_DW, past)
            return y[:, None], state
        return causal_conv1d(x, weight_DW, initial_state_NDW=past)


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
    """h = h + mixer(norm(h)); h = h + SwiGLU(norm(h))."""

    def __init__(self, config: LT2Config, mixer: str) -> None:
        super().__init__()
        self.input_layernorm = LT2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mixer = LT2Attention(config) if mixer == "full" else LT2GatedDeltaNet(config)
        self.post_attention_layernorm = LT2RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = LT2MLP(config)

    def forward(
        self,
        h_BTd: Tensor,
        rope: tuple[Tensor, Tensor] | None,
        mask: Tensor | None,
        real_BT: Tensor | None,
        slot: DynamicLayer | GatedDeltaSlot | None,
    ) -> Tensor:
        h_BTd = h_BTd + self.mixer(self.input_layernorm(h_BTd), rope, mask, real_BT, slot)
        return h_BTd + self.mlp(self.post_attention_layernorm(h_BTd))
