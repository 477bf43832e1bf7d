"""What one layer keeps for its backward pass, in bytes a token, counted from the code.

A layer keeps its norms' inputs, every matrix product's input, the convolution's input, what the
kernel of the recurrence or attention saves, the gate, the input of the norm behind it, and input
and output of the SwiGLU. Kernels that make a value again in their backward pass (RMS norm,
convolution, SwiGLU, FLA's states between chunks) keep nothing of it. The counts are those of the
GPU path: FLA's kernels, fused RMS norm, compiled output gate.

The convolution writes each of its sections as a tensor of its own, and every other wide section is
a matrix product of its own (mixers/linear.py), so nothing is copied for a kernel. What a section
makes of it, as the convolution does, may be given back and made again (`Share.cheap`).

`tests/slow/test_kept.py` compares these counts with what real layers keep.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from functools import cache
from typing import Any

from megatron_lt2.config.mixers import SPARSE
from megatron_lt2.config.schema import ModelConfig, RunConfig
from megatron_lt2.mixers.registry import RECURRENT, recurrent_mixer
from megatron_lt2.ops.sparse_layout import (
    indexer_rows,
    key_channels,
    output_width,
    sections,
)
from megatron_lt2.recurrent.base import Layout, RecurrentMixer

FLOAT = 4
"""Bytes of fp32."""

CHUNK = 64
"""Tokens a chunk of FLA's kernels: a token's row of the matrix inside its chunk is so long."""

FLA_FEATURE_MAPS = ("elu1", "silu", "identity")
"""Feature maps of `linear` that keep nothing in fp32."""


@dataclass(frozen=True)
class Share:
    """What one rank holds of a micro-batch.

    tokens: of all rows, on this rank.
    rows: sequences that a recurrence has a state of (1 for a packed row).
    tensor, sequence, context: the parallel sizes, as in the config.
    by_heads: linear mixers exchange heads over the context ranks.
    cheap: what costs little time is made again.
    size: bytes of an activation.
    packed: documents are packed in one row.
    """

    tokens: float
    rows: int = 1
    tensor: int = 1
    sequence: bool = False
    context: int = 1
    size: int = 2
    packed: bool = True
    by_heads: bool = False
    cheap: bool = False

    @classmethod
    def of(cls, config: RunConfig, size: int) -> "Share":
        """The share of a rank of this run."""
        parallel, rows = config.parallel, config.training.micro_batch_size
        packed = config.data.isolate_documents
        return cls(
            tokens=rows * config.data.sequence_length / parallel.context,
            rows=1 if packed else rows,
            tensor=parallel.tensor,
            sequence=parallel.sequence,
            context=parallel.context,
            size=size,
            packed=packed,
            by_heads=parallel.context > 1 and parallel.context_exchange == "heads",
            cheap=config.memory.recompute_cheap,
        )

    @property
    def spread(self) -> int:
        """Ranks over which sequence parallelism spreads the tokens between layers."""
        return self.tensor if self.sequence else 1


@dataclass(frozen=True)
class Kept:
    """What a recurrence keeps of a token.

    new: bytes of tensors of its own.
    copies: sections that its kernels keep, contiguous and a head each.
    views: sections of which plain torch keeps what the projection gave.
    """

    new: float
    copies: Set[str] = frozenset()
    views: Set[str] = frozenset()


def linear_mixer(name: str, model: ModelConfig) -> RecurrentMixer:
    """The linear mixer `name` of a model; made once, for a search asks for it very often."""
    settings = getattr(model, name)
    kind: Any = type(settings)
    values = tuple(vars(settings).items())
    return _linear_mixer(name, kind, values, model.hidden_size, model.num_heads)


@cache
def _linear_mixer(
    name: str, settings: Any, values: tuple[tuple[str, Any], ...], width: int, heads: int
) -> RecurrentMixer:
    return recurrent_mixer(name)(settings(**dict(values)).resolve(width, heads))


def residual_bytes(model: ModelConfig, share: Share) -> float:
    """A token of the residual stream."""
    return model.hidden_size * share.size / share.spread


def layer_bytes(name: str, model: ModelConfig, share: Share) -> float:
    """Kept for the backward pass by one pass of a whole layer with mixer `name`, a token."""
    # Input of both norms, their outputs unless they are made again, and 1 / root mean square.
    norms = (2 if share.cheap else 4) * residual_bytes(model, share) + 2 * FLOAT / share.spread
    if model.norm_mode == "sandwich":  # what is added next keeps nothing, so input only
        norms += 2 * residual_bytes(model, share) + 2 * FLOAT / share.spread
    # Both halves of the SwiGLU's input; its output is always made again.
    ffn = 2 * model.ffn_width * share.size / share.tensor
    return norms + mixer_bytes(name, model, share) + ffn


def mixer_bytes(name: str, model: ModelConfig, share: Share) -> float:
    """Kept by the mixer alone; its input is counted in `layer_bytes`."""
    if name in RECURRENT:
        return _linear_bytes(name, model, share)
    if name in SPARSE:
        return _sparse_bytes(name, model, share)
    return _attention_bytes(name, model, share)


def exchanges_heads(model: ModelConfig, tensor: int, context: int) -> bool:
    """Whether the ranks divide attention's heads, so that full attention's all-to-all serves."""
    ways = tensor * context
    return model.num_heads % ways == 0 and model.kv_heads % ways == 0


def _attention_bytes(name: str, model: ModelConfig, share: Share) -> float:
    size = share.size
    channels = model.attention_head_dim
    q = model.num_heads / share.tensor * channels * size
    kv = model.kv_heads / share.tensor * channels * size
    gated = model.attention.output_gate
    fused = q * (2 if gated else 1) + 2 * kv
    # Rotated q and k, output, log-sum-exp a head; cos and sin for each of q and k.
    kernel = q + kv + q + model.num_heads / share.tensor * FLOAT
    tables = 4 * channels * size
    exchanged = earlier = 0.0
    if share.context > 1 and name == "full" and exchanges_heads(model, share.tensor, share.context):
        exchanged = kv + q  # a copy of the values, and the output by heads
    elif share.context > 1:  # keys and values of earlier ranks, as the last rank has them
        earlier = share.context - 1.0
        if name == "window":
            earlier = min(earlier, (model.window.size - 1) / share.tokens)
        exchanged = kv + 2 * kv * earlier
    if share.packed and model.kv_heads < model.num_heads:
        # Keys and values are repeated for the kernel; the fused product is kept for the gate only.
        kernel += 2 * q * (1 + earlier) - kv
        exchanged = 0 if earlier else exchanged
        fused = fused if gated else 0
    return fused + kernel + tables + exchanged + (q if gated else 0)


def _sparse_bytes(name: str, model: ModelConfig, share: Share) -> float:
    """Of `nsa` and `dsa` on plain torch: projections, rotated q and k, and what the branches save.

    Under context parallelism the last rank also holds the keys of all others.
    """
    s, size = model.mixer_settings(name), share.size
    rows = {part: r / share.tensor * size for part, r in sections(name, s).items()}
    keys = key_channels(name, s) * size  # of a head
    queries = s.num_heads / share.tensor * keys
    out = output_width(name, s) / share.tensor * size
    earlier = share.context - 1.0
    if name == "nsa":
        kv = 2 * s.num_kv_heads / share.tensor * keys
        # Gates before and after the sigmoid; three outputs and their sum.
        gates = 3 * s.num_heads / share.tensor * (size + FLOAT)
        return sum(rows.values()) + queries + kv * (1 + earlier) + 4 * out + gates
    shared = s.kv == "shared"
    kv = keys + s.latent_dim * size if shared else 2 * s.num_kv_heads / share.tensor * keys
    if shared and share.tensor > 1:
        rows["kv"] = keys  # gathered
    # All ranks hold the whole indexer: its projections, rotated, and their gradients, which are
    # made with the loss; and the places of the selected keys.
    indexer = 3 * sum(indexer_rows(s).values()) * size + s.index_dim * size * earlier
    indexer += s.top_k * FLOAT + (model.hidden_size * size if share.sequence else 0)
    return sum(rows.values()) + queries + kv * (1 + earlier) + 2 * out + indexer


def _linear_bytes(name: str, model: ModelConfig, share: Share) -> float:
    mixer = linear_mixer(name, model)
    settings, layout = mixer.settings, mixer.layout
    size, ranks = share.size, share.tensor
    kept = _RECURRENCES.get(name, _unknown)(layout, settings, share)
    copies, views = set(kept.copies), set(kept.views)
    if share.cheap and not share.by_heads:  # the convolution's outputs are made again
        convolved = set(layout.conv_names)
        if share.context > 1 and TRANSITIONS.get(name, "matrix") == "matrix":
            convolved.discard("v")  # kept with more columns, not as the convolution gave it
        if ranks > 1:  # gathered, and so copied
            convolved -= set(layout.gathered_names)
        copies, views = copies - convolved, views - convolved
    total = kept.new + sum(map(layout.rows, layout.conv_names)) / ranks * size
    if ranks == 1:
        views |= set(layout.low_rank_names)
    else:
        total += sum(map(layout.rows, layout.low_rank_names)) * size
    value = layout.heads * layout.head_v_dim / ranks
    across = layout.norm == "layer" and ranks > 1
    if across or not share.cheap:
        total += value * size  # input of the output projection
    if across:
        # mixers/linear.py computes this one in fp32, step by step.
        total += (5 if layout.gate else 2) * value * FLOAT
    else:
        total += value * size + (1 if layout.norm == "layer" else layout.heads / ranks) * FLOAT
        if layout.gate:
            copies.add(layout.gate)
    if share.context > 1:
        total += _context_bytes(name, layout, share)
    return total + _sections_bytes(layout, copies, views, share)


def _sections_bytes(layout: Layout, copies: Set[str], views: Set[str], share: Share) -> float:
    """Sections that are kept."""

    def width(name: str) -> float:
        section = layout.sections[name]
        rows = layout.rows(name) if name in views else layout.width(name)
        whole = section.shared and name not in views
        return rows if whole else rows / share.tensor

    # A bottleneck's way up gives a tensor of its own.
    made = {name for name in copies if layout.sections[name].rank is not None}
    kept = sum(map(width, (copies | views) - made))
    kept += sum(layout.width(n) / share.tensor for n in made)
    return kept * share.size


def _sizes(layout: Layout, share: Share) -> tuple[float, float, float]:
    """Heads of a rank, and their key and value channels."""
    heads = layout.heads / share.tensor
    return heads, heads * layout.head_k_dim, heads * layout.head_v_dim


def _gdn(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, _, _ = _sizes(layout, share)
    size = share.size
    # Summed decay and beta in fp32; both raw gates; A.
    gates = heads * (2 * FLOAT + 2 * size)
    return Kept(gates + heads * CHUNK * size, copies={"q", "k", "v"})


def _kda(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, _ = _sizes(layout, share)
    size = share.size
    # As above, but the raw decay has K channels and is summed again, and there are two matrices.
    gates = heads * (FLOAT + size)
    return Kept(keys * size + gates + 2 * heads * CHUNK * size, copies={"q", "k", "v"})


def _deltanet(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, _, _ = _sizes(layout, share)
    return Kept(heads * (FLOAT + CHUNK * share.size), copies={"q", "k", "v"})


def _mamba2(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, _ = _sizes(layout, share)
    # C and dt B written out a head; dt before and after softplus; summed decay.
    new = 2 * keys * share.size + 3 * heads * FLOAT
    if share.tensor > 1:  # B, gathered, of this rank's groups
        new += layout.width("B") / (share.tensor if settings.groups > 1 else 1) * share.size
    else:
        return Kept(new, copies={"x"}, views={"x", "B"})
    return Kept(new, copies={"x"}, views={"x"})


def _retnet(layout: Layout, settings: Any, share: Share) -> Kept:
    _, keys, _ = _sizes(layout, share)
    return Kept(2 * keys * share.size, copies={"v"})


def _gla(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, _ = _sizes(layout, share)
    # Gate before its activation and summed decay, both fp32; FLA keeps this A in fp32 too.
    return Kept(2 * keys * FLOAT + heads * CHUNK * FLOAT, copies={"q", "k", "v"})


def _linear(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, values = _sizes(layout, share)
    new = 2 * keys * share.size
    if settings.feature_map not in FLA_FEATURE_MAPS:
        new += 2 * keys * FLOAT
    if not settings.normalize:
        return Kept(new, copies={"v"}, views={"q", "k"})
    columns = values + heads * _more_columns(layout)
    new += columns * (share.size + FLOAT) + heads * FLOAT
    return Kept(new, views={"q", "k"})


def _mlstm(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, values = _sizes(layout, share)
    columns = values + heads * _more_columns(layout)
    # Keys times their gain, values with more columns, the numerator in fp32, gates and stabilisers.
    new = keys * share.size + columns * share.size + values * FLOAT + 9 * heads * FLOAT
    return Kept(new, copies={"q"}, views={"k"})


def _hgrn2(layout: Layout, settings: Any, share: Share) -> Kept:
    heads, keys, _ = _sizes(layout, share)
    # silu(q) and the key; gate and summed decay in fp32; A.
    new = 2 * keys * share.size + 2 * keys * FLOAT + heads * CHUNK * FLOAT
    if settings.lower_bound > 0:
        new += keys * (share.size + FLOAT)
    return Kept(new, copies={"v"}, views={"q"})


def _unknown(layout: Layout, settings: Any, share: Share) -> Kept:
    """A mixer without an entry: every section, and a decay a channel."""
    heads, keys, _ = _sizes(layout, share)
    plain = {n for n, s in layout.sections.items() if s.rank is None and not s.shared}
    return Kept(2 * keys * (share.size + FLOAT) + heads * CHUNK * FLOAT, copies=plain)


_RECURRENCES: dict[str, Callable[[Layout, Any, Share], Kept]] = {
    "gdn": _gdn,
    "kda": _kda,
    "deltanet": _deltanet,
    "mamba2": _mamba2,
    "retnet": _retnet,
    "gla": _gla,
    "linear": _linear,
    "mlstm": _mlstm,
    "hgrn2": _hgrn2,
}


def _more_columns(layout: Layout) -> int:
    """Columns behind the values, as kernels/mlstm.py fills them up."""
    return 8 - layout.head_v_dim % 8


TRANSITIONS = {
    **dict.fromkeys(("gdn", "kda", "deltanet"), "matrix"),
    **dict.fromkeys(("gla", "hgrn2"), "channel"),
    **dict.fromkeys(("mamba2", "retnet", "mlstm", "linear"), "head"),
}
"""What a recurrence multiplies its state by: a K x K matrix a head, or a number a channel or head.
A mixer that is not named is taken to have a matrix."""


def state_map_bytes(name: str, model: ModelConfig, share: Share) -> float:
    """fp32 bytes of one rank's state map of all its heads, a row (recurrent/state_maps.py)."""
    mixer = linear_mixer(name, model)
    layout = mixer.layout
    heads, k = layout.heads / share.tensor, layout.head_k_dim
    kind = TRANSITIONS.get(name, "matrix")
    transition = {"matrix": k * k, "channel": k, "head": 1}[kind]
    return (mixer.state_numbers() / share.tensor + heads * transition) * FLOAT


def _context_bytes(name: str, layout: Layout, share: Share) -> float:
    """More that a token keeps when earlier tokens lie on other ranks (recurrent/shards.py)."""
    if share.by_heads:  # every rank convolves what all heads share, of the whole sequence
        shared = sum(layout.rows(n) for n, s in layout.sections.items() if s.shared)
        return 2 * (share.context - 1) * shared / share.tensor * share.size
    heads, keys, values = _sizes(layout, share)
    kind = TRANSITIONS.get(name, "matrix")
    if kind == "matrix":  # K more value columns, and the output that carries the queries
        return (2 * keys + values) * share.size
    # The query in fp32 and rounded, and the decay since the rank's first token.
    return keys * (FLOAT + share.size) + (keys if kind == "channel" else heads) * FLOAT
