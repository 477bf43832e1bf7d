"""The Triton kernels of DSA, interpreted on the CPU, against the plain form.

The interpreter must be switched on before Triton is first imported, hence a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parents[2]
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"

inside = pytest.mark.skipif(not INTERPRETING, reason="runs in a process with TRITON_INTERPRET=1")

if INTERPRETING:
    from megatron_lt2.kernels import (
        dsa,
        dsa_attention,
        dsa_indexer,
        gathered_triton,
        index_loss_triton,
        index_triton,
    )
    from megatron_lt2.kernels.pair_sums_triton import add_by_key
    from megatron_lt2.ops.reach import reach_of_documents, reach_of_rows

HEADS, VALUES, ROPE, INDEX_HEADS, INDEX = 3, 20, 6, 5, 9
CPU = torch.device("cpu")
BOUND = 2e-5


@pytest.mark.skipif(INTERPRETING, reason="is the process that this test starts")
def test_in_a_process_with_the_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", "-q", "-rs", str(Path(__file__))]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=300, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So small that there are several of each."""
    if INTERPRETING:
        monkeypatch.setattr(gathered_triton, "KEYS", 16)
        monkeypatch.setattr(index_loss_triton, "KEYS", 16)
        monkeypatch.setattr(index_triton, "QUERIES", 16)
        monkeypatch.setattr(index_triton, "KEYS", 16)
        monkeypatch.setattr(index_triton, "ROW", 16)


