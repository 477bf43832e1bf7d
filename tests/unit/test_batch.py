"""Micro-batches: where documents start, positions, and the boundary table."""

import pytest
import torch

from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.data.batch import document_starts, make_batch  # noqa: E402

EOD = 0

# rows of tokens -> document boundaries, positions
TABLE = {
    "one document": ([[5, 6, 7]], [0, 3], [0, 1, 2]),
    "two documents": ([[5, 0, 6, 7, 8]], [0, 2, 5], [0, 1, 0, 1, 2]),
    "EOD in the last slot": ([[5, 6, 0], [7, 8, 9]], [0, 3, 6], [0, 1, 2, 0, 1, 2]),
    "EOD in the last slot of the last row": ([[5, 6, 0]], [0, 3], [0, 1, 2]),
    "two EODs in a row": ([[5, 0, 0, 6]], [0, 2, 3, 4], [0, 1, 0, 0]),
    "first token is EOD": ([[0, 5, 6]], [0, 1, 3], [0, 0, 1]),
    "nothing but EODs": ([[0, 0, 0]], [0, 1, 2, 3], [0, 0, 0]),
    "each row starts a document": ([[5, 6], [7, 8], [9, 0]], [0, 2, 4, 6], [0, 1, 0, 1, 0, 1]),
    "one token a row": ([[5], [0], [6]], [0, 1, 2, 3], [0, 0, 0]),
    "length 1 at both ends": ([[0, 5, 6, 0, 7]], [0, 1, 4, 5], [0, 0, 1, 2, 0]),
}


def _batch(rows, isolate=True):
    tokens = torch.tensor(rows)
    mask = torch.arange(tokens.numel(), dtype=torch.float32).reshape(tokens.shape)
    return make_batch(tokens, tokens + 100, mask, eod=EOD, isolate_documents=isolate)


@pytest.mark.parametrize("name", TABLE)
def test_boundaries_and_positions(name):
    rows, bounds, positions = TABLE[name]
    batch = _batch(rows)
    packing = batch.packing
    assert packing.cu_seqlens_q.tolist() == bounds
    assert packing.cu_seqlens_kv.tolist() == bounds
    assert packing.cu_seqlens_q.dtype == torch.int32
    assert batch.positions.tolist() == [positions]
    longest = max(end - start for start, end in zip(bounds[:-1], bounds[1:], strict=True))
    assert packing.max_seqlen_q == packing.max_seqlen_kv == longest
    starts = document_starts(torch.tensor(rows), EOD)
    assert starts.nonzero().flatten().tolist() == bounds[:-1]


def test_packing_lays_the_rows_end_to_end_in_every_field():
    batch = _batch([[5, 0, 6], [7, 8, 0]])
    assert batch.tokens.tolist() == [[5, 0, 6, 7, 8, 0]]
    assert batch.labels.tolist() == [[105, 100, 106, 107, 108, 100]]
    assert batch.loss_mask.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert batch.tokens.dtype == batch.labels.dtype == batch.positions.dtype == torch.int64


def test_without_isolation_rows_stay_rows():
    batch = _batch([[5, 0, 6], [7, 8, 0]], isolate=False)
    assert batch.packing is None
    assert batch.tokens.tolist() == [[5, 0, 6], [7, 8, 0]]
    assert batch.positions.tolist() == [[0, 1, 2], [0, 1, 2]]


def test_boundaries_against_a_walk_over_the_tokens():
    generator = torch.Generator().manual_seed(3)
    for rows, length in ((1, 1), (1, 17), (3, 13), (5, 7)):
        tokens = torch.randint(0, 4, (rows, length), generator=generator)
        expected, position = [], 0
        for row in tokens.tolist():
            position = 0
            for token in row:
                expected.append(position)
                position = 0 if token == EOD else position + 1
        assert _batch(tokens.tolist()).positions.flatten().tolist() == expected


def _shards(rows, ranks, isolate=True):
    """The batch of every rank, and the whole one."""
    tokens = torch.tensor(rows)
    mask = torch.arange(tokens.numel(), dtype=torch.float32).reshape(tokens.shape)
    given = {"eod": EOD, "isolate_documents": isolate}
    whole = make_batch(tokens, tokens + 100, mask, **given)
    parts = [
        make_batch(tokens, tokens + 100, mask, rank=rank, size=ranks, **given)
        for rank in range(ranks)
    ]
    return whole, parts


