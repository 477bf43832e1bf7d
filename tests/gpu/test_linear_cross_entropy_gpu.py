"""The cross entropy's kernels on a GPU against plain torch, and the loss's peak memory."""

import pytest
import torch

from megatron_lt2.kernels import linear_cross_entropy as kernels
from megatron_lt2.ops import linear_cross_entropy as ops

pytestmark = pytest.mark.gpu

TOKENS, WIDTH, VOCABULARY, REAL = 2500, 256, 128256, 128241


def _numbers(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(6)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = 0.2 * torch.randn(VOCABULARY, WIDTH, generator=generator)
    weight[REAL:] *= 50
    targets = torch.randint(REAL, (TOKENS,), generator=generator)
    targets[0], targets[1] = REAL - 1, -1
    factors = torch.randn(TOKENS, generator=generator)
    factors[::5] = 0.0
    return [x.cuda() for x in (hidden.to(dtype), weight.to(dtype), targets, factors)]


def _run(backend: str, given: list[torch.Tensor]) -> list[torch.Tensor]:
    hidden, weight, targets, factors = given
    options = {"real": REAL, "backend": backend}
    found = kernels.head_statistics(hidden, weight, targets, **options)
    lse = found[0] + found[1].log()
    d_weight = torch.zeros(weight.shape, dtype=torch.float32, device="cuda")
    d_hidden = kernels.head_gradients(
        *(hidden, weight, targets, lse, factors),
        add=lambda dz, x: d_weight.add_(dz.t() @ x),
        **options,
    )
    assert d_hidden is not None
    return [lse, found[2], d_hidden, d_weight]


@pytest.mark.parametrize("dtype, bound", [(torch.float32, 2e-5), (torch.bfloat16, 1e-2)])
def test_kernels_agree_with_plain_torch(dtype: torch.dtype, bound: float) -> None:
    given = _numbers(dtype)
    names = ("lse", "target's logit", "hidden states", "weight")
    for name, got, expected in zip(names, _run("fla", given), _run("torch", given), strict=True):
        error = (got.float() - expected.float()).norm() / expected.float().norm()
        assert error < bound, f"{name}: relative error {error:.1e}"


def test_gradients_of_one_chunk_are_torchs_to_the_last_place() -> None:
    hidden, weight, targets, factors = (x[:64] for x in _numbers(torch.bfloat16))
    logits = hidden @ _numbers(torch.bfloat16)[1].t()
    found = ops.row_statistics(logits, targets, REAL)
    lse, expected = found[0] + found[1].log(), logits.clone()
    ops.logits_to_gradients(expected, targets, lse, factors, REAL)
    from megatron_lt2.kernels.linear_cross_entropy_triton import launch_gradients

    launch_gradients(logits, targets, lse, factors, REAL)
    torch.testing.assert_close(logits, expected, rtol=2**-7, atol=1e-30)


def test_the_peak_is_a_chunk_of_logits() -> None:
    given = _numbers(torch.bfloat16)
    _run("fla", given)  # compiled
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    hidden, weight, targets, factors = given
    options = {"real": REAL, "backend": "fla"}
    found = kernels.head_statistics(hidden, weight, targets, **options)
    kernels.head_gradients(hidden, weight, targets, found[0], factors, add=None, **options)
    more = torch.cuda.max_memory_allocated() - before
    chunk = kernels.chunk_tokens(VOCABULARY, 2) * VOCABULARY * 2
    assert chunk < more < chunk + 64 * TOKENS * WIDTH
