"""Window attention: the blocked form equals dense masked attention, gradients too; its costs."""

import math

import pytest
import torch

from megatron_lt2.kernels import window as kernel
from megatron_lt2.ops import window as ops
from megatron_lt2.ops.window import MIN_BLOCK, window_attention

DOCUMENTS = {
    "one": None,
    "three": [70, 1, 134],
    "length one": [1, 1, 100, 1, 102],
    "empty tail": [150, 55, 0],
}
LENGTH = 205


def _inputs(length, heads=4, groups=2, batch=1, k_dim=6, v_dim=6, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((heads, k_dim), (groups, k_dim), (groups, v_dim))
    return [
        torch.randn(batch, length, *shape, generator=generator, dtype=dtype).requires_grad_()
        for shape in shapes
    ]


def _dense(q, k, v, window, lengths=None, scale=None):
    """Every pair of tokens, in one matrix."""
    length, repeats = q.shape[1], q.shape[2] // k.shape[2]
    k, v = (x.repeat_interleave(repeats, dim=2) for x in (k, v))
    scores = torch.einsum("bqhk,bshk->bhqs", q, k) * (scale or q.shape[-1] ** -0.5)
    place = torch.arange(length)
    distance = place[:, None] - place[None, :]
    document = torch.repeat_interleave(torch.tensor(lengths or [length]))
    seen = (distance >= 0) & (distance < window) & (document[:, None] == document[None, :])
    weights = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return torch.einsum("bhqs,bshv->bqhv", weights, v)


def _with_gradients(function, inputs):
    out = function(*inputs)
    generator = torch.Generator().manual_seed(9)
    weights = torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), inputs)]


def _assert_equal(ours, theirs, tolerance=1e-12):
    for name, a, b in zip(("output", "dq", "dk", "dv"), ours, theirs, strict=True):
        assert torch.isfinite(a).all(), name
        torch.testing.assert_close(
            a, b, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("window", [1, 2, 7, MIN_BLOCK, MIN_BLOCK + 1, LENGTH - 1, LENGTH, 1000])
@pytest.mark.parametrize("name", DOCUMENTS)
def test_equals_dense_attention_on_packed_documents(name, window):
    lengths = DOCUMENTS[name]
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    inputs = _inputs(LENGTH)
    ours = _with_gradients(
        lambda q, k, v: window_attention(q, k, v, window, cu_seqlens=cu_seqlens), inputs
    )
    _assert_equal(ours, _with_gradients(lambda q, k, v: _dense(q, k, v, window, lengths), inputs))


@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 127, 129, 333])
@pytest.mark.parametrize("window", [1, 5, 66])
def test_equals_dense_attention_on_a_batch(length, window):
    inputs = _inputs(length, heads=3, groups=1, batch=3, k_dim=4, v_dim=10)
    ours = _with_gradients(lambda q, k, v: window_attention(q, k, v, window, scale=0.7), inputs)
    _assert_equal(ours, _with_gradients(lambda q, k, v: _dense(q, k, v, window, scale=0.7), inputs))


@pytest.mark.parametrize("earlier", [1, 5, 63, 64, 65, 300])
@pytest.mark.parametrize("window", [1, 2, 7, 66, 1000])
@pytest.mark.parametrize("lengths", [None, [1, 9], [70, 60], [3, 127, 200]], ids=str)
def test_keys_before_the_first_query_equal_a_longer_row(earlier, window, lengths):
    length = sum(lengths) if lengths else 75
    cu_seqlens = None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)
    inputs = _inputs(length + earlier, batch=2 if lengths is None else 1)

    def ours(q, k, v):
        own = q[:, earlier:]
        return window_attention(own, k, v, window, cu_seqlens=cu_seqlens, earlier=earlier)

    def longer(q, k, v):
        documents = None if lengths is None else [earlier + lengths[0], *lengths[1:]]
        return _dense(q, k, v, window, documents)[:, earlier:]

    _assert_equal(_with_gradients(ours, inputs), _with_gradients(longer, inputs))


def test_fp32_agrees_with_fp64():
    lengths = DOCUMENTS["length one"]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    single = _inputs(LENGTH, dtype=torch.float32)
    double = [x.detach().double().requires_grad_() for x in single]
    ours = _with_gradients(
        lambda q, k, v: window_attention(q, k, v, 9, cu_seqlens=cu_seqlens), single
    )
    theirs = _with_gradients(lambda q, k, v: _dense(q, k, v, 9, lengths), double)
    _assert_equal([x.double() for x in ours], theirs, tolerance=1e-5)


