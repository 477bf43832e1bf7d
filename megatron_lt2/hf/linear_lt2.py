"""Every linear mixer as a layer for transformers: projections, convolution, recurrence, norm.

What a mixer is stands in its own file of `recurrent`, which training uses too; here are the weights
under the names of a Hugging Face model, the cache, and padding.

Padding is exact, not approximate. At padded positions the layer's input is zero, so the convolution
finds what it finds before a sequence starts: its sections are projected without a bias, and its own
bias comes after the taps. What such a bias puts into keys and gates there has no effect, because
the recurrence leaves its state alone at positions that `Scan.real` calls padding.

Shapes: B batch, T new tokens, H heads, d width of the stream.
"""

import functools
import importlib
import importlib.util
import warnings
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from ..kernels.backend import check_fla_installed
from ..kernels.conv import causal_conv1d
from ..kernels.norms import gated_rms_norm, rms_norm
from ..recurrent.base import Layout, RecurrentMixer, Scan
from ..recurrent.names import recurrent_mixer
from .cache_lt2 import LinearSlot
from .configuration_lt2 import LT2Config
from .masks_lt2 import Tokens

FLA_MAX_KEY_DIM = 256


def describe_mixer(config: LT2Config, name: str, layer_index: int) -> RecurrentMixer:
    """The linear mixer `name` of one layer, without weights.

    Raises:
        ValueError: its settings are incomplete or do not fit together.
    """
    settings = SimpleNamespace(**config.mixer_settings[name])
    depth = (layer_index + 1) / config.num_hidden_layers
    try:
        mixer = recurrent_mixer(name)(settings, depth=depth)
        problem = mixer.problem()
    except AttributeError as error:
        if error.obj is not settings:
            raise
        raise ValueError(f"mixer_settings[{name!r}] lacks {error.name!r}") from None
    if problem is not None:
        raise ValueError(f"mixer_settings[{name!r}]: {problem}")
    return mixer


@functools.cache
def _fla_works() -> bool:
    """Whether FLA's kernels can be called; said once if FLA is there but does not work."""
    if importlib.util.find_spec("fla") is None:
        return False
    try:
        check_fla_installed()
        importlib.import_module("fla.ops")
    except Exception as error:  # a Triton that does not fit fails in many ways
        warnings.warn(f"fla cannot be used ({error}); falling back to plain PyTorch", stacklevel=2)
        return False
    return True


def choose_backend(x: Tensor, layout: Layout) -> str:
    """Which kernels serve a mixer: "fla" for 16 bit on a CUDA device, else "torch".

    32-bit tensors stay on the plain form because FLA's kernels may round their products to TF32.
    """
    sizes = (layout.head_k_dim, layout.head_v_dim)
    served = layout.head_k_dim <= FLA_MAX_KEY_DIM and all(size % 2 == 0 for size in sizes)
    low = x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
    return "fla" if low and served and _fla_works() else "torch"


