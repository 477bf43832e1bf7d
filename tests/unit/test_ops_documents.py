"""Document borders of packed rows, and the cutting of documents into chunks."""

import pytest
import torch

from megatron_lt2.ops.documents import (
    chunk_layout,
    document_bounds,
    document_ids,
    document_positions,
)

CPU = torch.device("cpu")


def test_ids_and_positions() -> None:
    borders = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    assert document_ids(borders, 5).tolist() == [0, 0, 2, 2, 2]
    assert document_positions(borders, 5).tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize(
    ("borders", "batch", "message"),
    [
        ([0, 5], 2, "batch size is 2"),
        ([1, 5], 1, "from 0 to the row length 5, not from 1 to 5"),
        ([0, 4], 1, "from 0 to the row length 5"),
        ([0, 3, 2, 5], 1, "decrease"),
        ([5], 1, "at least two borders"),
        ([[0, 5]], 1, "one-dimensional"),
        ([0.0, 5.0], 1, "integer"),
    ],
)
def test_wrong_borders_are_refused(borders: list, batch: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        document_bounds(torch.tensor(borders), batch, 5)


@pytest.mark.parametrize("length", [1, 4, 11])
def test_dense_chunks_there_and_back(length: int) -> None:
    x = torch.randn(2, length, 3, 2)
    layout = chunk_layout(2, length, 4, None, CPU)
    chunks = layout.to_chunks(x)
    assert chunks.shape == (len(layout.active) * 2 * 3, 4, 2)
    assert torch.equal(layout.from_chunks(chunks, 3), x)


def test_packed_chunks_hold_one_document_and_come_longest_first() -> None:
    borders = torch.tensor([0, 3, 12, 12, 13, 17])
    layout = chunk_layout(1, 17, 4, borders, CPU)
    assert layout.active == [4, 1, 1]
    assert layout.order is not None and layout.order.tolist() == [1, 4, 0, 3, 2]
    token = torch.arange(1.0, 18.0).view(1, 17, 1, 1)
    chunks = layout.to_chunks(token, zero_padding=True).squeeze(-1)
    assert chunks.tolist() == [
        [4, 5, 6, 7],
        [14, 15, 16, 17],
        [1, 2, 3, 0],
        [13, 0, 0, 0],
        [8, 9, 10, 11],
        [12, 0, 0, 0],
    ]
    x = torch.randn(1, 17, 3, 2)
    assert torch.equal(layout.from_chunks(layout.to_chunks(x), 3), x)
    per_document = torch.arange(5)
    assert torch.equal(layout.unsort_documents(layout.sort_documents(per_document)), per_document)
