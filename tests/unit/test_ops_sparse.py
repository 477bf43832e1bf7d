"""NSA and DSA against brute force and against dense attention, forward and gradients, in fp64."""

import pytest
import torch
from brute_sparse import dsa_row, nsa_row
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lt2.ops import gathered
from megatron_lt2.ops.dsa import index_scores, indexer_loss, mass_held, select_keys
from megatron_lt2.ops.gathered import all_keys, attend, listed_keys
from megatron_lt2.ops.nsa import nsa
from megatron_lt2.ops.reach import Reach, reach_of_documents, reach_of_rows

HEADS, GROUPS, CHANNELS, VALUES, INDEX = 4, 2, 6, 5, 3
DOCUMENTS = (13, 1, 26, 3)
NSA = {"block": 4, "count": 3, "window": 5}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of seven queries, so that there are several."""
    monkeypatch.setattr(gathered, "QUERIES", 7)


def _random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.double).requires_grad_()


def _inputs(length, batch=1):
    return {
        "q": _random(batch, length, HEADS, CHANNELS, seed=1),
        "k": _random(batch, length, GROUPS, CHANNELS, seed=2),
        "v": _random(batch, length, GROUPS, VALUES, seed=3),
    }


def _gates(length, batch=1):
    return {f"g{i}": _random(batch, length, HEADS, seed=10 + i) for i in range(3)}


def _indexer(length, batch=1):
    return {
        "qi": _random(batch, length, 2, INDEX, seed=4),
        "wi": _random(batch, length, 2, seed=5),
        "ki": _random(batch, length, INDEX, seed=6),
    }


def _borders(lengths=DOCUMENTS):
    return torch.tensor([0, *lengths]).cumsum(0)


def _pieces(tensors, lengths=DOCUMENTS):
    """The tensors of each document, of a packed row."""
    bounds = _borders(lengths).tolist()
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        yield {name: x[0, start:stop] for name, x in tensors.items()}


def _assert_same(got, expected, tensors, atol=1e-12):
    """Value and gradients of a random weighted sum."""
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)
    direction = _random(*got.shape, seed=9).detach()
    leaves = list(tensors.values())
    again = {"allow_unused": True, "retain_graph": True}
    first = torch.autograd.grad((got * direction).sum(), leaves, **again)
    second = torch.autograd.grad((expected * direction).sum(), leaves, **again)
    for name, a, b in zip(tensors, first, second, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            assert b.abs().max() > 1e-6, f"{name} gets no gradient"
            torch.testing.assert_close(a, b, rtol=0, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def _nsa(tensors, reach, **changes):
    gates = tuple(tensors[f"g{i}"] for i in range(3))
    return nsa(tensors["q"], tensors["k"], tensors["v"], gates, reach, **{**NSA, **changes})


def _brute_nsa(piece, **changes):
    gates = tuple(piece[f"g{i}"] for i in range(3))
    return nsa_row(piece["q"], piece["k"], piece["v"], gates, **{**NSA, **changes})


@pytest.mark.parametrize("length", [1, 3, 4, 29])
def test_nsa_equals_brute_force(length):
    tensors = {**_inputs(length), **_gates(length)}
    expected = _brute_nsa({name: x[0] for name, x in tensors.items()})
    got = _nsa(tensors, reach_of_documents(length, None, 0, CPU))
    torch.testing.assert_close(got[0], expected, rtol=0, atol=1e-12)
    if length == 29:
        _assert_same(got[0], expected, tensors)


def test_nsa_of_packed_documents_is_that_of_each_alone():
    total = sum(DOCUMENTS)
    tensors = {**_inputs(total), **_gates(total)}
    reach = reach_of_documents(total, _borders(), 0, CPU)
    expected = torch.cat([_brute_nsa(piece) for piece in _pieces(tensors)])
    _assert_same(_nsa(tensors, reach)[0], expected, tensors)


def test_nsa_with_every_block_and_a_wide_window_is_dense_attention():
    length = 29
    tensors = _inputs(length)
    none, one = torch.zeros(1, length, HEADS).double(), torch.ones(1, length, HEADS).double()
    reach = reach_of_documents(length, None, 0, CPU)
    dense = attend(tensors["q"], tensors["k"], tensors["v"], all_keys(reach))
    for gates in ((none, one, none), (none, none, one)):
        got = nsa(*tensors.values(), gates, reach, block=4, count=8, window=29)
        _assert_same(got, dense, tensors)
    fewer = nsa(*tensors.values(), (none, one, none), reach, block=4, count=3, window=29)
    assert (fewer - dense).abs().max() > 0.1


def test_attend_is_torchs_attention():
    tensors = _inputs(29, batch=2)
    reach = reach_of_documents(29, None, 0, CPU)
    q, k, v = (x.transpose(1, 2) for x in tensors.values())
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    _assert_same(attend(*tensors.values(), all_keys(reach)), expected.transpose(1, 2), tensors)


def _dsa(tensors, reach, count, dense=False):
    index = select_keys(tensors["qi"], tensors["wi"], tensors["ki"], reach, count)
    choice = all_keys(reach) if dense else listed_keys(index)
    out = attend(tensors["q"], tensors["k"], tensors["v"], choice)
    indexer = (tensors["qi"], tensors["wi"], tensors["ki"])
    loss = indexer_loss(indexer, tensors["q"], tensors["k"], choice, scale=CHANNELS**-0.5)
    return out, loss


def _brute_dsa(piece, count, dense=False):
    index = (piece["qi"], piece["wi"], piece["ki"])
    return dsa_row(piece["q"], piece["k"], piece["v"], index, count=count, dense=dense)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("count", [1, 5, 100])
def test_dsa_of_packed_documents_equals_brute_force(count, dense):
    total = sum(DOCUMENTS)
    tensors, indexer = _inputs(total), _indexer(total)
    everything = {**tensors, **indexer}
    reach = reach_of_documents(total, _borders(), 0, CPU)
    got, loss = _dsa(everything, reach, count, dense)
    pieces = [_brute_dsa(piece, count, dense) for piece in _pieces(everything)]
    if count > 1:  # the softmax over one key has no gradient
        _assert_same(got[0], torch.cat([out for out, _ in pieces]), tensors)
    expected = sum(x for _, x in pieces)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)
    if count == 1 and not dense:
        assert loss == 0
        return
    mine = torch.autograd.grad(3 * loss, list(indexer.values()))
    theirs = torch.autograd.grad(3 * expected, list(indexer.values()))
    for name, a, b in zip(indexer, mine, theirs, strict=True):
        assert b.abs().max() > 1e-4
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


def test_the_two_gradients_do_not_meet():
    tensors, indexer = _inputs(29), _indexer(29)
    out, loss = _dsa({**tensors, **indexer}, reach_of_documents(29, None, 0, CPU), 5)
    main = torch.autograd.grad(out.sum(), list(indexer.values()), allow_unused=True)
    aside = torch.autograd.grad(loss, list(tensors.values()), allow_unused=True)
    assert main == (None,) * 3 and aside == (None,) * 3


def test_all_keys_selected_is_dense_attention():
    tensors, indexer = _inputs(29), _indexer(29)
    reach = reach_of_documents(29, None, 0, CPU)
    sparse, loss = _dsa({**tensors, **indexer}, reach, 29)
    dense, dense_loss = _dsa({**tensors, **indexer}, reach, 29, dense=True)
    _assert_same(sparse, dense, tensors)
    torch.testing.assert_close(loss, dense_loss, rtol=1e-12, atol=1e-12)


def test_of_equal_scores_the_latest_keys_are_taken():
    reach = reach_of_documents(9, None, 0, CPU)
    q, w, k = torch.zeros(1, 9, 2, 3), torch.ones(1, 9, 2), torch.zeros(1, 9, 3)
    k[0, 2] = 1
    q[:] = 1
    index = select_keys(q, w, k, reach, 3)
    assert sorted(index[0, 8].tolist()) == [2, 7, 8]
    assert sorted(index[0, 1].tolist()) == [-1, 0, 1]
    assert index.dtype == torch.int32


def test_negative_weights_push_keys_away():
    q, k = torch.ones(1, 1, 1, 1), torch.tensor([[[-1.0], [2.0], [1.0]]])
    reach = Reach(torch.zeros(1, 1, dtype=torch.long), 2)
    assert index_scores(q, -torch.ones(1, 1, 1), k).tolist() == [[[0.0, -2.0, -1.0]]]
    assert select_keys(q, -torch.ones(1, 1, 1), k, reach, 2)[0, 0].sort().values.tolist() == [0, 2]


@pytest.mark.parametrize("kind", ["nsa", "dsa"])
@pytest.mark.parametrize("cut", [1, 5, 13, 28])
def test_later_tokens_alone_with_earlier_keys(kind, cut):
    """As a cache or a context-parallel rank has them; the first document goes on."""
    lengths = (20, 9)
    total = sum(lengths)
    tensors = {**_inputs(total), **_gates(total), **_indexer(total)}
    everywhere = reach_of_documents(total, _borders(lengths), 0, CPU)
    start = 0 if cut < 20 else 20
    borders = [0, *(b - cut for b in (20, 29) if b > cut)]
    behind = reach_of_documents(total - cut, torch.tensor(borders), cut - start, CPU)
    later = {
        name: x[:, start:] if name in ("k", "v", "ki") else x[:, cut:]
        for name, x in tensors.items()
    }
    if kind == "nsa":
        whole, part = _nsa(tensors, everywhere), _nsa(later, behind)
    else:
        (whole, _), (part, loss) = _dsa(tensors, everywhere, 4), _dsa(later, behind, 4)
        assert loss > 0 or cut == 28
    torch.testing.assert_close(part, whole[:, cut:], rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["nsa", "dsa"])
def test_padding_on_the_left_changes_nothing(kind):
    pads, length = (0, 5, 11), 21
    tensors = {**_inputs(length, 3), **_gates(length, 3), **_indexer(length, 3)}
    real = torch.arange(length) >= torch.tensor(pads)[:, None]
    reach = reach_of_rows(real, 0, length, CPU)
    run = _nsa if kind == "nsa" else lambda t, r: _dsa(t, r, 4)[0]
    padded = run(tensors, reach)
    assert padded.isfinite().all()
    for row, pad in enumerate(pads):
        alone = {name: x[row : row + 1, pad:] for name, x in tensors.items()}
        expected = run(alone, reach_of_rows(None, 0, length - pad, CPU))
        torch.testing.assert_close(padded[row : row + 1, pad:], expected, rtol=0, atol=1e-12)


def test_mass_that_the_selected_keys_hold():
    tensors = _inputs(29)
    reach = reach_of_documents(29, None, 0, CPU)
    queries = torch.tensor([0, 3, 28])
    every = torch.arange(29).expand(1, 29, 29).masked_fill(~reach.visible(0, 29), -1)
    held = mass_held(tensors["q"], tensors["k"], every, reach, queries, CHANNELS**-0.5)
    torch.testing.assert_close(held, torch.ones(1, 3).double())
    last = torch.arange(29).view(1, 29, 1)
    held = mass_held(tensors["q"], tensors["k"], last, reach, queries, CHANNELS**-0.5)
    assert held[0, 0] == 1 and 0 < held[0, 2] < 0.9


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"count": 2}, "2 blocks of 4 tokens are too few"),
        ({"block": 0}, "3 blocks of 0 tokens are too few"),
    ],
)
def test_refuses_sizes_that_make_no_sense(changes, message):
    tensors = {**_inputs(5), **_gates(5)}
    with pytest.raises(ValueError, match=message):
        _nsa(tensors, reach_of_documents(5, None, 0, CPU), **changes)


def test_refuses_shapes_that_do_not_fit():
    tensors = {**_inputs(5), **_gates(5)}
    with pytest.raises(ValueError, match="The reach is of 4 queries and 4 keys"):
        _nsa(tensors, reach_of_documents(4, None, 0, CPU))
    tensors["k"] = tensors["k"][:, :, :, :3]
    with pytest.raises(ValueError, match="do not fit together"):
        _nsa(tensors, reach_of_documents(5, None, 0, CPU))


class _Largest(TorchDispatchMode):
    """Numbers in the largest tensor that any operation makes."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(x, torch.Tensor):
                self.numbers = max(self.numbers, x.numel())
        return out


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_no_matrix_of_all_queries_and_keys(dense, monkeypatch):
    monkeypatch.setattr(gathered, "QUERIES", 32)
    length = 512
    tensors = {**_inputs(length), **_indexer(length), **_gates(length)}
    reach = reach_of_documents(length, None, 0, CPU)
    with _Largest() as largest:
        out, loss = _dsa(tensors, reach, 8, dense)
        (out.sum() + loss + _nsa(tensors, reach).sum()).backward()
    assert largest.numbers <= 32 * length * HEADS < length**2
