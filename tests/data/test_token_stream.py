"""Numbered shards as a second source: shuffled, resumable, shared out, blended."""

import pickle
from collections import Counter

import numpy as np
import pytest
import torch

from megatron_lt2.parallel import platform

platform.install()

from data_prep.build import tokenize_files  # noqa: E402
from megatron_lt2.config.errors import ConfigError  # noqa: E402
from megatron_lt2.config.schema import RunConfig  # noqa: E402
from megatron_lt2.data.batch import make_batch  # noqa: E402
from megatron_lt2.data.datasets import build_datasets, micro_batches  # noqa: E402
from megatron_lt2.data.manifest import read_manifest, shards_of  # noqa: E402
from megatron_lt2.data.token_stream import TokenStream  # noqa: E402
from megatron_lt2.data.tokenizer import load_tokenizer  # noqa: E402
from tests.unit.tiny_text import request as asked  # noqa: E402
from tests.unit.tiny_text import write_jsonl, write_tokenizer  # noqa: E402

DOCUMENTS = 120
LENGTH = 16


@pytest.fixture(scope="module", params=["webdataset", "megatron"])
def data(request, tmp_path_factory):
    return make(tmp_path_factory.mktemp(request.param), request.param)


def make(folder, format_, shard_bytes=None, count=DOCUMENTS):
    """(prefix, tokenizer folder) of documents of uneven length in uneven shards."""
    tokenizer = write_tokenizer(folder / "tok")
    texts = [f"document {number} " + "words " * (number * 7 % 23) for number in range(count)]
    size = shard_bytes or (40_000 if format_ == "webdataset" else 1500)
    source = write_jsonl(folder / "in.jsonl", texts)
    tokenize_files(asked([source], tokenizer, folder / "out", format=format_, shard_bytes=size))
    return str(folder / "out"), tokenizer


def stream(data, *, buffer=10, seed=3, length=LENGTH, documents=(0, DOCUMENTS)):
    return TokenStream(data[0], documents, sequence_length=length, seed=seed, shuffle_buffer=buffer)


def stored(data):
    """The tokens of every document, in stored order."""
    tokenizer = load_tokenizer(data[1])
    texts = [f"document {n} " + "words " * (n * 7 % 23) for n in range(DOCUMENTS)]
    return [[*ids, tokenizer.eos_id] for ids in tokenizer.encode_batch(texts)]


def epoch_documents(source, epoch, eos=0):
    """The documents of an epoch as the stream gives them, cut at each EOS."""
    ids = source.read(epoch * source.tokens, source.tokens)
    assert ids[-1] == eos
    return [piece.tolist() for piece in np.split(ids, np.flatnonzero(ids == eos) + 1)[:-1]]


def test_every_document_once_an_epoch_and_each_epoch_in_another_order(data):
    assert len(shards_of(data[0], read_manifest(data[0]))) >= 3
    source, expected = stream(data), stored(data)
    epochs = [epoch_documents(source, epoch) for epoch in range(3)]
    for documents in epochs:
        assert Counter(map(tuple, documents)) == Counter(map(tuple, expected))
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert epochs[0] != expected
    assert epoch_documents(stream(data, seed=4), 0) != epochs[0]
    assert epoch_documents(stream(data), 0) == epochs[0]


def test_places_beyond_32_bits(data):
    """Sequence and token numbers far behind those that an int32 holds."""
    source = stream(data)
    far = (1 << 40) // source.tokens
    found = source.read(far * source.tokens, source.tokens)
    pieces = np.split(found, np.flatnonzero(found == 0) + 1)[:-1]
    assert Counter(map(tuple, pieces)) == Counter(map(tuple, stored(data)))


def test_a_buffer_of_one_leaves_the_order(data):
    assert epoch_documents(stream(data, buffer=1), 0) == stored(data)


def test_the_buffer_shuffles_within_its_reach(data):
    source = stream(data, buffer=8)
    order = source.order(0)
    assert sorted(order) == sorted(stream(data, buffer=1).order(0))
    files = [file for file, _ in order]
    # Shards follow each other but for one filling of the buffer at their borders.
    changes = sum(a != b for a, b in zip(files, files[1:], strict=False))
    assert changes < len(set(files)) * 2 * 8
    assert any(a > b for (f, a), (g, b) in zip(order, order[1:], strict=False) if f == g)


