"""Variable-length flash attention with more keys than queries, against dense attention in fp32.

That is what a context-parallel rank calls: its first piece of a document has earlier keys.
"""

import math

import pytest
import torch

from megatron_lt2.kernels.window import varlen_attention, varlen_rows, window_attention

pytestmark = pytest.mark.gpu

SHAPE = (16, 4, 128)
"""Query heads, key heads, channels."""


def _inputs(batch: int, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    heads, groups, channels = SHAPE
    shapes = (
        (batch, queries, heads, channels),
        (batch, keys, groups, channels),
        (batch, keys, groups, channels),
    )
    return [torch.randn(s, generator=generator).bfloat16().cuda().requires_grad_() for s in shapes]


def _dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends: list[int], window: int | None
) -> torch.Tensor:
    """fp32, every pair of tokens; `ends` of the documents count queries."""
    earlier = k.shape[1] - q.shape[1]
    place = torch.arange(k.shape[1], device=q.device)
    document = torch.bucketize(place - earlier, torch.tensor(ends, device=q.device), right=True)
    distance = place[earlier:, None] - place[None, :]
    seen = (distance >= 0) & (document[earlier:, None] == document[None, :])
    if window is not None:
        seen &= distance < window
    repeats = q.shape[2] // k.shape[2]
    k, v = (x.float().repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bqhk,bshk->bhqs", q.float(), k) * q.shape[-1] ** -0.5
    return torch.einsum("bhqs,bshv->bqhv", scores.masked_fill(~seen, -math.inf).softmax(-1), v)


def _compare(got: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    generator = torch.Generator().manual_seed(5)
    direction = torch.randn(expected.shape, generator=generator).cuda()
    ours = torch.autograd.grad((got.float() * direction).sum(), inputs)
    theirs = torch.autograd.grad((expected * direction).sum(), inputs)
    for name, a, b in zip("oqkv", (got, *ours), (expected, *theirs), strict=True):
        error = (a.float() - b.float()).norm() / b.float().norm()
        assert error < 2e-2, f"{name}: relative error {error:.1e}"


@pytest.mark.parametrize("window", [None, 2, 100, 256])
@pytest.mark.parametrize("earlier", [0, 1, 255, 700])
@pytest.mark.parametrize("ends", [[512], [1, 512], [300, 301, 512]], ids=str)
def test_packed(ends: list[int], earlier: int, window: int | None) -> None:
    inputs = q, k, v = _inputs(1, 512, 512 + earlier)
    bounds = torch.tensor([0, *ends], dtype=torch.int32).cuda()
    if window is None:
        got = varlen_attention(q[0], k[0], v[0], bounds, 512, earlier=earlier)[None]
    else:
        got = window_attention(
            q, k, v, window, backend="fla", cu_seqlens=bounds, max_length=512, earlier=earlier
        )
    _compare(got, _dense(q, k, v, ends, window), list(inputs))


@pytest.mark.parametrize("window", [None, 100])
def test_rows(window: int | None) -> None:
    inputs = q, k, v = _inputs(3, 200, 333)
    if window is None:
        got = varlen_rows(q, k, v)
    else:
        got = window_attention(q, k, v, window, backend="fla", earlier=133)
    _compare(got, _dense(q, k, v, [200], window), list(inputs))
