"""Checkpoints that Megatron-LM wrote of a GPT model, in its torch_dist format.

They have the names of megatron-core's GPTModel, as ours do, with two differences: all layers of a
kind lie in one tensor with a leading axis of layers (`decoder.layers.mlp.linear_fc2.weight`),
unless the model was saved as a heterogeneous one; and Transformer Engine's fused layers keep their
norm's weight under a name of their own. What the checkpoint says about its model is a pickled
object of Megatron-LM, which is not opened: the architecture is given, and every shape is checked.
"""

import math
import re
from pathlib import Path
from typing import TYPE_CHECKING

from checkpoints_tools.importing import Scratch, Source
from checkpoints_tools.mappings.base import check_names, is_ignored
from checkpoints_tools.mappings.registry import family_of_run
from checkpoints_tools.plain_checkpoint import PlainCheckpoint
from checkpoints_tools.safetensors_files import Spec

if TYPE_CHECKING:
    from torch import Tensor

FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}
"""Names that Transformer Engine's fused layers have, and ours."""

_LAYER = re.compile(r"decoder\.layers\.(?:(\d+)\.)?(.+)")


def open_megatron(folder: Path, model_file: Path | None) -> Source:
    """The training tensors of a Megatron-LM checkpoint.

    Args:
        folder: its iteration folder, with `.metadata`.
        model_file: YAML file with a `model` section.

    Raises:
        ValueError: no checkpoint, no architecture, or tensors that do not fit it; names them.
    """
    from megatron_lt2.config.load import load_saved

    if not (folder / ".metadata").is_file():
        raise ValueError(
            f"{folder}: neither a config.json (Hugging Face) nor a .metadata (Megatron-LM's "
            "torch_dist format) lies here"
        )
    if model_file is None:
        if not (folder / "run_config.yaml").is_file():
            raise ValueError(
                f"{folder}: a Megatron-LM checkpoint does not say its architecture in a form that "
                "is read here; name a YAML file with a model section by --model"
            )
        raise ValueError(
            f"{folder}: is a checkpoint of this project already; start from it with "
            "checkpoint.init_from"
        )
    config = load_saved(model_file)
    if config.model.vocab_size is None:
        raise ValueError(f"{model_file}: model.vocab_size is not set")
    family = family_of_run(config)
    table = family.table(config.model)
    checkpoint = PlainCheckpoint(folder)
    places = _places(checkpoint, config.model.num_layers)
    try:
        check_names(places, table)
    except ValueError as error:
        text = str(error).replace("its run_config.yaml", model_file.name)
        raise ValueError(f"{folder}: {text}") from None
    for mapping in table:
        name, layer = places[mapping.source]
        shape = checkpoint.shape(name)
        mapping.check_shape(shape if layer is None else shape[1:])

    scratch = Scratch()

    def read(source: str) -> "Tensor":
        mapping, whole = by_name[source], scratch.tensor(specs[source])
        parts = mapping.convert(checkpoint.read(*places[source]))
        for part, place in zip(parts, mapping.places(whole), strict=True):
            place.copy_(part.view(place.shape))
        return whole

    by_name = {mapping.source: mapping for mapping in table}
    specs = {
        mapping.source: Spec(checkpoint.dtype(places[mapping.source][0]), mapping.written_shape())
        for mapping in table
    }
    parameters = sum(math.prod(s) for mapping in table for s in mapping.target_shapes())
    facts = {"from": folder.absolute().name, "family": "megatron-lm"}
    return Source(config, family.name, specs, read, parameters, facts)


def _places(checkpoint: PlainCheckpoint, layers: int) -> dict[str, tuple[str, int | None]]:
    """Where each of our tensors lies: name in the checkpoint, and the layer of a stacked one.

    Raises:
        ValueError: a stacked tensor has another number of layers.
    """
    places: dict[str, tuple[str, int | None]] = {}
    for name in checkpoint:
        if is_ignored(name):
            continue
        match = _LAYER.fullmatch(name)
        if match is None:
            places[name] = (name, None)
            continue
        number, rest = match.groups()
        rest = FUSED_NORMS.get(rest, rest)
        if number is not None:
            places[f"decoder.layers.{number}.{rest}"] = (name, None)
            continue
        if checkpoint.shape(name)[0] != layers:
            raise ValueError(
                f"{checkpoint.folder}: {name} holds {checkpoint.shape(name)[0]} layers, "
                f"model.num_layers is {layers}"
            )
        for i in range(layers):
            places[f"decoder.layers.{i}.{rest}"] = (name, i)
    return places
