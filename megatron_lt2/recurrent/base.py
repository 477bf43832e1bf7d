"""What a linear mixer declares: its layout (projections, parameters, norm) and its recurrence.

Every linear mixer is the same layer around another recurrence:

    parts = projections of x, some through a short causal convolution and SiLU
    o     = recurrence(parts)                              [B, T, H, V]
    y     = out_proj(norm(o), gated)

Heads are independent, so tensor parallelism splits them. What heads have in common (a `shared`
section such as Mamba2's B and C, or a bottleneck such as KDA's gate) is computed in slices, one a
rank, and gathered; the backward pass of the gather sums the gradients of all heads.

Shapes: B batch, T tokens, H heads, K query/key and V value channels a head, d width of the model.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""What a recurrence carries on: tensors [N, H, ...] in fp32, one entry a document."""

Initialiser = Callable[[tuple[int, ...], torch.Generator], Tensor]
"""(global shape, generator) -> initial values."""


@dataclass(frozen=True)
class Section:
    """One projection of the layer's input.

    channels: a head; of all heads together if `shared`.
    shared: the same channels serve every head.
    conv: goes through the convolution and SiLU.
    unit: each head's channels are scaled to length 1 behind that, by the kernel of the convolution
        or by that of the recurrence (`Scan.scaled`).
    rank: project down to this many channels and up again, instead of directly.
    bias: the way up has a bias.
    """

    channels: int
    shared: bool = False
    conv: bool = False
    unit: bool = False
    rank: int | None = None
    bias: bool = False


@dataclass(frozen=True)
class Weight:
    """A parameter of the mixer: `channels` fp32 numbers a head, stored flat [H * channels]."""

    channels: int
    init: Initialiser


@dataclass(frozen=True)
class Layout:
    """Geometry of a linear mixer.

    heads, head_k_dim, head_v_dim: H, K, V.
    sections: projections in the order in which they are fused; those with `conv` come first.
    weights: parameters of the mixer's own.
    conv_size: taps of the convolution.
    conv_bias: the convolution has a bias.
    gate: section that gates the output [H, V], or None.
    gate_activation: of that section.
    gate_first: norm(o * act(gate)) instead of norm(o) * act(gate).
    norm: RMS norm over each head's channels with one weight for all heads ("head"), or over the
        channels of all heads together ("layer").
    norm_eps: its epsilon.
    """

    heads: int
    head_k_dim: int
    head_v_dim: int
    sections: dict[str, Section]
    weights: dict[str, Weight] = field(default_factory=dict)
    conv_size: int = 0
    conv_bias: bool = False
    gate: str | None = None
    gate_activation: Literal["silu", "sigmoid"] = "silu"
    gate_first: bool = False
    norm: Literal["head", "layer"] = "head"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        convolved = [section.conv for section in self.sections.values()]
        assert convolved == sorted(convolved, reverse=True), "sections with conv come first"
        assert all(s.conv and not s.shared for s in self.sections.values() if s.unit)

    def rows(self, name: str) -> int:
        """Rows that section `name` has in the fused input projection, over all ranks."""
        section = self.sections[name]
        if section.rank is not None:
            return section.rank
        return section.channels if section.shared else section.channels * self.heads

    def width(self, name: str) -> int:
        """Channels of section `name` over all heads."""
        section = self.sections[name]
        return section.channels if section.shared else section.channels * self.heads

    @property
    def conv_names(self) -> tuple[str, ...]:
        """Sections that go through the convolution."""
        return tuple(name for name, section in self.sections.items() if section.conv)

    @property
    def low_rank_names(self) -> tuple[str, ...]:
        """Sections that go through a bottleneck."""
        return tuple(name for name, section in self.sections.items() if section.rank is not None)

    @property
    def gathered_names(self) -> tuple[str, ...]:
        """Sections whose rows in the input projection serve every head."""
        return tuple(name for name, s in self.sections.items() if s.shared or s.rank is not None)

    @property
    def norm_channels(self) -> int:
        """Numbers in the norm's weight."""
        return self.head_v_dim * (self.heads if self.norm == "layer" else 1)

    def matrix_parameters(self, d: int) -> int:
        """Parameters that multiply every token as a dense matrix, for a model of width `d`."""
        total = d * sum(map(self.rows, self.sections)) + d * self.heads * self.head_v_dim
        return total + sum(self.rows(n) * self.width(n) for n in self.low_rank_names)

    def parameters(self, d: int) -> int:
        """All parameters of one layer's mixer."""
        conv = sum(map(self.rows, self.conv_names)) * (self.conv_size + self.conv_bias)
        biases = sum(self.width(n) for n in self.low_rank_names if self.sections[n].bias)
        own = sum(weight.channels for weight in self.weights.values()) * self.heads
        return self.matrix_parameters(d) + conv + biases + own + self.norm_channels