@pytest.fixture(autouse=True)
def nan_in_fresh_memory():
    """So that a kernel that reads what it never wrote is found out."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _random(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).requires_grad_()


def _tensors(queries, keys, batch=1):
    return {
        "q": _random(batch, queries, HEADS, VALUES + ROPE, seed=1),
        "k": _random(batch, keys, 1, VALUES + ROPE, seed=2),
        "qi": _random(batch, queries, INDEX_HEADS, INDEX, seed=3),
        "wi": _random(batch, queries, INDEX_HEADS, seed=4),
        "ki": _random(batch, keys, INDEX, seed=5),
    }


def _reach(name):
    if name == "row":
        return reach_of_documents(33, None, 0, CPU), 1
    if name == "packed":
        return reach_of_documents(34, torch.tensor([0, 9, 10, 30, 34]), 0, CPU), 1
    if name == "earlier keys":
        return reach_of_documents(17, torch.tensor([0, 8, 17]), 13, CPU), 1
    if name == "padded rows":
        real = torch.arange(19) >= torch.tensor([0, 6])[:, None]
        return reach_of_rows(real, 0, 19, CPU), 2
    assert name == "two rows"
    return reach_of_documents(19, None, 0, CPU), 2


REACHES = ("row", "packed", "earlier keys", "padded rows", "two rows")


def _run(backend, tensors, reach, count, dense=False):
    """Output, loss and all gradients."""
    index = tuple(tensors[name] for name in ("qi", "wi", "ki"))
    chosen = None
    if not dense:
        detached = [x.detach() for x in index]
        chosen = dsa.select_keys(*detached, reach, count, backend=backend)
    q, k = tensors["q"], tensors["k"]
    given = dsa.Attention(q, k, k[..., :VALUES], reach, chosen, 0.3, True)
    out, lse = dsa.sparse_attention(given, backend=backend)
    assert (lse is None) == (backend == "torch")
    loss = dsa.indexer_loss(index, given, lse)
    direction = _random(*out.shape, seed=9).detach()
    total = (out * direction).sum() + 3 * loss
    gradients = torch.autograd.grad(total, list(tensors.values()))
    named = {f"gradient of {n}": g for n, g in zip(tensors, gradients, strict=True)}
    found = {"output": out.detach(), "loss": loss.detach(), **named}
    return found if dense else {"chosen": chosen, **found}


def _worst(found, expected):
    """The largest relative error, and of what."""
    errors = {
        name: float((found[name] - x).double().norm() / x.double().norm().clamp(min=1.0))
        for name, x in expected.items()
    }
    name = max(errors, key=lambda n: errors[n])
    return errors[name], name


@inside
@pytest.mark.parametrize(
    "name, count",
    [("row", 1), ("row", 40), *((name, 7) for name in REACHES[1:-1]), ("two rows", 17)],
)
def test_chosen_keys(name, count):
    reach, batch = _reach(name)
    tensors = _tensors(reach.length, reach.keys, batch)
    expected = _run("torch", tensors, reach, count)
    found = _run("fla", tensors, reach, count)
    assert torch.equal(found["chosen"], expected["chosen"])
    error, what = _worst(found, expected)
    assert error < BOUND, f"{what}: {error:.1e}"


@inside
@pytest.mark.parametrize("name", REACHES)
def test_all_keys(name, monkeypatch):
    monkeypatch.setattr(dsa_attention, "SCORES", 7 * INDEX_HEADS * 36)
    reach, batch = _reach(name)
    tensors = _tensors(reach.length, reach.keys, batch)
    error, what = _worst(*(_run(b, tensors, reach, 5, dense=True) for b in ("fla", "torch")))
    assert error < BOUND, f"{what}: {error:.1e}"


@inside
def test_blocks_of_queries_do_not_matter(monkeypatch):
    reach, _ = _reach("packed")
    tensors = _tensors(reach.length, reach.keys)
    whole = _run("fla", tensors, reach, 7)
    monkeypatch.setattr(dsa_attention, "PAIRS", 11 * 7 * (VALUES + ROPE))
    monkeypatch.setattr(dsa_indexer, "PAIRS", 10 * 7 * INDEX)
    monkeypatch.setattr(dsa_indexer, "SCORES", 9 * reach.keys)
    pieces = _run("fla", tensors, reach, 7)
    error, what = _worst(pieces, whole)
    assert error < 1e-6 and torch.equal(pieces["chosen"], whole["chosen"]), what


@inside
def test_gaps_in_a_list_and_queries_without_a_key():
    q, k = _random(4, HEADS, VALUES + ROPE, seed=1), _random(9, VALUES + ROPE, seed=2)
    index = torch.full((4, 21), -1, dtype=torch.int32)
    index[0, [3, 4, 20]] = torch.tensor([8, 0, 5], dtype=torch.int32)
    index[2, 17], index[3, :9] = 2, torch.arange(9, dtype=torch.int32)
    out, lse = dsa_attention.attend_chosen(q, k, index, VALUES, 0.3)
    assert not out[1].any() and lse[1].isinf().all()
    weights = torch.zeros(4, HEADS, 9)
    for row in (0, 2, 3):
        places = index[row][index[row] >= 0].long()
        weights[row, :, places] = (0.3 * q[row] @ k[places].t()).softmax(-1)
    torch.testing.assert_close(out, weights @ k[:, :VALUES])
    dq, dk = torch.autograd.grad(out.sum(), (q, k))
    assert not dq[1].any() and dk.isfinite().all() and dk[1].any()
    mass = gathered_triton.launch_mass(q.detach(), k.detach(), index, lse, VALUES, 0.3)
    assert not mass[index < 0].any()
    assert mass.sum(-1).tolist() == pytest.approx([HEADS, 0, HEADS, HEADS])


@inside
def test_ties_go_to_later_keys_and_zeros_have_no_sign():
    reach, count = reach_of_documents(40, torch.tensor([0, 33, 40]), 0, CPU), 6
    scores = torch.randint(-2, 3, (40, 40), generator=torch.Generator().manual_seed(0)).float()
    scores[:, ::3] = -0.0
    chosen = torch.full((40, count), -1, dtype=torch.int32)
    index_triton.launch_select(scores, index_triton.int32(reach.first[0]), 0, chosen)
    for t in range(40):
        places = range(int(reach.first[0, t]), t + 1)
        best = sorted(places, key=lambda s, t=t: (-scores[t, s].item(), -s))[:count]
        best = sorted(best, reverse=True) + [-1] * (count - len(best))
        assert chosen[t].tolist() == best, t


@inside
def test_extreme_scores_are_in_order():
    row = torch.tensor([[3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0, float("inf"), float("-inf")]])
    first = torch.zeros(1, dtype=torch.int32)
    order = [6, 0, 2, 5, 4, 3, 1, 7]
    for count in range(1, 9):
        chosen = torch.full((1, count), -1, dtype=torch.int32)
        index_triton.launch_select(row, first, 7, chosen)
        assert chosen[0].tolist() == sorted(order[:count], reverse=True)


@inside
def test_sums_by_key():
    index = torch.tensor([[3, -1, 0], [0, 3, -1], [3, 2, 0]], dtype=torch.int32)
    pairs, total = _random(9, 70, seed=1).detach(), torch.ones(5, 70)
    pairs[1] = pairs[5] = float("nan")  # never written
    add_by_key(pairs, index, total)
    expected = torch.ones(5, 70)
    for pair, key in enumerate(index.flatten().tolist()):
        if key >= 0:
            expected[key] += pairs[pair]
    torch.testing.assert_close(total, expected)
    assert torch.equal(total[1], torch.ones(70))


@inside
@pytest.mark.parametrize(
    "module, name, wrong",
    [
        ("gathered_triton", "launch_mass", lambda x: x + 0.1 * (x > 0)),
        ("index_loss_triton", "launch_gathered_scores", lambda x: 1.01 * x),
        ("index_loss_triton", "launch_gathered_gradients", lambda x: 1.01 * x),
        ("gathered_triton", "launch_forward", lambda x: (x[0], x[1] + 0.01)),
    ],
)
def test_a_mistake_is_seen(module, name, wrong, monkeypatch):
    reach, _ = _reach("packed")
    tensors = _tensors(reach.length, reach.keys)
    expected = _run("torch", tensors, reach, 7)
    right = getattr(globals()[module], name)
    monkeypatch.setattr(globals()[module], name, lambda *given: wrong(right(*given)))
    assert _worst(_run("fla", tensors, reach, 7), expected)[0] > 100 * BOUND


@inside
def test_what_the_kernels_do_not_take_is_refused():
    reach, _ = _reach("row")
    tensors = {name: x.detach() for name, x in _tensors(33, 33).items()}
    wide = {**tensors, "q": torch.zeros(1, 33, 33, VALUES + ROPE)}
    with pytest.raises(ValueError, match="has 33 query heads a rank, where the kernels of sparse"):
        dsa.sparse_attention(
            dsa.Attention(wide["q"], wide["k"], wide["k"], reach, None, 1.0, True), backend="fla"
        )
    half = [tensors[n].half() for n in ("qi", "wi", "ki")]
    with pytest.raises(ValueError, match=r"take bf16 and fp32, not torch\.float16"):
        dsa.select_keys(*half, reach, 3, backend="fla")