class LT2ShortConv(nn.Module):
    """Taps of a depthwise causal convolution, [channels, 1, taps] as torch's Conv1d holds them."""

    def __init__(self, channels: int, taps: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None


class LT2OutputNorm(nn.Module):
    """Weight of the RMS norm on the output of a recurrence."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))


class LT2LinearMixer(nn.Module):
    """A linear mixer.

    Args:
        config: of the model.
        mixer_name: which one.
        layer_index: of the layer, from 0.

    Raises:
        ValueError: its settings are incomplete or do not fit together.
    """

    def __init__(self, config: LT2Config, mixer_name: str, layer_index: int) -> None:
        super().__init__()
        self.recurrent = describe_mixer(config, mixer_name, layer_index)
        self.layout = layout = self.recurrent.layout
        width = config.hidden_size
        for name, section in layout.sections.items():
            rows = layout.rows(name)
            if section.rank is None:
                self.add_module(f"{name}_proj", nn.Linear(width, rows, bias=False))
            else:
                up = nn.Linear(rows, layout.width(name), bias=section.bias)
                self.add_module(f"{name}_down", nn.Linear(width, rows, bias=False))
                self.add_module(f"{name}_up", up)
            if section.conv:
                conv = LT2ShortConv(rows, layout.conv_size, layout.conv_bias)
                self.add_module(f"{name}_conv1d", conv)
        # Decays are exponentials of these; 16 bits would change them visibly over long texts.
        for name, weight in layout.weights.items():
            values = torch.empty(weight.channels * layout.heads, dtype=torch.float32)
            self.register_parameter(name, nn.Parameter(values))
        self.o_norm = LT2OutputNorm(layout.norm_channels)
        self.o_proj = nn.Linear(layout.heads * layout.head_v_dim, width, bias=False)

    def forward(
        self, x_BTd: Tensor, tokens: Tokens, slot: LinearSlot | None, loop: int = 0
    ) -> Tensor:
        """[B, T, d] -> [B, T, d]; what `slot` holds is replaced by what it is after these.

        Every loop is the same to a recurrence.
        """
        layout = self.layout
        if tokens.real is not None:
            x_BTd = x_BTd * tokens.real[..., None].to(x_BTd.dtype)
        parts = {
            name: self.get_submodule(f"{name}_proj" if section.rank is None else f"{name}_down")(
                x_BTd
            )
            for name, section in layout.sections.items()
        }
        backend = choose_backend(next(iter(parts.values())), layout)
        conv_state = self._convolve(parts, slot, backend)
        for name in layout.low_rank_names:
            parts[name] = self.get_submodule(f"{name}_up")(parts[name])
        for name, section in layout.sections.items():
            if not section.shared:
                parts[name] = parts[name].unflatten(-1, (layout.heads, -1))
        scan = Scan(
            backend,
            slice(0, layout.heads),
            positions=tokens.positions,
            real=tokens.real,
            state=None if slot is None else slot.state,
            keep_state=slot is not None,
        )
        own: dict[str, Tensor] = {name: self.get_parameter(name) for name in layout.weights}
        out, state = self.recurrent.mix(parts, own, scan)
        if slot is not None:
            assert state is not None
            slot.update(conv_state, state, x_BTd.shape[1])
        gate = None if layout.gate is None else parts[layout.gate]
        return self.o_proj(self._norm(out, gate, backend))

    def _convolve(
        self, parts: dict[str, Tensor], slot: LinearSlot | None, backend: str
    ) -> Tensor | None:
        """Convolve the sections that want it in one call, in place of `parts`; the new state."""
        names = self.layout.conv_names
        if not names:
            return None

        def joined(kind: str) -> Tensor:
            return torch.cat([self.get_parameter(f"{name}_conv1d.{kind}") for name in names])

        y, state = causal_conv1d(
            torch.cat([parts[name] for name in names], dim=-1),
            joined("weight").squeeze(1),
            bias_D=joined("bias") if self.layout.conv_bias else None,
            activation="silu",
            initial_state_NDW=None if slot is None else slot.conv_state,
            output_final_state=slot is not None,
            backend=backend,
        )
        widths = [parts[name].shape[-1] for name in names]
        parts.update(zip(names, y.split(widths, dim=-1), strict=True))
        return state

    def _norm(self, x: Tensor, gate: Tensor | None, backend: str) -> Tensor:
        """Norm and gate of [B, T, H, V]; [B, T, H * V]."""
        layout, weight = self.layout, self.o_norm.weight
        if layout.norm == "layer":
            x = x.flatten(2)
            gate = None if gate is None else gate.flatten(2)
        if gate is None:
            return rms_norm(x, weight, layout.norm_eps, backend=backend).flatten(2)
        return gated_rms_norm(
            x,
            gate,
            weight,
            layout.norm_eps,
            activation=layout.gate_activation,
            gate_first=layout.gate_first,
            backend=backend,
        ).flatten(2)