@dataclass(frozen=True)
class Scan:
    """What a recurrence is told about its tokens.

    backend: "fla" or "torch", see kernels/backend.py.
    heads: which of the layout's heads are here.
    cu_seqlens: document borders of a packed row.
    positions: position of each token in its document [B or 1, T]; None: as the borders say.
    real: False where a token is padding [B, T]; None: no padding.
    state: state before the first token; None: zero.
    keep_state: also return the state after the last token.
    scaled: the `unit` sections have length 1 already.
    """

    backend: str
    heads: slice
    cu_seqlens: Tensor | None = None
    positions: Tensor | None = None
    real: Tensor | None = None
    state: State | None = None
    keep_state: bool = False
    scaled: bool = False

    def blank(self, x: Tensor) -> Tensor:
        """Zero at padding; x is [B, T, H] or [B, T, H, channels].

        A key of zero writes nothing and a log decay of zero forgets nothing, so padding whose keys
        and log decays are blank leaves the state alone.
        """
        if self.real is None:
            return x
        return x * self.real.view(*self.real.shape, *(1,) * (x.dim() - 2)).to(x.dtype)


@dataclass(frozen=True)
class Recurrence:
    """A kernel, and what a mixer gives it.

    kernel: a function from kernels/, called as kernel(*tensors, **options, backend=..., ...).
    tensors: with a number or vector for each token, [B, T, H, ...]: queries, keys, values, then
        gates (None where the mixer has none).
    options: keywords that are the same for all tokens.
    """

    kernel: Callable[..., tuple[Tensor, Any]]
    tensors: tuple[Tensor | None, ...]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, scan: Scan) -> tuple[Tensor, State | None]:
        """Output [B, T, H, V], and the state after each document if `scan.keep_state`."""
        state = scan.state
        out, final = self.kernel(
            *self.tensors,
            **self.options,
            backend=scan.backend,
            cu_seqlens=scan.cu_seqlens,
            # A kernel whose state is one tensor takes and gives just that.
            initial_state=state[0] if state is not None and len(state) == 1 else state,
            output_final_state=scan.keep_state,
        )
        return out, (final,) if isinstance(final, Tensor) else final


class RecurrentMixer:
    """Base of the linear mixers.

    Args:
        settings: the mixer's settings (config/mixers.py) with every None resolved.
        depth: layer number / layers, from 1/N to 1.

    reads_positions: its tokens need to know where in their document they are.
    """

    layout: Layout
    reads_positions = False

    def __init__(self, settings: Any, depth: float = 1.0) -> None:
        self.settings, self.depth = settings, depth
        self.layout = self.describe()

    def describe(self) -> Layout:
        """The geometry that the settings give."""
        raise NotImplementedError(f"{type(self).__name__} must define describe")

    def prepare(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> Recurrence:
        """Turn projections and parameters into what a kernel takes.

        Args:
            parts: the sections: [B, T, H, channels], [B, T, channels] if shared. H is the number of
                heads in `scan.heads`.
            weights: the mixer's own parameters, [H * channels] of the same heads, fp32.
            scan: heads, positions, padding.
        """
        raise NotImplementedError(f"{type(self).__name__} must define prepare")

    def finish(self, out: Tensor, parts: dict[str, Tensor], weights: dict[str, Tensor]) -> Tensor:
        """What the recurrence's output [B, T, H, V] becomes before the norm; here it stays."""
        return out

    def mix(
        self, parts: dict[str, Tensor], weights: dict[str, Tensor], scan: Scan
    ) -> tuple[Tensor, State | None]:
        """Mix tokens; arguments as `prepare`.

        Returns:
            Output [B, T, H, V], and the new state if `scan.keep_state`.
        """
        out, state = self.prepare(parts, weights, scan).run(scan)
        return self.finish(out, parts, weights), state

    def flops(self) -> float:
        """Operations a token of the recurrence, all heads; a multiply-add counts as two.

        Here: write k v^T into the state and read q^T S.
        """
        layout = self.layout
        return 4.0 * layout.heads * layout.head_k_dim * layout.head_v_dim

    def state_numbers(self) -> int:
        """Numbers of the recurrent state of one sequence (without the convolution's inputs)."""
        layout = self.layout
        return layout.heads * layout.head_k_dim * layout.head_v_dim

    def problem(self) -> str | None:
        """What is wrong with the settings, as 'SETTING VALUE ...; fix', or None."""
        return None


def wide(x: Tensor) -> Tensor:
    """x in fp32, or in fp64 if it is: gates are made in this precision."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
