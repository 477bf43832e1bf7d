"""Training and validation sequences from numbered shards, by `TokenStream`."""

from typing import Any

from torch.utils.data import Dataset

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.blend import Blend
from megatron_lt2.data.manifest import manifest_path, read_manifest
from megatron_lt2.data.token_stream import TokenStream


def check_kind(config: RunConfig) -> bool:
    """Whether the data are numbered shards (or tars) and not single .bin/.idx pairs.

    Raises:
        ConfigError: `data.format` says something else, or a blend has both.
    """
    data = config.data
    numbered: dict[str, bool] = {}
    for prefix in data.prefixes:
        manifest = read_manifest(prefix)
        if data.format is not None and manifest["format"] != data.format:
            raise ConfigError(
                f"data.format is {data.format!r}, but {manifest_path(prefix)} says "
                f"{manifest['format']!r}; leave data.format out or name other files in data.path"
            )
        numbered[prefix] = "shards" in manifest
    if len(set(numbered.values())) > 1:
        single = next(prefix for prefix, value in numbered.items() if not value)
        raise ConfigError(
            f"data.path mixes numbered shards with the single pair {single}; tokenize that one "
            "with --shard-mb too"
        )
    return any(numbered.values())


def build_streams(config: RunConfig) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """The training and the validation data set.

    Raises:
        ConfigError: a split is too small for one sequence.
    """
    training = config.training
    train = _blend(config, 0, training.steps * training.global_batch_size)
    count = training.eval_batches * training.global_batch_size
    return train, _blend(config, 1, count) if count else None


def _blend(config: RunConfig, part: int, count: int) -> Dataset[Any]:
    """All prefixes of a part of `data.split`."""
    data = config.data
    streams: list[Any] = [
        TokenStream(
            prefix,
            _documents(config, prefix, part),
            sequence_length=data.sequence_length,
            seed=config.training.seed + index,  # two prefixes of equal shape differ in order
            shuffle_buffer=data.shuffle_buffer,
        )
        for index, prefix in enumerate(data.prefixes)
    ]
    if len(streams) == 1:
        return streams[0]
    return Blend(streams, data.weights or [float(stream.tokens) for stream in streams], count)


def _documents(config: RunConfig, prefix: str, part: int) -> tuple[int, int]:
    """First document of a part of the split, and the one behind its last."""
    shares = [float(share) for share in config.data.split.split(",")]
    documents = read_manifest(prefix)["documents"]
    first, last = (
        round(sum(shares[:border]) / sum(shares) * documents) for border in (part, part + 1)
    )
    if last <= first:
        name = ("training", "validation")[part]
        raise ConfigError(
            f"data.split {config.data.split!r} leaves no {name} documents in {prefix}; give it a "
            "larger share" + (" or set training.eval_batches 0" if part else "")
        )
    return first, last
