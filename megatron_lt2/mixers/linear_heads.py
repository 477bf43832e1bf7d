"""A linear mixer over context-parallel ranks by heads instead of by passing states.

Heads are independent, so an all-to-all can give each rank all tokens of some heads: convolution and
recurrence run there as on one rank, and a second all-to-all brings every token's output back. What
looks at one token only (projections, ways up, norm, output gate) stays where the token is. Any
kernel will do, and no state map is needed; but the volume grows with the tokens, and the ranks have
to divide the heads of a tensor-parallel rank.

Sections that all heads share travel to every rank, in the same message.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.parallel.collectives import all_to_all
from megatron_lt2.parallel.sequence import SequenceShard
from megatron_lt2.recurrent.base import Scan

if TYPE_CHECKING:
    from megatron_lt2.mixers.linear import LinearMixer


def check_heads(heads: int, ranks: int) -> None:
    """Refuse heads that the context-parallel ranks cannot share.

    Args:
        heads: of a tensor-parallel rank.
        ranks: context-parallel ones.

    Raises:
        ValueError: the ranks do not divide them.
    """
    if heads % ranks:
        raise ValueError(
            f"parallel.context_exchange 'heads' cannot spread the {heads} heads that a "
            f"tensor-parallel rank has of a linear mixer over {ranks} context-parallel ranks; use "
            "'state' or a divisor"
        )


def mix_by_heads(
    mixer: "LinearMixer", projected: dict[str, Tensor], shard: SequenceShard
) -> tuple[Tensor, Tensor | None]:
    """The output of the recurrence for this rank's tokens, and the gate on it.

    Args:
        mixer: the layer.
        projected: its sections as the fused projection gives them, [B, T, rows of this rank].
        shard: where this rank's T tokens lie.

    Returns:
        [B, T, H, V] both, H the tensor-parallel rank's heads.
    """
    layout, group = mixer.layout, mixer.pg_collection.cp
    sections = dict(projected)
    # Ways up while each rank has its own tokens: afterwards every rank would need all of them.
    low_rank = mixer.gather_sections({name: sections[name] for name in layout.low_rank_names})
    for name, narrow in low_rank.items():
        sections[name] = mixer.up[name](narrow)
    gate = None if layout.gate is None else sections.pop(layout.gate)
    whole = _exchanged(sections, _shared(mixer), group)
    _convolve(mixer, whole, shard)
    whole.update(mixer.gather_sections({name: whole[name] for name in _shared(mixer)}))
    heads = mixer.heads // group.size()
    first = mixer.pg_collection.tp.rank() * mixer.heads + group.rank() * heads
    scan = Scan(mixer.kernels, slice(first, first + heads), shard.bounds)
    parts = {
        name: x if layout.sections[name].shared else x.unflatten(-1, (heads, -1))
        for name, x in whole.items()
    }
    own = {name: _of_rank(getattr(mixer, name), group) for name in layout.weights}
    mixed, _ = mixer.recurrent.mix(parts, own, scan)
    mixed = all_to_all(mixed, group, split_dim=1, join_dim=2)
    return mixed, None if gate is None else gate.unflatten(-1, (mixer.heads, -1))


def _shared(mixer: "LinearMixer") -> tuple[str, ...]:
    """Sections of which every rank needs all, before they are gathered over tensor ranks."""
    layout = mixer.layout
    return tuple(name for name in layout.gathered_names if name not in layout.low_rank_names)


def _exchanged(
    sections: dict[str, Tensor], shared: tuple[str, ...], group: Any
) -> dict[str, Tensor]:
    """[B, T, channels of all heads] -> [B, P T, channels of this rank's heads], in one message."""
    ranks = group.size()
    leaving = [
        x.unsqueeze(2).expand(-1, -1, ranks, -1) if name in shared else x.unflatten(-1, (ranks, -1))
        for name, x in sections.items()
    ]
    arrived = all_to_all(torch.cat(leaving, dim=-1), group, split_dim=2, join_dim=1).squeeze(2)
    sizes = [x.shape[-1] for x in leaving]
    return dict(zip(sections, arrived.split(sizes, dim=-1), strict=True))


def _convolve(mixer: "LinearMixer", whole: dict[str, Tensor], shard: SequenceShard) -> None:
    """Replace the sections with a convolution by its outputs."""
    conv, names = mixer.conv1d, mixer.layout.conv_names
    if conv is None:
        return
    rows = [mixer.layout.rows(name) // mixer.tp_size for name in names]
    shared = _shared(mixer)

    def of_these_heads(parameter: Tensor) -> Tensor:
        group = mixer.pg_collection.cp
        parts = zip(names, parameter.split(rows), strict=True)
        return torch.cat([p if name in shared else _of_rank(p, group) for name, p in parts])

    # They come first in the message and so lie side by side: one convolution for all of them.
    joined = torch.cat([whole[name] for name in names], dim=-1)
    out, _ = causal_conv1d(
        joined,
        of_these_heads(conv.weight),
        bias_D=None if conv.bias is None else of_these_heads(conv.bias),
        activation="silu",
        cu_seqlens=shard.bounds,
        backend=mixer.kernels,
    )
    whole.update(zip(names, out.split([whole[name].shape[-1] for name in names], -1), strict=True))


def _of_rank(x: Tensor, group: Any) -> Tensor:
    """The context-parallel rank's share of what is stacked by heads along the first axis."""
    return x.chunk(group.size())[group.rank()]
