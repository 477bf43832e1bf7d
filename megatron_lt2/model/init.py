"""Initial weights, the same on any number of ranks.

Every parameter is drawn at its *global* shape from a generator seeded by its name and the run's
seed, then cut to the shard that this rank holds. LT2's rule (after Meta Lingua): truncated normal
with standard deviation 1/sqrt(input width), cut at three standard deviations; norms 1; what differs
is declared by the mixers (mixers/parameters.py).
"""

import hashlib

import torch
from torch import Tensor, nn

from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.mixers.parameters import Shards
from megatron_lt2.model.lt2_model import LT2Model
from megatron_lt2.recurrent.initial import truncated_normal


@torch.no_grad()
def initialise(model: LT2Model, config: ModelConfig, seed: int) -> None:
    """Fill every parameter of `model` in place.

    Raises:
        ValueError: a parameter has neither a declared initialiser nor two axes.
    """
    group = model.pg_collection.tp
    names = global_names(model)
    for local_name, parameter in model.named_parameters():
        name = names[local_name]
        full = _global_values(name, parameter, config, seed, group.size())
        if "word_embeddings" in name or "output_layer" in name:
            full = _pad_rows(full, parameter.shape[0] * group.size())
            local = full.chunk(group.size())[group.rank()]
        else:
            local = shards_of(name, parameter, group.size(), config).cut(full, group.rank())
        parameter.copy_(local)


class _Cut:
    """How a parameter of this model is cut: by declared sections, along one axis, or not at all."""

    def __init__(self, sections: Shards | None, axis: int | None, world: int) -> None:
        self.sections, self.axis, self.world = sections, axis, world

    def cut(self, full: Tensor, rank: int) -> Tensor:
        if self.axis is None or self.world == 1:
            return full
        if self.sections is not None:
            return self.sections.local(full, rank, self.world)
        return full.chunk(self.world, dim=self.axis)[rank]

    def global_shape(self, local: tuple[int, ...]) -> tuple[int, ...]:
        if self.axis is None:
            return local
        shape = list(local)
        shape[self.axis] *= self.world
        return tuple(shape)


def shards_of(name: str, parameter: nn.Parameter, world: int, config: ModelConfig) -> _Cut:
    """The tensor-parallel cut of a parameter; linear_fc1 stacks [gate | up] on every rank."""
    sections = getattr(parameter, "lt2_shards", None)
    if sections is None and name.endswith("mlp.linear_fc1.weight"):
        sections = Shards((config.ffn_width, config.ffn_width))
    parallel = getattr(parameter, "tensor_model_parallel", False)
    axis = getattr(parameter, "partition_dim", 0) if parallel else None
    return _Cut(sections, axis, world)


def _global_values(
    name: str, parameter: nn.Parameter, config: ModelConfig, seed: int, world: int
) -> Tensor:
    device = parameter.device
    generator = torch.Generator(device=device)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    shape = shards_of(name, parameter, world, config).global_shape(tuple(parameter.shape))
    declared = getattr(parameter, "lt2_init", None)
    if declared is not None:
        return declared(shape, generator)
    if parameter.dim() != 2:
        raise ValueError(f"parameter {name} of shape {shape} declares no initialiser")
    if "word_embeddings" in name or "output_layer" in name:
        assert config.vocab_size is not None
        shape = (config.vocab_size, shape[1])
    std = config.init.std or shape[1] ** -0.5
    return truncated_normal(std, config.init.cutoff)(shape, generator)


def _pad_rows(rows: Tensor, total: int) -> Tensor:
    return torch.cat([rows, rows.new_zeros(total - rows.shape[0], rows.shape[1])])


def global_names(model: LT2Model) -> dict[str, str]:
    """The name in the whole model of each parameter of this pipeline stage.

    Layers are counted over all stages, and the last stage's copy of a tied embedding is the
    embedding.
    """
    names = {}
    for name, _ in model.named_parameters():
        head, marker, tail = name.partition("decoder.layers.")
        if marker:
            number, _, rest = tail.partition(".")
            layer = model.decoder.layers[int(number)]
            names[name] = f"{head}{marker}{layer.layer_number - 1}.{rest}"
        elif name == "output_layer.weight" and model.share_embeddings_and_output_weights:
            names[name] = "embedding.word_embeddings.weight"
        else:
            names[name] = name
    return names