def test_sequences_are_the_stream_cut_with_one_token_of_overlap(data):
    source = stream(data)
    whole = source.read(0, 2 * source.tokens + 1)
    for number in (0, 1, len(source) - 1, len(source), len(source) + 3):
        item = source[number]
        text = whole[number * LENGTH : (number + 1) * LENGTH + 1]
        assert item["tokens"].tolist() == text[:-1].tolist()
        assert item["labels"].tolist() == text[1:].tolist()
        assert item["loss_mask"].tolist() == [1.0] * LENGTH
        assert item["tokens"].dtype == torch.int64


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("workers", [0, 5])
def test_ranks_and_workers_share_without_loss_or_repeat(data, replicas, workers):
    """More workers than shards too; the shards are uneven."""
    steps, batch = 4, 6
    given = {"global_batch": batch, "micro_batch": 1, "num_workers": workers}
    found = {}
    for rank in range(replicas):
        feed = micro_batches(stream(data), range(1, steps), rank=rank, replicas=replicas, **given)
        for number, item in enumerate(feed):
            micro = batch // replicas
            step, place = divmod(number, micro)
            found[(step + 1) * batch + place * replicas + rank] = item["tokens"][0].tolist()
    source = stream(data)
    assert found == {n: source[n]["tokens"].tolist() for n in range(batch, steps * batch)}


@pytest.mark.parametrize("cut", [1, 7, 19])
def test_resumed_in_the_middle_of_an_epoch_bit_for_bit(data, cut):
    source = stream(data)
    expected = [source[n]["tokens"].tolist() for n in range(2 * len(source))]
    fresh = pickle.loads(pickle.dumps(stream(data)))
    assert [fresh[n]["tokens"].tolist() for n in range(cut, 2 * len(source))] == expected[cut:]


def config_of(prefixes, **more):
    config = RunConfig()
    config.data.path, config.data.sequence_length, config.data.split = prefixes, LENGTH, "80,20,0"
    config.data.shuffle_buffer = 10
    config.training.steps, config.training.global_batch_size = 20, 6
    config.training.eval_batches = 2
    for name, value in more.items():
        setattr(config.data, name, value)
    return config


def test_split_and_blend(data, tmp_path):
    tokenizer = load_tokenizer(data[1])
    train, valid = build_datasets(config_of([data[0]]), tokenizer)
    assert (train.documents, valid.documents) == (96, 24)
    of_training = {tuple(document) for document in epoch_documents(train, 0)}
    of_validation = {tuple(document) for document in epoch_documents(valid, 0)}
    assert not of_training & of_validation
    other = make(tmp_path, "webdataset", 30_000)
    blend, _ = build_datasets(config_of([data[0], other[0]], weights=[3.0, 1.0]), tokenizer)
    assert len(blend) == 120
    for count in (4, 40, 120):
        assert abs((blend.which[:count] == 1).sum() - count / 4) <= 1
    for which in (0, 1):
        assert blend.index[blend.which == which].tolist() == list(
            range((blend.which == which).sum())
        )
    longer = config_of([data[0], other[0]], weights=[3.0, 1.0])
    longer.training.steps = 40
    again, _ = build_datasets(longer, tokenizer)
    assert [again[n]["tokens"].tolist() for n in range(120)] == [
        blend[n]["tokens"].tolist() for n in range(120)
    ]


def test_wrong_format_mixture_and_small_splits_are_refused(data, tmp_path):
    tokenizer, config = load_tokenizer(data[1]), config_of([data[0]])
    format_ = read_manifest(data[0])["format"]
    config.data.format = "megatron" if format_ == "webdataset" else "webdataset"
    with pytest.raises(ConfigError, match=f"data.format is '{config.data.format}'"):
        build_datasets(config, tokenizer)
    config.data.format = format_
    build_datasets(config, tokenizer)
    config.data.split = "99.9,0.1,0"
    with pytest.raises(ConfigError, match="leaves no validation documents"):
        build_datasets(config, tokenizer)
    config.data.split, config.data.sequence_length = "80,20,0", 100_000
    with pytest.raises(ConfigError, match="fewer than one sequence"):
        build_datasets(config, tokenizer)
    source = write_jsonl(tmp_path / "in.jsonl", ["a single pair"] * 50)
    tokenize_files(asked([source], data[1], tmp_path / "single"))
    with pytest.raises(ConfigError, match="mixes numbered shards with the single pair"):
        build_datasets(config_of([data[0], str(tmp_path / "single")]), tokenizer)


def test_borders_positions_and_loss_at_every_document(data):
    """EOS is not padding: its label counts, and what follows it starts anew."""
    source = stream(data, length=400)
    item = source[1]
    batch = make_batch(
        *(item[name][None] for name in ("tokens", "labels", "loss_mask")),
        eod=0,
        isolate_documents=True,
    )
    tokens = item["tokens"].tolist()
    assert tokens.count(0) >= 2
    position, expected = 0, []
    for token in tokens:
        expected.append(position)
        position = 0 if token == 0 else position + 1
    assert batch.positions[0].tolist() == expected
    assert batch.loss_mask.sum() == 400 and (batch.labels == 0).sum() >= 2


def test_a_shard_that_is_cut_is_named(data, tmp_path):
    copy = make(tmp_path, read_manifest(data[0])["format"])
    source = stream(copy)
    shard = next(tmp_path.glob("out-00001.[bt][ia][nr]"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(OSError, match="out-00001"):
        source.read(0, source.tokens)
    with pytest.raises(ValueError, match="out-00001"):
        stream(copy)
