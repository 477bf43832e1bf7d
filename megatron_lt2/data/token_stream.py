"""Sequences from numbered shards, .bin/.idx or tars, through a seeded shuffle buffer.

The documents of an epoch: the shards in an order of the epoch's own, their documents as stored,
and then a buffer that is filled with `shuffle_buffer` of them, shuffled, emptied, and filled again.
The epochs follow each other in one endless stream of tokens, and sequence n is its tokens
[n * s, n * s + s + 1).

What sequence n holds follows from n alone: shard order and each filling of the buffer have random
generators of their own (seed, epoch, number of the filling), and sums of document lengths say which
filling a token is in. So a run resumes at any step without replaying anything, any number of ranks
and loader processes shares the sequences out by number without loss or repeat, and shards may be of
any size, fewer than there are processes.

In memory: 24 bytes a document, shared by loader processes.
"""

import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from megatron_lt2.config.errors import ConfigError
from megatron_lt2.data.manifest import Manifest, Shard, read_manifest, shards_of

OPEN_FILES = 64
FILLINGS = 4
"""Fillings of the buffer whose order is kept, newest first."""
IDX_HEADER = 34
"""Bytes before the lengths in a .idx."""


class ShardIndex(NamedTuple):
    """Where the documents of one shard are."""

    file: str
    offsets: np.ndarray
    """int64 [documents]: first byte of the ids."""
    lengths: np.ndarray
    """int64 [documents]: tokens."""


def read_index(shard: Shard, manifest: Manifest) -> ShardIndex:
    """Read the index of a shard of either format.

    Raises:
        ValueError: it is not as long as the manifest says.
    """
    if manifest["format"] == "webdataset":
        file, index = f"{shard.stem}.tar", f"{shard.stem}.tar.idx"
        pairs = np.fromfile(index, "<i8")
        offsets, lengths = pairs[0::2], pairs[1::2]
    else:
        file, index = f"{shard.stem}.bin", f"{shard.stem}.idx"
        lengths = np.fromfile(index, "<i4", shard.documents, offset=IDX_HEADER).astype(np.int64)
        item = np.dtype(manifest["dtype"]).itemsize
        offsets = np.concatenate(([0], np.cumsum(lengths)[:-1])) * item
    if len(lengths) != shard.documents or int(lengths.sum()) != shard.tokens:
        raise ValueError(f"{index}: is not the index of {shard.documents} documents")
    return ShardIndex(file, offsets, lengths)


