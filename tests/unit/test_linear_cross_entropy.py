"""Head and cross entropy over chunks, in plain torch: against torch's own loss and autograd."""

import pytest
import torch
import torch.nn.functional as F

from megatron_lt2.kernels import linear_cross_entropy as kernels
from megatron_lt2.model import cost
from megatron_lt2.ops import linear_cross_entropy as ops

TOKENS, WIDTH, VOCABULARY, REAL = 23, 7, 48, 37


def numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    """Hidden states, weight with large padding rows, targets, and the tokens' weights."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (
        torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)
        for rows in (TOKENS, VOCABULARY)
    )
    weight[REAL:] *= 20
    targets = torch.randint(REAL, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, REAL - 1
    factors = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    factors[::4] = 0.0
    return [hidden.to(dtype), weight.to(dtype), targets, factors.to(ops.wide_dtype(dtype))]


def losses_and_gradients(
    numbers: list[torch.Tensor], chunk: int | None, **options: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    hidden, weight, targets, factors = numbers
    given = {"real": REAL, "backend": "torch", "chunk": chunk, **options}
    highest, total, chosen = kernels.head_statistics(hidden, weight, targets, **given)
    lse = highest + total.log()
    d_weight = torch.zeros(weight.shape, dtype=lse.dtype)

    def add(dz: torch.Tensor, x: torch.Tensor) -> None:
        assert len(dz) <= (chunk or TOKENS)
        d_weight.add_(dz.t().to(lse.dtype) @ x.to(lse.dtype))

    d_hidden = kernels.head_gradients(hidden, weight, targets, lse, factors, add=add, **given)
    assert d_hidden is not None and d_hidden.dtype == hidden.dtype
    return lse - chosen, d_hidden, d_weight


@pytest.mark.parametrize("chunk", [1, 5, 23, 100, None])
@pytest.mark.parametrize(
    "dtype, bound", [(torch.float64, 1e-13), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)]
)
def test_it_is_the_cross_entropy(dtype: torch.dtype, bound: float, chunk: int | None) -> None:
    given = numbers(dtype)
    hidden, weight = (x.double().clone().requires_grad_() for x in given[:2])
    losses = F.cross_entropy(hidden @ weight[:REAL].t(), given[2], reduction="none")
    (losses * given[3]).sum().backward()
    found = losses_and_gradients(given, chunk)
    for got, expected in zip(found, (losses, hidden.grad, weight.grad), strict=True):
        assert expected is not None
        error = (got.double() - expected).abs().max() / expected.abs().max()
        assert error < bound
    assert found[1][::4].abs().max() == 0 and found[2][REAL:].abs().max() == 0
    assert found[0].dtype == ops.wide_dtype(dtype)


def test_pieces_of_the_vocabulary_add_up() -> None:
    hidden, weight, targets, _ = numbers(torch.float64)
    logits = hidden @ weight.t()
    whole = ops.row_statistics(logits, targets, REAL)
    # The last rank has padding only.
    pieces = [
        ops.row_statistics(
            logits[:, start:stop], torch.where(targets < stop, targets - start, -1), real
        )
        for start, stop, real in ((0, 16, 16), (16, 40, 21), (40, 48, 0))
    ]
    highest = torch.stack([piece[0] for piece in pieces]).amax(0)
    total = sum(piece[1] * (piece[0] - highest).exp() for piece in pieces)
    chosen = sum(piece[2] for piece in pieces)
    torch.testing.assert_close(torch.stack([highest, total, chosen]), whole)


def test_a_target_in_the_padding_is_not_learned_in_silence() -> None:
    hidden, weight, targets, _ = numbers(torch.float32)
    targets[3] = REAL
    assert ops.row_statistics(hidden @ weight.t(), targets, REAL)[2, 3] < -1e38


def test_large_logits_do_not_overflow_and_nan_stays() -> None:
    logits = torch.tensor([[1e4, -1e4, 0.0], [float("nan"), 0.0, 1.0]])
    highest, total, chosen = ops.row_statistics(logits, torch.tensor([0, 1]), 3)
    losses = highest + total.log() - chosen
    assert losses[0] == 0 and losses[1].isnan()


@pytest.mark.parametrize(
    "vocabulary, value_bytes, tokens", [(128256, 2, 2048), (64128, 2, 4096), (2**21, 4, 128)]
)
def test_a_chunk_is_some_512_mb(vocabulary: int, value_bytes: int, tokens: int) -> None:
    assert kernels.chunk_tokens(vocabulary, value_bytes) == tokens
    assert cost.chunk_bytes(1e9, vocabulary, value_bytes) == tokens * vocabulary * value_bytes
    assert cost.chunk_bytes(7, vocabulary, value_bytes) == 7 * vocabulary * value_bytes


@pytest.mark.parametrize("tokens", [1, 300, 1000])
def test_no_more_than_a_chunk_is_alive(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "CHUNK_BYTES", 4 * 50 * 300)
    seen = []
    hidden, weight = torch.zeros(tokens, 3), torch.zeros(50, 3)
    for part, logits in kernels._chunks(hidden, weight, None):
        seen.append((part.stop - part.start, len(logits), logits.data_ptr()))
    assert sum(count for count, _, _ in seen) == tokens
    assert {address for _, _, address in seen} == {seen[0][2]}
    assert all(count == rows <= 256 for count, rows, _ in seen)
