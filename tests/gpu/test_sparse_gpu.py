"""DSA's kernels on a GPU at the size of the 1.3B model against the plain form, and their memory."""

import pytest
import torch

from megatron_lt2 import selftest
from megatron_lt2.config.schema import ModelConfig
from megatron_lt2.kernels import dsa, dsa_attention, dsa_indexer
from megatron_lt2.kernels.index_triton import int32, launch_select
from megatron_lt2.ops import dsa as ops
from megatron_lt2.ops.reach import reach_of_documents

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")


def _random(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", ["window", "nsa", "dsa"])
def test_outputs_and_gradients(name: str, packed: bool, dtype: torch.dtype) -> None:
    if name == "nsa" and dtype == torch.float32:
        pytest.skip("FLA's kernel holds too much in fp32")
    result = selftest.compare(
        name, ModelConfig(), device=CUDA, dtype=dtype, backend="fla", tokens=333, packed=packed
    )
    assert result.agrees, result


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_heads_of_a_tensor_parallel_rank(ranks: int) -> None:
    result = selftest.compare(
        "dsa",
        ModelConfig(),
        device=CUDA,
        dtype=torch.bfloat16,
        backend="fla",
        tokens=200,
        packed=True,
        ranks=ranks,
    )
    assert result.agrees, result


@pytest.mark.parametrize("length, count", [(1, 3), (700, 64), (5000, 2048)])
def test_selected_keys(length: int, count: int) -> None:
    """The same as the plain form's but where rounding decides; blocks of queries do not matter."""
    q, w = _random(1, length, 16, 64, seed=1), _random(1, length, 16, seed=2)
    k = _random(1, length, 64, seed=3)
    cuts = torch.tensor(sorted({0, length // 3, length // 3 + 1, length}), device=CUDA)
    reach = reach_of_documents(length, cuts, 0, CUDA)
    found = dsa.select_keys(q, w, k, reach, count, backend="fla")
    expected = ops.select_keys(q, w, k, reach, count)
    assert found.shape == expected.shape
    differs = (found != expected).any(-1).float().mean()
    assert differs < 0.01
    assert torch.equal((found >= 0).sum(-1), (expected >= 0).sum(-1))
    kept = dsa_indexer.SCORES
    try:
        dsa_indexer.SCORES = 77 * length
        assert torch.equal(dsa.select_keys(q, w, k, reach, count, backend="fla"), found)
    finally:
        dsa_indexer.SCORES = kept


def test_ties_of_a_long_row() -> None:
    scores = torch.randint(-3, 3, (3, 20000), device=CUDA).float()
    first = torch.tensor([0, 5000, 19000], device=CUDA)
    chosen = torch.full((3, 2048), -1, dtype=torch.int32, device=CUDA)
    launch_select(scores, int32(first), 19997, chosen)
    for row in range(3):
        places = torch.arange(int(first[row]), 19998 + row, device=CUDA)
        own = scores[row, places]
        order = torch.arange(len(own), device=CUDA)
        best = (own * 1e6 + order).double().topk(min(2048, len(own))).indices
        expected = places[best].sort(descending=True).values
        assert torch.equal(chosen[row, : len(expected)].long(), expected)
        assert (chosen[row, len(expected) :] == -1).all()


def _step(length: int) -> tuple[list[torch.Tensor], int]:
    """Gradients of attention to 256 random keys and of the loss, and the peak beyond the inputs."""
    q, k = _random(1, length, 16, 576, seed=1), _random(1, length, 1, 576, seed=2)
    index = [_random(1, length, 16, 64, seed=3), _random(1, length, 16, seed=4)]
    index.append(_random(1, length, 64, seed=5))
    leaves = [x.requires_grad_() for x in (q, k, *index)]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    reach = reach_of_documents(length, None, 0, CUDA)
    qi, wi, ki = index
    chosen = dsa.select_keys(qi.detach(), wi.detach(), ki.detach(), reach, 256, backend="fla")
    given = dsa.Attention(q, k, k[..., :512], reach, chosen, 576**-0.5, True)
    out, lse = dsa.sparse_attention(given, backend="fla")
    loss = dsa.indexer_loss((qi, wi, ki), given, lse)
    gradients = torch.autograd.grad(out.float().square().sum() + loss, leaves)
    return list(gradients), torch.cuda.max_memory_allocated() - before


def test_the_same_numbers_in_every_run() -> None:
    (first, _), (second, _) = _step(1500), _step(1500)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_memory_grows_with_the_length_and_no_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dsa_attention, "PAIRS", 2**26)
    monkeypatch.setattr(dsa_indexer, "PAIRS", 2**24)
    monkeypatch.setattr(dsa_indexer, "SCORES", 2**22)
    _step(512)
    peaks = [_step(length)[1] for length in (4096, 8192, 16384)]
    assert peaks[2] - peaks[1] < 2.2 * (peaks[1] - peaks[0])