# Rows of tokens, ranks -> a rank's borders, whether its first and last piece go on elsewhere.
SHARDS = {
    "one document": ([[5, 6, 7, 8]], 2, [([0, 2], False, True), ([0, 2], True, False)]),
    "ends on the cut": ([[5, 0, 7, 8]], 2, [([0, 2], False, False), ([0, 2], False, False)]),
    "straddles the cut": ([[5, 6, 0, 8]], 2, [([0, 2], False, True), ([0, 1, 2], True, False)]),
    "inside a rank": ([[0, 6, 7, 8]], 2, [([0, 1, 2], False, True), ([0, 2], True, False)]),
    "the cut between two rows": ([[5, 6], [7, 0]], 2, [([0, 2], False, False)] * 2),
    "a rank between": (
        [[5, 6, 7, 8, 0, 9]],
        3,
        [([0, 2], False, True), ([0, 2], True, True), ([0, 1, 2], True, False)],
    ),
}


@pytest.mark.parametrize("name", SHARDS)
def test_pieces_of_documents_on_each_rank(name):
    rows, ranks, expected = SHARDS[name]
    whole, parts = _shards(rows, ranks)
    for rank, (batch, (pieces, continues, continued)) in enumerate(
        zip(parts, expected, strict=True)
    ):
        packing, shard = batch.packing, batch.packing.shard
        assert packing.cu_seqlens_q is packing.cu_seqlens_kv is shard.local_bounds
        assert packing.cu_seqlens_q.tolist() == pieces
        assert packing.cu_seqlens_q.dtype == shard.bounds.dtype == torch.int32
        assert packing.max_seqlen_q == max(b - a for a, b in zip(pieces, pieces[1:], strict=False))
        assert (shard.continues, shard.continued) == (continues, continued)
        assert shard.one_piece == (len(pieces) == 2)
        assert (shard.rank, shard.size) == (rank, ranks)
        assert shard.bounds.tolist() == list(shard.borders) == whole.packing.cu_seqlens_q.tolist()
        assert shard.longest == whole.packing.max_seqlen_q
        assert (shard.start, shard.stop) == (rank * shard.length, (rank + 1) * shard.length)
        assert shard.total == whole.tokens.numel()
        for place in range(shard.total):
            start = place - int(whole.positions[0, place])
            assert shard.document_start(place) == start


@pytest.mark.parametrize("isolate", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 6])
def test_parts_of_the_ranks_make_the_whole_batch(ranks, isolate):
    whole, parts = _shards([[5, 0, 6, 9, 0, 4], [7, 8, 0, 3, 2, 1]], ranks, isolate)
    for field in ("tokens", "labels", "loss_mask", "positions"):
        joined = torch.cat([getattr(part, field) for part in parts], dim=1)
        assert torch.equal(joined, getattr(whole, field)), field
    for part in parts:
        assert (part.packing is None) == (ranks == 1 and not isolate)
        if ranks > 1 and not isolate:
            assert part.packing.cu_seqlens_q is part.packing.shard.local_bounds is None
            assert part.packing.shard.one_piece
            assert part.packing.shard.continues == (part.packing.shard.rank > 0)
            assert part.packing.shard.continued == (part.packing.shard.rank < ranks - 1)


def test_ranks_that_cannot_share_the_row_are_refused():
    with pytest.raises(ValueError, match="row of 5 tokens cannot be cut into parallel.context 2"):
        _shards([[5, 6, 7, 8, 9]], 2)


def test_a_batch_on_another_device_is_the_same():
    for ranks in (1, 2):
        for isolate in (True, False):
            _, parts = _shards([[5, 0, 6, 9]], ranks, isolate)
            moved = parts[-1].to(torch.device("meta"))
            for field in ("tokens", "labels", "loss_mask", "positions"):
                assert getattr(moved, field).device.type == "meta"
                assert getattr(moved, field).shape == getattr(parts[-1], field).shape
            if isolate:
                packing = moved.packing
                assert packing.cu_seqlens_q is packing.cu_seqlens_kv
                assert packing.cu_seqlens_q.device.type == "meta"
                assert packing.max_seqlen_q == parts[-1].packing.max_seqlen_q
                if ranks > 1:
                    assert packing.shard.bounds.device.type == "meta"
                    assert packing.shard.local_bounds is packing.cu_seqlens_q
                    assert packing.shard.borders == parts[-1].packing.shard.borders
