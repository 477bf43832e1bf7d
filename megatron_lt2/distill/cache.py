"""A teacher's likeliest tokens on disk, so that it need not run beside the student.

    FOLDER/facts.json                    what they were made of
    FOLDER/train_000012.ids.npy          [samples, s, k] int32
    FOLDER/train_000012.logits.npy       [samples, s, k] fp16, below the largest of each token

A part holds `PART` samples in the order of training, and counts when both files are there, the
logits written last; what a killed run has made stays. Differences of logits are all that the
divergence needs, and near 0 fp16 is fine enough.
"""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_lt2.atomic import write_json_atomic
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.distill.taps import stream
from megatron_lt2.parallel.distillation_loss import Heads, TopLogits, top_logits
from megatron_lt2.parallel.sequence import shard_span
from megatron_lt2.training.steps import DataFeed

PART = 64
"""Samples a file."""


class LogitCache:
    """One folder of cached logits.

    Args:
        folder: where they are.
        facts: what they must have been made of.
    """

    def __init__(self, folder: str, facts: dict[str, Any]) -> None:
        self.folder, self.facts = Path(folder), facts

    def check(self) -> None:
        """Refuse logits of something else.

        Raises:
            ConfigError: names the first fact that differs.
        """
        path = self.folder / "facts.json"
        if not path.is_file():
            return
        before = json.loads(path.read_text())
        for name, value in self.facts.items():
            if before.get(name) != value:
                raise ConfigError(
                    f"loss.cached {self.folder}: its logits are of {name} {before.get(name)!r}, "
                    f"here it is {value!r}; name another folder"
                )

    def path(self, split: str, part: int, kind: str) -> Path:
        """File of a part; kind: "ids" or "logits"."""
        return self.folder / f"{split}_{part:06d}.{kind}.npy"

    def missing(self, split: str, samples: int) -> list[int]:
        """Parts that are not there yet."""
        parts = range(-(-samples // PART))
        return [part for part in parts if not self.path(split, part, "logits").is_file()]

    def write(self, split: str, part: int, ids: np.ndarray, logits: np.ndarray) -> None:
        """Keep one part."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for kind, values in (("ids", ids), ("logits", logits)):
            target = self.path(split, part, kind)
            temporary = target.with_name(f".{target.name}.{os.getpid()}.partial")
            with temporary.open("wb") as file:
                np.save(file, values)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(target)

    def note(self) -> None:
        """Say what the logits are made of."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json_atomic(self.folder / "facts.json", self.facts)

    def read(self, split: str, index: int) -> dict[str, Tensor]:
        """Of one sample: ids [s, k] int64 and logits [s, k] fp32."""
        part, place = divmod(index, PART)
        ids, logits = (
            np.load(self.path(split, part, kind), mmap_mode="r")[place]
            for kind in ("ids", "logits")
        )
        return {
            "top_ids": torch.from_numpy(ids.astype(np.int64)),
            "top_logits": torch.from_numpy(logits.astype(np.float32)),
        }


class CachedDataset(Dataset[Any]):
    """Samples with the teacher's logits beside them."""

    def __init__(self, plain: Any, cache: LogitCache, split: str) -> None:
        self.plain, self.cache, self.split = plain, cache, split

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = dict(self.plain[index])
        return {**item, **self.cache.read(self.split, index)}


class CachedFeed(DataFeed):
    """Micro-batches whose logits go to the model, which is called next.

    Args:
        model: DistilledModel.
        Others as DataFeed.
    """

    def __init__(self, source: Iterator[dict[str, Tensor]], config: Any, eod: int, model: Any):
        self._model = model
        self._top: tuple[Tensor, Tensor] | None = None
        super().__init__(self._without_logits(source), config, eod)

    def _without_logits(self, source: Iterator[dict[str, Tensor]]) -> Iterator[dict[str, Tensor]]:
        for raw in source:
            self._top = raw.pop("top_ids"), raw.pop("top_logits")
            yield raw

    def __next__(self) -> Any:
        batch = super().__next__()
        assert self._top is not None
        cp = self._model.pg_collection.cp
        found = []
        for x in self._top:  # [b, s, k], laid out as data/batch.py does with tokens
            x = x.flatten(0, 1)[None] if batch.tokens.shape[0] != x.shape[0] or len(x) == 1 else x
            start, stop = shard_span(x.shape[1], cp.rank(), cp.size())
            found.append(x[:, start:stop].transpose(0, 1).flatten(0, 1).to(batch.tokens.device))
        self._model.know(TopLogits(*found))
        return batch


@torch.no_grad()
def fill(
    cache: LogitCache,
    split: str,
    plain: Any,
    samples: int,
    teacher: Any,
    trainer: Any,
) -> bool:
    """Compute what is missing; whether it came to its end. A collective call.

    Args:
        plain: samples without logits.
        samples: how many of them are needed.
        teacher: LT2Model of this rank.
        trainer: StageTrainer: configuration, ranks, requests to stop.

    Raises:
        ConfigError: the ranks hold parts of a sequence.
    """
    from megatron_lt2.distill.run import agreed

    config = trainer.config
    missing: list[int] = agreed(cache.missing(split, samples))
    if not missing:
        return True
    if config.parallel.context > 1:
        raise ConfigError(
            f"loss.cached {cache.folder}: logits are missing, and with parallel.context "
            f"{config.parallel.context} a rank has a part of a sequence only; make them with 1"
        )
    rows = config.training.micro_batch_size
    own = missing[trainer.rank :: trainer.replicas]
    for turn in range(-(-len(missing) // trainer.replicas)):
        trainer.heartbeat.beat("teacher", turn)
        if trainer.exit_request.agreed():
            return False
        if turn >= len(own):
            continue
        part = own[turn]
        ids, logits = [], []
        last = min(samples, (part + 1) * PART)
        for first in range(part * PART, last, rows):
            found = _top_of(plain, range(first, min(first + rows, last)), teacher, trainer)
            ids.append(found.ids.cpu().numpy().astype(np.int32))
            below = found.logits - found.logits.amax(-1, keepdim=True)
            logits.append(below.clamp_min(-6e4).half().cpu().numpy())
        if teacher.pg_collection.tp.rank() == 0:
            cache.write(split, part, np.concatenate(ids), np.concatenate(logits))
    trainer.log.say(f"{cache.folder}: the teacher's logits of the {split} samples are complete")
    return not trainer.exit_request.agreed()


def _top_of(plain: Any, indices: range, teacher: Any, trainer: Any) -> TopLogits:
    """Of some samples, [samples, s, k]."""
    items = [plain[i] for i in indices]
    names = ("tokens", "labels", "loss_mask")
    raw = {name: torch.stack([torch.as_tensor(item[name]) for item in items]) for name in names}
    batch = next(DataFeed(iter([raw]), trainer.config, trainer.eod))
    hidden = stream(teacher, batch.tokens, batch.positions, batch.packing)
    tied = teacher._tied_weight()
    heads = Heads(
        teacher.pg_collection.tp, teacher.config.sequence_parallel, teacher.real_vocab_size
    )
    weight = teacher.output_layer.weight if tied is None else tied
    top = top_logits(hidden, weight, trainer.stage.settings.loss.top_k, heads)
    b, s = raw["tokens"].shape
    if batch.packing is None:  # rows: tokens lie in the order of [s, b]
        return TopLogits(*(x.unflatten(0, (s, b)).transpose(0, 1) for x in (top.ids, top.logits)))
    return TopLogits(*(x.unflatten(0, (b, s)) for x in (top.ids, top.logits)))