def test_a_window_of_one_returns_the_value():
    q, k, v = _inputs(100, heads=2)
    assert torch.equal(window_attention(q, k, v, 1), v)


def test_no_tokens():
    q, k, v = _inputs(0, v_dim=3)
    assert window_attention(q, k, v, 4).shape == (1, 0, 4, 3)


def test_no_matrix_of_all_pairs_is_made(monkeypatch):
    """Doubling the row doubles the mask."""
    sizes = []
    visible = ops._visible

    def watched(*args):
        mask = visible(*args)
        sizes.append(mask.numel())
        return mask

    monkeypatch.setattr(ops, "_visible", watched)
    for length in (1024, 2048):
        q, k, v = _inputs(length, heads=1, groups=1, k_dim=2, v_dim=2)
        window_attention(q, k, v, 100)
    assert sizes[1] < 2.1 * sizes[0]
    assert sizes[1] < 2048 * 2048 / 8


@pytest.mark.parametrize(
    "shapes, window, message",
    [
        ([(1, 5, 2, 4)] * 3, 0, "holds at least the token itself, not 0"),
        ([(1, 5, 4)] * 3, 3, "needs .B, T, heads, channels."),
        ([(1, 5, 2, 4), (1, 6, 2, 4), (1, 6, 2, 4)], 3, "do not fit together"),
        ([(1, 5, 3, 4), (1, 5, 2, 4), (1, 5, 2, 4)], 3, "choose a divisor of 3"),
    ],
)
def test_refuses(shapes, window, message):
    with pytest.raises(ValueError, match=message):
        window_attention(*(torch.zeros(shape) for shape in shapes), window)


def test_refuses_another_number_of_earlier_keys():
    q, k, v = _inputs(5)
    with pytest.raises(ValueError, match="do not fit together"):
        window_attention(q[:, 2:], k, v, 2, earlier=3)


def test_refuses_borders_of_another_row():
    q, k, v = _inputs(5)
    with pytest.raises(ValueError, match="row length 5"):
        window_attention(q, k, v, 2, cu_seqlens=torch.tensor([0, 4]))


def test_kernel_choice_on_a_cpu_is_the_plain_form():
    q, k, v = _inputs(70)
    for backend in ("torch", "fla"):
        assert torch.equal(
            kernel.window_attention(q, k, v, 3, backend=backend), window_attention(q, k, v, 3)
        )
    with pytest.raises(ValueError, match="backend is 'fla' or 'torch'"):
        kernel.window_attention(q, k, v, 3, backend="auto")


@pytest.mark.parametrize("window, left", [(None, -1), (1, 0), (16, 15)])
def test_flash_attention_counts_the_tokens_before_the_query(monkeypatch, window, left):
    """torch's left window excludes the query itself, ours includes it; key heads are repeated."""
    given = _watched_flash(monkeypatch)
    q, k, v = (x[0] for x in _inputs(8))
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    kernel.varlen_attention(q, k, v, bounds, 5, scale=0.5, window=window)
    kernel._flash_parameters.cache_clear()
    assert given == {
        "heads": 4,
        "queries": ([0, 3, 8], 5),
        "keys": ([0, 3, 8], 5),
        "scale": 0.5,
        "window": (left, 0),
    }


def _watched_flash(monkeypatch):
    """Stands in for torch's variable-length attention and keeps what it is given."""
    given = {}

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
    ):
        assert len(query) == cu_seq_q[-1] and len(key) == len(value) == cu_seq_k[-1]
        given.update(heads=key.shape[1], scale=scale, window=window_size)
        given.update(queries=(cu_seq_q.tolist(), max_q), keys=(cu_seq_k.tolist(), max_k))
        return query

    import torch.nn.attention.varlen as varlen

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    kernel._flash_parameters.cache_clear()
    return given


def test_flash_attention_gets_the_borders_of_more_keys_than_queries(monkeypatch):
    """The keys before the first query belong to the first document, in every row of a batch."""
    given = _watched_flash(monkeypatch)
    q, k, v = _inputs(12, batch=3)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    kernel.varlen_attention(q[0, 4:], k[0], v[0], bounds, 5, earlier=4)
    assert given["queries"] == ([0, 3, 8], 5)
    assert given["keys"] == ([0, 7, 12], 9)
    assert given["window"] == (-1, 0)
    kernel.varlen_rows(q[:, 4:], k, v, window=6)
    kernel._flash_parameters.cache_clear()
    assert given["queries"] == ([0, 8, 16, 24], 8)
    assert given["keys"] == ([0, 12, 24, 36], 12)
    assert given["window"] == (5, 0)