class TokenStream(Dataset[dict[str, torch.Tensor]]):
    """Sequences of some documents of an output; any number may be asked for.

    Args:
        prefix: of the token files.
        documents: (first, behind the last) of the documents that take part, in stored order.
        sequence_length: s, tokens a sequence.
        seed: of all orders.
        shuffle_buffer: documents in the buffer; 1 leaves them as they are.

    Raises:
        ValueError: the files are not what the manifest says.
        ConfigError: there are fewer tokens than one sequence needs.
    """

    def __init__(
        self,
        prefix: str,
        documents: tuple[int, int],
        *,
        sequence_length: int,
        seed: int,
        shuffle_buffer: int,
    ) -> None:
        manifest = read_manifest(prefix)
        self.prefix, self.length = prefix, sequence_length
        self.seed, self.buffer = seed, shuffle_buffer
        self.dtype = np.dtype(manifest["dtype"]).newbyteorder("<")
        self._shards = [
            part
            for part, count in _parts(prefix, manifest, documents)
            if count  # a shard may lie outside
        ]
        self._sizes = np.array([len(shard.lengths) for shard in self._shards], np.int64)
        self._sums = [
            np.concatenate(([0], np.cumsum(shard.lengths, dtype=np.int64)))
            for shard in self._shards
        ]
        self.documents = int(self._sizes.sum())
        self.tokens = int(sum(sums[-1] for sums in self._sums))
        if self.tokens < sequence_length + 1:
            raise ConfigError(
                f"{prefix}: documents {documents[0]} to {documents[1] - 1} have {self.tokens} "
                f"tokens, fewer than one sequence of data.sequence_length {sequence_length} + 1; "
                "tokenize more text, change data.split or shorten the sequence"
            )
        self._epochs: OrderedDict[int, _Epoch] = OrderedDict()
        self._fillings: OrderedDict[tuple[int, int], _Filling] = OrderedDict()
        self._files: OrderedDict[str, int] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __len__(self) -> int:
        """Sequences that one epoch begins; there are always more."""
        return -(-self.tokens // self.length)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """tokens and labels int64 [s], loss_mask fp32 [s]."""
        text = torch.from_numpy(self.read(index * self.length, self.length + 1))
        return {
            "tokens": text[:-1].contiguous(),
            "labels": text[1:].contiguous(),
            "loss_mask": torch.ones(self.length),
        }

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count) of the stream, int64."""
        out, done = np.empty(count, np.int64), 0
        while done < count:
            epoch, offset = divmod(start + done, self.tokens)
            filling, first = self._filling(epoch, offset)
            place = int(np.searchsorted(filling.ends, offset - first, side="right"))
            while done < count and place < len(filling.ends):
                begin = first + (int(filling.ends[place - 1]) if place else 0)
                skip = epoch * self.tokens
                inside = start + done - skip - begin
                length = int(filling.ends[place]) + first - begin
                take = min(length - inside, count - done)
                shard, document = int(filling.shards[place]), int(filling.documents[place])
                out[done : done + take] = self._ids(shard, document, inside, take)
                done, place = done + take, place + 1
        return out

    def order(self, epoch: int) -> list[tuple[str, int]]:
        """(shard file, document inside it) of a whole epoch, for tests and the curious."""
        found: list[tuple[str, int]] = []
        offset = 0
        while offset < self.tokens:
            filling, first = self._filling(epoch, offset)
            found += [
                (self._shards[shard].file, document)
                for shard, document in zip(
                    filling.shards.tolist(), filling.documents.tolist(), strict=True
                )
            ]
            offset = first + int(filling.ends[-1])
        return found

    def _filling(self, epoch: int, offset: int) -> tuple["_Filling", int]:
        """The filling of the buffer that holds a token of an epoch, and its first token."""
        plan = _cached(self._epochs, epoch, 2, lambda: self._plan(epoch))
        number = int(np.searchsorted(plan.ends, offset, side="right"))
        first = int(plan.ends[number - 1]) if number else 0
        key = (epoch, number)
        return _cached(self._fillings, key, FILLINGS, lambda: self._fill(plan, *key)), first

    def _plan(self, epoch: int) -> "_Epoch":
        order = np.random.default_rng([self.seed, epoch]).permutation(len(self._shards))
        if self.buffer == 1:
            order = np.arange(len(self._shards))
        behind = np.cumsum(self._sizes[order])
        tokens = np.concatenate(([0], np.cumsum([self._sums[shard][-1] for shard in order])))
        borders = [*range(self.buffer, self.documents, self.buffer), self.documents]
        ends = np.empty(len(borders), np.int64)
        for index, border in enumerate(borders):
            slot = int(np.searchsorted(behind, border, side="left"))
            inside = border - (int(behind[slot - 1]) if slot else 0)
            ends[index] = tokens[slot] + self._sums[order[slot]][inside]
        return _Epoch(order, behind, ends)

    def _fill(self, plan: "_Epoch", epoch: int, number: int) -> "_Filling":
        start = number * self.buffer
        places = np.arange(start, min(start + self.buffer, self.documents))
        if self.buffer > 1:
            places = np.random.default_rng([self.seed, epoch, number]).permutation(places)
        slots = np.searchsorted(plan.behind, places, side="right")
        before = np.where(slots > 0, plan.behind[slots - 1], 0)
        shards, documents = plan.order[slots], places - before
        lengths = np.empty(len(places), np.int64)
        for shard in np.unique(shards):
            chosen = shards == shard
            lengths[chosen] = self._shards[shard].lengths[documents[chosen]]
        return _Filling(shards, documents, np.cumsum(lengths))

    def _ids(self, shard: int, document: int, start: int, count: int) -> np.ndarray:
        index, item = self._shards[shard], self.dtype.itemsize
        data = os.pread(
            self._file(index.file), count * item, int(index.offsets[document]) + start * item
        )
        if len(data) != count * item:
            raise OSError(f"{index.file}: ends inside a document; verify it")
        return np.frombuffer(data, self.dtype)

    def _file(self, name: str) -> int:
        if name in self._files:
            self._files.move_to_end(name)
            return self._files[name]
        if len(self._files) >= OPEN_FILES:
            os.close(self._files.popitem(last=False)[1])
        self._files[name] = os.open(name, os.O_RDONLY)
        return self._files[name]

    def __del__(self) -> None:
        for descriptor in getattr(self, "_files", {}).values():
            os.close(descriptor)


class _Epoch(NamedTuple):
    """The shards of an epoch in their order."""

    order: np.ndarray
    behind: np.ndarray
    """Documents up to the end of each."""
    ends: np.ndarray
    """Tokens up to the end of each filling."""


class _Filling(NamedTuple):
    """One filling of the buffer after shuffling."""

    shards: np.ndarray
    documents: np.ndarray
    ends: np.ndarray
    """Tokens up to the end of each document."""


def _cached(cache: OrderedDict[Any, Any], key: Any, most: int, make: Any) -> Any:
    if key in cache:
        cache.move_to_end(key)
    else:
        cache[key] = make()
        if len(cache) > most:
            cache.popitem(last=False)
    return cache[key]


def _parts(
    prefix: str, manifest: Manifest, documents: tuple[int, int]
) -> list[tuple[ShardIndex, int]]:
    """The shards, cut to a range of all documents, and how many documents are left of each."""
    parts, done = [], 0
    for shard in shards_of(prefix, manifest):
        first = min(max(documents[0] - done, 0), shard.documents)
        last = min(max(documents[1] - done, first), shard.documents)
        done += shard.documents
        if last > first:
            whole = read_index(shard, manifest)
            cut = ShardIndex(whole.file, whole.offsets[first:last], whole.lengths[first:last])
            parts.append((cut, last - first))
    if not parts:
        raise ConfigError(f"{Path(prefix)}: documents {documents[0]} to {documents[1]} are none")
    return parts
