"""Ouro in plain torch, written from its published description (arXiv 2510.25741) for comparisons.

It shares nothing with the model under test. The notable points of the architecture:

- Every loop runs all layers with the same weights, then `model.norm`; the normed state is both what
  the next loop starts from and what the head and the exit gate read. No loop embedding, no
  injection of the input, the same rotary angles in every loop.
- Sandwich norms: h += norm2(attention(norm1(h))), h += norm4(mlp(norm3(h))).
- lambda_t = sigmoid(gate(h_t)); p_t = lambda_t * prod_{j<t} (1 - lambda_j), and the last loop takes
  what is left.
- Loop t of layer i has a cache slot of its own, t * layers + i.

Names of the parameters are those of the published state dict.

Shapes: B rows, S tokens, P tokens in the cache, d width, H heads, D channels a head, T loops.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class OuroShape:
    """The published config.json, by its names."""

    vocab_size: int = 49152
    hidden_size: int = 2048
    intermediate_size: int = 5632
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    num_key_value_heads: int = 16
    head_dim: int = 128
    total_ut_steps: int = 4
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    early_exit_threshold: float = 1.0


OURO_1_4B = OuroShape()
OURO_2_6B = OuroShape(num_hidden_layers=48)


@dataclass
class OuroOutput:
    """What a forward pass knows of every loop.

    hidden: T x [B, S, d], normed. logits: T x [B, S, vocabulary].
    exit_probabilities: [B, S, T], rows sum to 1.
    """

    hidden: list[Tensor]
    logits: list[Tensor]
    exit_probabilities: Tensor


class RMSNorm(nn.Module):
    """x / sqrt(mean x^2 + eps) * weight, the quotient in fp32 or wider."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return self.weight * (wide * (wide.square().mean(-1, True) + self.eps).rsqrt()).to(x.dtype)


