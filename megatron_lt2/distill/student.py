"""A student's first weights: the teacher's, with its attention made into linear mixers.

Norms, SwiGLUs, embedding and head are the teacher's. Of its attention a mixer takes the maps for
queries, keys, values and output: keys and values are repeated for the query heads that share them
(grouped queries). So it needs the teacher's heads and channels a head, and what does not fit is
refused. Ranks hold the same heads of both, so each copies what it has.

What a mixer has beside these starts where the first outputs are not far off:

- convolutions: the token's own value times `TAP`, so small that the SiLU behind it is nearly
  linear. Queries and keys are scaled to length 1 after that, and values by the output's norm;
- decays: slow, between ten and a thousand tokens, and the same for all inputs; writing strengths
  one half, the same for all inputs;
- output gates and the scale of the output are set from a batch (`calibrate.py`).
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.recurrent.base import Layout

TAP = 0.25
OUTPUT_GATES = ("gate",)
SOURCES = {"q": "q", "k": "k", "v": "v", "C": "q", "B": "k", "x": "v"}
"""What a section of a mixer starts from: the teacher's queries, keys or values."""

MASKED = ("full", "window")
"""Mixers with the teacher's own weights."""


def teacher_layers(layer: int, layers: int, teacher_layers: int, grouping: str) -> list[int]:
    """Layers of the teacher that the student's physical layer starts from.

    Pass p of a model, loop * layers + layer, is compared with the other model's pass p; so with
    fewer physical layers than the teacher, layer i stands for i, i + layers, i + 2 layers, ...
    """
    group = range(layer, teacher_layers, layers)
    return list(group) if grouping == "mean" else [layer]


@torch.no_grad()
def copy_teacher(student: Any, teacher: Any, mixers: list[str], grouping: str = "first") -> None:
    """Fill `student` (LT2Model of this rank) from `teacher` in place.

    Args:
        mixers: of the student's layers.
        grouping: see `StudentSettings`.

    Raises:
        ConfigError: a mixer has other heads or channels than the teacher's attention.
    """
    source = dict(teacher.named_parameters())
    layers, available = len(student.decoder.layers), len(teacher.decoder.layers)
    for name, parameter in student.named_parameters():
        head, marker, tail = name.partition("decoder.layers.")
        if not marker:
            if name in source:
                parameter.copy_(source[name])
            continue
        number, _, rest = tail.partition(".")
        layer = int(number)
        if rest.startswith("self_attention.") and mixers[layer] not in MASKED:
            continue
        parameter.copy_(
            _mean(
                source[f"{head}{marker}{i}.{rest}"]
                for i in teacher_layers(layer, layers, available, grouping)
            )
        )
    for layer, name in enumerate(mixers):
        if name in MASKED:
            continue
        donors = [
            teacher.decoder.layers[i].self_attention
            for i in teacher_layers(layer, layers, available, grouping)
        ]
        fill_mixer(student.decoder.layers[layer].self_attention, donors, name)


@torch.no_grad()
def fill_mixer(mixer: Any, donors: list[Any], name: str) -> None:
    """Start a linear mixer (LinearMixer) from attention layers, whose mean is taken.

    Raises:
        ConfigError: other heads or channels.
    """
    layout: Layout = mixer.layout
    config = donors[0].config
    heads, dim = config.num_attention_heads, config.kv_channels
    if (layout.heads, layout.head_k_dim, layout.head_v_dim) != (heads, dim, dim):
        raise ConfigError(
            f"model.{name} has {layout.heads} heads of {layout.head_k_dim} key and "
            f"{layout.head_v_dim} value channels, the teacher's attention {heads} of {dim}; its "
            "weights are copied head by head, so leave the sizes out"
        )
    maps = [attention_maps(donor) for donor in donors]
    start = 0
    for section in layout.sections:
        rows = layout.rows(section) // mixer.tp_size
        part = mixer.in_proj.weight[start : start + rows]
        start += rows
        if section in SOURCES:
            given = _mean(each[SOURCES[section]] for each in maps)
            if given.shape != part.shape:
                raise ConfigError(
                    f"model.{name}: {section} has {rows} channels a rank for all heads, the "
                    f"teacher {given.shape[0]}; set model.{name}.groups to the heads, {heads}"
                )
            part.copy_(given)
        elif section in OUTPUT_GATES:
            part.mul_(0.1)
        elif section != "forget" or layout.sections[section].channels == 1:
            part.zero_()  # decays and writing strengths do not depend on the input at first
    mixer.out_proj.weight.copy_(_mean(donor.linear_proj.weight for donor in donors))
    if mixer.conv1d is not None:
        mixer.conv1d.weight.zero_()
        mixer.conv1d.weight[:, -1] = TAP
        if mixer.conv1d.bias is not None:
            mixer.conv1d.bias.zero_()
    for section, up in mixer.up.items():
        if section not in OUTPUT_GATES:
            # The bottleneck's way down is zero: its way up must not be, or nothing is learned.
            continue
        up.weight.mul_(0.1)
        if up.bias is not None:
            up.bias.fill_(2.0)  # of a sigmoid: 0.88
    _fill_own(mixer)


def _fill_own(mixer: Any) -> None:
    """Parameters of the mixer's own: decays that forget slowly."""
    own = dict(mixer.named_parameters(recurse=False))
    if "A_log" in own:
        own["A_log"].zero_()
    if "decay_bias" in own:
        own["decay_bias"].fill_(3.0)
    if "input_bias" in own:
        own["input_bias"].zero_()
    if "D" in own:
        own["D"].zero_()


def attention_maps(attention: Any) -> dict[str, Tensor]:
    """The rows for q, k and v of this rank's heads, each [heads * channels, d], keys and values
    repeated for the heads that share them."""
    config, dim = attention.config, attention.config.kv_channels
    share = config.num_attention_heads // config.num_query_groups
    weight = attention.linear_qkv.weight
    gates = share if config.attention_output_gate else 0
    blocks = weight.view(-1, share + gates + 2, dim, weight.shape[-1])
    queries, keys, values = blocks[:, :share], blocks[:, -2], blocks[:, -1]

    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(share, 0).flatten(0, 1)

    return {"q": queries.flatten(0, 2), "k": repeated(keys), "v": repeated(values)}


def _mean(tensors: Iterable[Tensor]) -> Tensor:
    given = list(tensors)
    if len(given) == 1:
        return given[0]
    return torch.stack([x.float() for x in given]).mean(0).to(given[0].dtype)
