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