class Slots:
    """Keys and values of every (loop, layer): slot number -> [B, H_kv, P, D]."""

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def append(self, slot: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add tokens to a slot; returns all of its keys and values."""
        if slot in self.keys:
            key = torch.cat([self.keys[slot], key], dim=2)
            value = torch.cat([self.values[slot], value], dim=2)
        self.keys[slot], self.values[slot] = key, value
        return key, value

    def length(self) -> int:
        """Tokens seen so far."""
        return self.keys[0].shape[2] if self.keys else 0


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary positions, channel i paired with channel i + D/2; x is [B, H, S, D]."""
    half = x.shape[-1] // 2
    frequencies = theta ** -(torch.arange(half, dtype=torch.float64) / half)
    angles = positions.double()[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal softmax attention, no biases; query head h reads key/value head h // (H / H_kv)."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.shape = shape
        d, width = shape.hidden_size, shape.head_dim
        heads, kv = shape.num_attention_heads, shape.num_key_value_heads
        self.q_proj = nn.Linear(d, heads * width, bias=False)
        self.k_proj = nn.Linear(d, kv * width, bias=False)
        self.v_proj = nn.Linear(d, kv * width, bias=False)
        self.o_proj = nn.Linear(heads * width, d, bias=False)

    def forward(self, x: Tensor, positions: Tensor, slots: Slots, slot: int) -> Tensor:
        width, theta = self.shape.head_dim, self.shape.rope_theta
        q, k, v = (
            projection(x).unflatten(-1, (-1, width)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        k, v = slots.append(slot, rotate(k, positions, theta), v)
        repeats = self.shape.num_attention_heads // self.shape.num_key_value_heads
        k, v = (part.repeat_interleave(repeats, dim=1) for part in (k, v))
        scores = rotate(q, positions, theta) @ k.transpose(-1, -2) * width**-0.5
        later = torch.arange(k.shape[2]) > positions[:, None]
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        return self.o_proj((weights @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        d, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(d, inner, bias=False)
        self.up_proj = nn.Linear(d, inner, bias=False)
        self.down_proj = nn.Linear(inner, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A sandwich-normed layer."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        d, eps = shape.hidden_size, shape.rms_norm_eps
        self.self_attn, self.mlp = Attention(shape), MLP(shape)
        self.input_layernorm, self.input_layernorm_2 = RMSNorm(d, eps), RMSNorm(d, eps)
        self.post_attention_layernorm = RMSNorm(d, eps)
        self.post_attention_layernorm_2 = RMSNorm(d, eps)

    def forward(self, h: Tensor, positions: Tensor, slots: Slots, slot: int) -> Tensor:
        mixed = self.self_attn(self.input_layernorm(h), positions, slots, slot)
        h = h + self.input_layernorm_2(mixed)
        return h + self.post_attention_layernorm_2(self.mlp(self.post_attention_layernorm(h)))


class Stack(nn.Module):
    """What the state dict calls `model`."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.early_exit_gate = nn.Linear(shape.hidden_size, 1)


class OuroReference(nn.Module):
    """The whole model."""

    def __init__(self, shape: OuroShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Stack(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, ids: Tensor, slots: Slots | None = None, loops: int | None = None
    ) -> OuroOutput:
        """ids [B, S] continue what `slots` has seen; `loops` default to the trained T."""
        slots = Slots() if slots is None else slots
        positions = slots.length() + torch.arange(ids.shape[1])
        h = self.model.embed_tokens(ids)
        hidden = []
        for loop in range(loops or self.shape.total_ut_steps):
            for i, layer in enumerate(self.model.layers):
                h = layer(h, positions, slots, loop * self.shape.num_hidden_layers + i)
            h = self.model.norm(h)
            hidden.append(h)
        gates = torch.cat([self.model.early_exit_gate(state) for state in hidden], dim=-1)
        return OuroOutput(hidden, [self.lm_head(state) for state in hidden], exit_mass(gates))

    def chosen_logits(
        self, output: OuroOutput, *, step: int | None = None, threshold: float | None = None
    ) -> Tensor:
        """[B, S, vocabulary] of the loop at which each token leaves.

        step: that loop (from 0) for all tokens. threshold: the first loop at which the probability
        to have left by then reaches it, the last one if none does. Neither: the last loop.
        """
        logits = torch.stack(output.logits, dim=-1)
        if step is not None:
            return logits[..., step]
        if threshold is None:
            return logits[..., -1]
        return logits.gather(
            -1, exit_loop(output.exit_probabilities, threshold)[..., None, None].expand(
                *logits.shape[:-1], 1
            )
        )[..., 0]  # fmt: skip

    @torch.no_grad()
    def generate(
        self,
        ids: Tensor,
        count: int,
        *,
        cached: bool = True,
        step: int | None = None,
        threshold: float | None = None,
    ) -> Tensor:
        """`ids` [B, S] and `count` greedy tokens."""
        slots = Slots()
        new = ids
        for _ in range(count):
            output = self(new, slots) if cached else self(ids)
            last = self.chosen_logits(output, step=step, threshold=threshold)[:, -1]
            new = last.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
        return ids


def exit_mass(gates: Tensor) -> Tensor:
    """Probability to leave at each loop, from gate values; [..., T] -> [..., T], sums to 1."""
    leave = gates.sigmoid()
    left = torch.ones_like(leave[..., 0])
    mass = []
    for loop in range(gates.shape[-1] - 1):
        mass.append(leave[..., loop] * left)
        left = left * (1 - leave[..., loop])
    return torch.stack([*mass, left], dim=-1)


def exit_loop(probabilities: Tensor, threshold: float) -> Tensor:
    """The loop at which each token leaves, [..., T] -> [...]."""
    reached = probabilities.cumsum(-1) >= threshold
    reached[..., -1] = True
    return reached.long().argmax(-1)


def random_ouro(
    shape: OuroShape, seed: int = 0, dtype: torch.dtype = torch.float64
) -> OuroReference:
    """A model whose every parameter matters: nothing is zero or one, norms included."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = OuroReference(shape).double()  # the same numbers whatever the dtype
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("norm.weight") or "layernorm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0, 1.5 * parameter.shape[-1] ** -0.5)
    return model.to(dtype).eval()
