"""Training and validation samples from token files.

Of single .bin/.idx pairs by megatron-core's GPT dataset, of numbered shards by `TokenStream`.

megatron-core cuts the shuffled documents into sequences of sequence_length + 1 tokens, blends
prefixes, and caches its index under `data.cache_dir`. Which sequences a run sees depends only on
the seed, the data and the number of samples asked for. `sample_ids` then gives each rank its share
of a step, so the data position of a run is its step number.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import RunConfig
from megatron_lt2.data.manifest import read_manifest
from megatron_lt2.data.streams import build_streams, check_kind
from megatron_lt2.data.tokenizer import Tokenizer


class _EndOfDocument:
    """The little of a tokenizer that megatron-core's dataset asks for."""

    def __init__(self, tokenizer: Tokenizer, data: list[str]) -> None:
        self.eod = tokenizer.eos_id
        self.pad = tokenizer.eos_id
        self.vocab_size = tokenizer.vocab_size
        # Part of the key of the cached index: other data or another tokenizer gets another one.
        self.unique_identifiers = {"class": "lt2", "sha256": tokenizer.sha256, "data": data}


def build_datasets(
    config: RunConfig, tokenizer: Tokenizer
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """The training and the validation dataset; items are dicts of tokens, labels and loss_mask.

    Every rank calls this at the same time; rank 0 builds the index first.

    Raises:
        ConfigError: a split is too small for one sequence, or data.format is not that of the files.
    """
    if check_kind(config):
        return build_streams(config)
    return _build_indexed(config, tokenizer)


def _build_indexed(
    config: RunConfig, tokenizer: Tokenizer
) -> tuple[Dataset[Any], Dataset[Any] | None]:
    """From single .bin/.idx pairs."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    data, training = config.data, config.training
    _check_tokens(config)
    cache = Path(data.cache_dir or Path(config.run_dir) / "data_cache")
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"data.cache_dir {cache}: {error.strerror}; name a folder") from None
    train_samples = training.steps * training.global_batch_size
    valid_samples = training.eval_batches * training.global_batch_size
    dataset_config = GPTDatasetConfig(
        random_seed=training.seed,
        sequence_length=data.sequence_length,
        blend=(data.prefixes, blend_weights(config)),
        split=data.split,
        path_to_cache=str(cache),
        tokenizer=_EndOfDocument(tokenizer, data_checksums(config)),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        mid_level_dataset_surplus=0.005,
    )
    train, valid, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [train_samples, valid_samples, 0], lambda: True, dataset_config
    ).build()
    if train is None:
        raise ConfigError(
            f"data.split {data.split!r} leaves no training documents in {', '.join(data.prefixes)}"
        )
    if valid is None and valid_samples:
        raise ConfigError(
            f"data.split {data.split!r} leaves no validation documents in "
            f"{', '.join(data.prefixes)}; give it a larger share or set training.eval_batches 0"
        )
    return train, valid


def data_checksums(config: RunConfig) -> list[str]:
    """Checksum of the tokens of each prefix, as its manifest has it."""
    checksums = []
    for prefix in config.data.prefixes:
        files = read_manifest(prefix)["files"]
        data = [facts["sha256"] for name, facts in files.items() if name.endswith((".bin", ".tar"))]
        checksums += data
    return checksums


def blend_weights(config: RunConfig) -> list[float] | None:
    """Share of each prefix: as set, else its tokens; None for a single prefix.

    Without weights megatron-core goes through a blend once and then runs out of samples.
    """
    data = config.data
    if len(data.prefixes) == 1:
        return None
    return data.weights or [float(read_manifest(prefix)["tokens"]) for prefix in data.prefixes]


def _leave_signals_to_the_trainer(worker: int) -> None:
    """Slurm and `timeout` signal every process; a loader that died of it would end the run."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


def _check_tokens(config: RunConfig) -> None:
    """Refuse data too small for one sequence, by the token count of each split of each prefix."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    data = config.data
    shares = [float(part) for part in data.split.split(",")]
    wanted = [("training", shares[0])]
    if config.training.eval_batches:
        wanted.append(("validation", shares[1]))
    for prefix in data.prefixes:
        dataset = IndexedDataset(prefix)  # the lengths are a view into it
        lengths = dataset.sequence_lengths
        documents, done = len(lengths), 0.0
        for name, share in wanted:
            first = round(done / sum(shares) * documents)
            done += share
            last = round(done / sum(shares) * documents)
            tokens = int(lengths[first:last].sum())
            if tokens < data.sequence_length + 1:
                raise ConfigError(
                    f"{prefix}.bin: the {name} split has {tokens} tokens, fewer than one sequence "
                    f"of data.sequence_length {data.sequence_length} + 1; tokenize more text, "
                    "change data.split or shorten the sequence"
                )


def sample_ids(
    step: int, *, global_batch: int, micro_batch: int, rank: int, replicas: int
) -> list[list[int]]:
    """The samples that data-parallel `rank` takes at `step` (0-based), a list a micro-batch.

    A step takes samples [step * global_batch, (step + 1) * global_batch) whatever the number
    of ranks.
    """
    first = step * global_batch
    micro_batches = global_batch // (micro_batch * replicas)
    ids = []
    for i in range(micro_batches):
        start = first + (i * replicas + rank) * micro_batch
        ids.append(list(range(start, start + micro_batch)))
    return ids


def micro_batches(
    dataset: Dataset[Any],
    steps: range,
    *,
    global_batch: int,
    micro_batch: int,
    rank: int,
    replicas: int,
    num_workers: int,
) -> Iterator[dict[str, torch.Tensor]]:
    """The micro-batches of this rank over `steps`, loaded ahead by worker processes.

    Yields dicts of [micro_batch, sequence_length] tensors on the CPU.
    """
    order = [
        ids
        for step in steps
        for ids in sample_ids(
            step,
            global_batch=global_batch,
            micro_batch=micro_batch,
            rank=rank,
            replicas=replicas,
        )
    ]
    loader: DataLoader[Any] = DataLoader(
        dataset,
        batch_sampler=order,
        num_workers=num_workers,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_leave_signals_to_the_trainer,
        # The loader draws a base seed for its workers; its own generator keeps the run's random
        # numbers untouched.
        generator=torch.Generator().manual_seed(0),
    )
    return iter(loader)
