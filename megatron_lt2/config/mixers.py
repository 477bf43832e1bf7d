"""Settings of the linear mixers and of sparse attention, one dataclass a mixer.

The text under a field is its help text. `None` stands for the value that the help text names;
`resolve` fills it in from the model's width and heads. Defaults are LT2's settings (arXiv
2605.20670), and where LT2 has none those of the mixer's own paper.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal, Self


@dataclass(kw_only=True)
class LinearSettings:
    """What every linear mixer has."""

    num_heads: int | None = None
    """Heads; default: model.num_heads."""

    head_k_dim: int | None = None
    """Query/key channels a head; the default is the mixer's own."""

    head_v_dim: int | None = None
    """Value channels a head; the default is the mixer's own."""

    norm_eps: float = 1e-5
    """Epsilon of the RMS norm on the output of the recurrence."""

    def resolve(self, hidden_size: int, num_heads: int) -> Self:
        """The same settings with every None replaced.

        Args:
            hidden_size: width of the model.
            num_heads: heads of the model's attention.
        """
        heads = self.num_heads or num_heads
        given = {"num_heads": heads}
        sizes = self._default_sizes(hidden_size, heads)
        for name, value in sizes.items():
            given[name] = getattr(self, name) or value
        return replace(self, **given)

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        """Default of each field that may be None, for width `d` and `heads` heads of the mixer."""
        return {"head_k_dim": d // heads, "head_v_dim": d // heads}


@dataclass(kw_only=True)
class GDNConfig(LinearSettings):
    """Gated DeltaNet layers (Yang et al. 2024, arXiv 2412.06464)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: 0.75 * hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: 2 * head_k_dim."""

    conv_size: int = 4
    """Taps of the short causal convolution on q, k and v."""

    allow_neg_eigval: bool = False
    """Let beta reach 2 instead of 1, so that transition eigenvalues may be negative."""

    a_init_max: float = 16.0
    """Decay rates A are drawn uniformly from (0, a_init_max]."""

    dt_min: float = 1e-3
    """Smallest initial time step; steps are drawn log-uniformly from [dt_min, dt_max]."""

    dt_max: float = 1e-1
    """Largest initial time step."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        keys = self.head_k_dim or int(0.75 * d) // heads
        return {"head_k_dim": keys, "head_v_dim": 2 * keys}


@dataclass(kw_only=True)
class KDAConfig(LinearSettings):
    """Kimi Delta Attention layers (Kimi Team 2025, arXiv 2510.26692)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: head_k_dim (1.5 times it: as many parameters as GDN)."""

    conv_size: int = 4
    """Taps of the short causal convolution on q, k and v."""

    allow_neg_eigval: bool = False
    """Let beta reach 2 instead of 1, so that transition eigenvalues may be negative."""

    rank: int | None = None
    """Width of the bottleneck of the decay and of the output gate; default: head_v_dim."""

    a_init_min: float = 1.0
    """Decay rates A are drawn uniformly from [a_init_min, a_init_max]."""

    a_init_max: float = 16.0
    """Largest initial decay rate."""

    dt_min: float = 1e-3
    """Smallest initial time step; steps are drawn log-uniformly from [dt_min, dt_max]."""

    dt_max: float = 1e-1
    """Largest initial time step."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        keys = self.head_k_dim or d // heads
        values = self.head_v_dim or keys
        return {"head_k_dim": keys, "head_v_dim": values, "rank": values}


@dataclass(kw_only=True)
class DeltaNetConfig(LinearSettings):
    """DeltaNet layers (Yang et al. 2024, arXiv 2406.06484)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: hidden_size / heads."""

    conv_size: int = 4
    """Taps of the short causal convolution on q, k and v."""

    allow_neg_eigval: bool = False
    """Let beta reach 2 instead of 1, so that transition eigenvalues may be negative."""

    output_gate: bool = False
    """Multiply the normed output by silu(x W_g)."""


@dataclass(kw_only=True)
class Mamba2Config(LinearSettings):
    """Mamba2 (SSD) layers (Dao and Gu 2024, arXiv 2405.21060)."""

    head_k_dim: int | None = None
    """State size N: channels of B and C; default: 64."""

    head_v_dim: int | None = None
    """Channels of a head; default: 2 * hidden_size / heads (expansion 2)."""

    groups: int = 1
    """Groups of heads that share one B and one C."""

    conv_size: int = 4
    """Taps of the short causal convolution on x, B and C (with a bias)."""

    norm: Literal["layer", "head"] = "layer"
    """Channels of the gated RMS norm: 'layer': all d_inner (Mamba2), 'head': each head alone."""

    a_init_min: float = 1.0
    """Decay rates A are drawn uniformly from [a_init_min, a_init_max]."""

    a_init_max: float = 16.0
    """Largest initial decay rate."""

    dt_min: float = 1e-3
    """Smallest initial time step; steps are drawn log-uniformly from [dt_min, dt_max]."""

    dt_max: float = 1e-1
    """Largest initial time step."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        return {"head_k_dim": 64, "head_v_dim": 2 * d // heads}


@dataclass(kw_only=True)
class RetNetConfig(LinearSettings):
    """Multi-scale retention layers (RetNet; Sun et al. 2023, arXiv 2307.08621)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: 2 * hidden_size / heads."""

    rope_theta: float = 10000.0
    """Base of the rotary frequencies on q and k."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        return {"head_k_dim": d // heads, "head_v_dim": 2 * d // heads}


@dataclass(kw_only=True)
class GLAConfig(LinearSettings):
    """Gated linear attention layers (Yang et al. 2023, arXiv 2312.06635)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: 0.5 * hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: hidden_size / heads."""

    rank: int = 16
    """Width of the bottleneck of the decay."""

    gate_normalizer: float = 16.0
    """Log decay is logsigmoid(.) divided by this."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        return {"head_k_dim": d // 2 // heads, "head_v_dim": d // heads}


@dataclass(kw_only=True)
class LinearAttentionConfig(LinearSettings):
    """Plain linear attention layers (Katharopoulos et al. 2020, arXiv 2006.16236)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: hidden_size / heads."""

    feature_map: Literal["elu1", "relu", "silu", "softmax", "identity"] = "elu1"
    """Map on q and k: elu(x)+1, relu, silu, softmax over a head's channels, or none."""

    normalize: bool = False
    """Divide the output by sum_s q.k_s before the norm; needs a map without negative values."""


@dataclass(kw_only=True)
class MLSTMConfig(LinearSettings):
    """mLSTM layers (xLSTM; Beck et al. 2024, arXiv 2405.04517; sizes of xLSTM 7B, 2503.13427)."""

    head_k_dim: int | None = None
    """Query/key channels a head; default: 0.5 * hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: hidden_size / heads."""

    gate_cap: float | None = 15.0
    """Input and forget pre-activations are softly capped to +-this (cap * tanh(x / cap)); null:
    not at all."""

    input_bias: float = -10.0
    """Initial bias of the input gate."""

    forget_bias_min: float = 3.0
    """Initial bias of the forget gate of the first head; it rises evenly to forget_bias_max."""

    forget_bias_max: float = 6.0
    """Initial bias of the forget gate of the last head."""

    def _default_sizes(self, d: int, heads: int) -> dict[str, Any]:
        return {"head_k_dim": d // 2 // heads, "head_v_dim": d // heads}


@dataclass(kw_only=True)
class HGRN2Config(LinearSettings):
    """HGRN2 layers (Qin et al. 2024, arXiv 2404.07904)."""

    head_k_dim: int | None = None
    """Channels of the forget gate a head (expansion ratio); default: hidden_size / heads."""

    head_v_dim: int | None = None
    """Value channels a head; default: hidden_size / heads."""

    lower_bound: float = 0.0
    """Forget gates of layer l of N stay above lower_bound * l / N. The paper learns these bounds
    over all layers; LT2 uses none."""

    norm: Literal["layer", "head"] = "layer"
    """Channels of the RMS norm: 'layer': all heads (HGRN2), 'head': each head alone."""


@dataclass(kw_only=True)
class WindowConfig:
    """Sliding-window attention layers; heads, rotary positions and gate are those of `full`."""

    size: int = 2048
    """A token attends to itself and to the size - 1 tokens before it."""


@dataclass(kw_only=True)
class SparseSettings:
    """What `nsa` and `dsa` have; rotary positions are those of model.rope."""

    num_heads: int | None = None
    """Query heads; default: model.num_heads."""

    num_kv_heads: int | None = None
    """Key/value heads; the default is the mixer's own."""

    head_dim: int | None = None
    """Channels a head; default: hidden_size / heads."""

    def resolve(self, hidden_size: int, num_heads: int) -> Self:
        """The same settings with every None replaced; arguments as `LinearSettings.resolve`."""
        heads = self.num_heads or num_heads
        return replace(
            self,
            num_heads=heads,
            num_kv_heads=self.num_kv_heads or self._default_kv_heads(heads),
            head_dim=self.head_dim or hidden_size // heads,
        )

    def _default_kv_heads(self, heads: int) -> int:
        return heads


@dataclass(kw_only=True)
class NSAConfig(SparseSettings):
    """Native sparse attention layers (Yuan et al. 2025, arXiv 2502.11089)."""

    num_kv_heads: int | None = None
    """Key/value heads; default: a 16th of the heads, at least one. FLA's kernel needs 16 query
    heads a key head, or 32, 64, .."""

    block_size: int = 64
    """Tokens a block; mean keys and values of whole blocks serve the compressed branch."""

    selected_blocks: int = 16
    """Blocks whose tokens a query attends to; the first, its own and the one before are among
    them."""

    window: int = 512
    """Tokens that the window branch sees, the query's own included."""

    def _default_kv_heads(self, heads: int) -> int:
        return max(1, heads // 16)


@dataclass(kw_only=True)
class DSAConfig(SparseSettings):
    """DeepSeek sparse attention layers with a trained indexer (arXiv 2512.02556)."""

    kv: Literal["shared", "grouped"] = "shared"
    """'shared': one key/value head for all (latent_dim + rope_dim keys, of which the first
    latent_dim are the value); 'grouped': num_kv_heads of head_dim channels."""

    num_kv_heads: int | None = None
    """Key/value heads of 'grouped'; default: as many as heads."""

    latent_dim: int = 512
    """Channels of the shared value, and of each query head that meet it."""

    rope_dim: int = 64
    """Rotary channels of the shared key, behind the others."""

    top_k: int = 2048
    """Keys that a query attends to."""

    index_heads: int = 16
    """Heads of the indexer."""

    index_dim: int = 64
    """Channels of an indexer head; its key is shared by all heads."""

    index_rope_dim: int = 32
    """How many of these, the first ones, have rotary positions; 0: none."""

    loss_weight: float = 1.0
    """Weight of the indexer's KL loss. It trains the indexer alone; 0: the indexer stays as it
    is."""

    dense_steps: int = 1000
    """First steps in which attention sees all keys and the indexer learns from all of them;
    after these both see the selected keys."""


SPARSE: dict[str, type[SparseSettings]] = {"nsa": NSAConfig, "dsa": DSAConfig}
"""Sparse attention mixers with settings of their own."""
