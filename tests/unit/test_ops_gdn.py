"""The chunk form of the gated delta rule against a token-by-token loop in fp64."""

import pytest
import torch
from torch import Tensor

from megatron_lt2.ops.gdn import (
    chunk_gated_delta_rule,
    gated_delta_rule_step,
    gdn_log_decay,
    l2_normalize,
)

NAMES = ("q", "k", "v", "g", "beta", "initial_state")
HEADS, KEY, VALUE = 2, 5, 3


def loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial_state: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, one token after another, with plain matrices."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    batch, length, heads, key = q.shape
    eye = torch.eye(key, dtype=q.dtype)
    state, outputs = initial_state, []
    for t in range(length):
        k_t, v_t, beta_t = k[:, t, ..., None], v[:, t, :, None, :], beta[:, t, :, None, None]
        erase = eye - beta_t * k_t @ k_t.transpose(-1, -2)
        state = g[:, t].exp()[..., None, None] * (erase @ state) + beta_t * k_t @ v_t
        outputs.append((q[:, t, ..., None, :] @ state).squeeze(-2) * key**-0.5)
    stacked = torch.stack(outputs, 1) if outputs else v.new_zeros(v.shape)
    return stacked, state


def make(
    batch: int,
    length: int,
    documents: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random, dtype=dtype)

    inputs = {
        "q": normal(batch, length, HEADS, KEY),
        "k": normal(batch, length, HEADS, KEY),
        "v": normal(batch, length, HEADS, VALUE),
        "g": -normal(batch, length, HEADS).square(),
        "beta": normal(batch, length, HEADS).sigmoid(),
        "initial_state": normal(documents or batch, HEADS, KEY, VALUE),
    }
    return {name: x.requires_grad_() for name, x in inputs.items()}


def chunked(x: dict[str, Tensor], **options) -> tuple[Tensor, Tensor]:
    return chunk_gated_delta_rule(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=x["initial_state"], **options
    )


def documents_by_loop(x: dict[str, Tensor], bounds: list[int]) -> tuple[Tensor, Tensor]:
    """Every document of a packed row on its own."""
    outputs, states = [], []
    for n, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        own = [x[name][:, start:end] for name in NAMES[:-1]]
        o, state = loop(*own, x["initial_state"][n : n + 1])
        outputs.append(o)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def gradients(result: tuple[Tensor, Tensor], x: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Gradients of a random linear function of the output and of the final state."""
    random = torch.Generator().manual_seed(99)
    weights = [torch.randn(y.shape, generator=random, dtype=y.dtype) for y in result]
    loss = sum((y * w).sum() for y, w in zip(result, weights, strict=True))
    return torch.autograd.grad(loss, list(x.values()), retain_graph=True)


def assert_same(result, expected, x, expected_x=None, rtol=1e-9, atol=1e-10) -> None:
    """Outputs, final states and all six gradients agree."""
    for y, z in zip(result, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=rtol, atol=atol)
    ours, theirs = gradients(result, x), gradients(expected, expected_x or x)
    for name, y, z in zip(NAMES, ours, theirs, strict=True):
        torch.testing.assert_close(y, z, rtol=rtol, atol=atol, msg=lambda m, n=name: f"d{n}: {m}")


@pytest.mark.parametrize("length", [1, 3, 63, 64, 65, 130])
def test_equals_the_loop(length: int) -> None:
    x = make(2, length)
    assert_same(chunked(x), loop(**x), x)


@pytest.mark.parametrize(
    "bounds",
    [
        [0, 1],
        [0, 1, 2, 3],
        [0, 64, 128],
        [0, 1, 65, 70],
        [0, 63, 64, 65, 193, 197],
        [0, 5, 5, 140, 141],
        [0, 0, 4],
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_packed_equals_separate_documents(bounds: list[int], dtype: torch.dtype) -> None:
    x = make(1, bounds[-1], documents=len(bounds) - 1)
    packed = chunked(x, cu_seqlens=torch.tensor(bounds, dtype=dtype))
    assert_same(packed, documents_by_loop(x, bounds), x)


@pytest.mark.parametrize("chunk_size", [1, 16, 64])
def test_chunk_size_changes_nothing_else(chunk_size: int) -> None:
    x = make(1, 37, documents=2)
    bounds = [0, 20, 37]
    result = chunked(x, cu_seqlens=torch.tensor(bounds), chunk_size=chunk_size)
    assert_same(result, documents_by_loop(x, bounds), x)


def test_no_state_means_zero_state() -> None:
    x = make(2, 70)
    zero = {**x, "initial_state": torch.zeros_like(x["initial_state"])}
    result = chunk_gated_delta_rule(*(x[name] for name in NAMES[:-1]))
    for y, z in zip(result, loop(**zero), strict=True):
        torch.testing.assert_close(y, z, rtol=1e-9, atol=1e-10)


def test_empty_input_returns_the_state() -> None:
    for x, borders in ((make(2, 0), None), (make(1, 0, documents=2), torch.tensor([0, 0, 0]))):
        o, state = chunked(x, cu_seqlens=borders)
        assert o.shape == x["v"].shape
        torch.testing.assert_close(state, x["initial_state"], rtol=0, atol=0)


def test_document_cannot_see_another() -> None:
    bounds = [0, 70, 75, 150]
    x = {name: y.detach().float() for name, y in make(1, 150, documents=3).items()}
    before = chunked(x, cu_seqlens=torch.tensor(bounds))
    changed = {**x, **{name: x[name].clone() for name in ("q", "k", "v", "g", "beta")}}
    for name in ("q", "k", "v", "beta"):
        changed[name][:, 71] = float("nan")
    changed["g"][:, 71] = -30.0
    after = chunked(changed, cu_seqlens=torch.tensor(bounds))
    others = [t for t in range(150) if not 70 <= t < 75]
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][[0, 2]], after[1][[0, 2]])
    assert after[1][1].isnan().any()


def test_causal() -> None:
    x = {name: y.detach() for name, y in make(1, 100).items()}
    before = chunked(x)[0]
    x["v"][:, 80] += 1.0
    after = chunked(x)[0]
    assert torch.equal(before[:, :80], after[:, :80])
    assert not torch.equal(before[:, 80], after[:, 80])


@pytest.mark.parametrize("cut", [1, 17, 64, 99, 129])
def test_state_carries_over_a_cut(cut: int) -> None:
    x = make(2, 130)
    parts = [{n: x[n][:, s] for n in NAMES[:-1]} for s in (slice(cut), slice(cut, None))]
    first, state = chunked({**parts[0], "initial_state": x["initial_state"]})
    second, state = chunked({**parts[1], "initial_state": state})
    assert_same((torch.cat([first, second], 1), state), chunked(x), x)


def test_steps_equal_the_chunk_form() -> None:
    x = make(2, 67)
    state, outputs = x["initial_state"], []
    for t in range(67):
        o, state = gated_delta_rule_step(*(x[name][:, t] for name in NAMES[:-1]), state)
        outputs.append(o)
    assert_same((torch.stack(outputs, 1), state), chunked(x), x)


def test_step_keeps_the_old_state() -> None:
    x = make(1, 1)
    old = x["initial_state"].detach().clone()
    with torch.no_grad():
        gated_delta_rule_step(*(x[name][:, 0] for name in NAMES[:-1]), x["initial_state"])
    assert torch.equal(x["initial_state"], old)


@pytest.mark.parametrize("decay", [-50.0, -1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_strong_decay_stays_finite(decay: float, dtype: torch.dtype) -> None:
    x = make(1, 130, dtype=dtype)
    g = x["g"].detach().clone()
    g[:, 3:100:2] = decay
    g[:, 64:70] = decay
    x["g"] = g.requires_grad_()
    result = chunked(x)
    assert all(y.isfinite().all() for y in (*result, *gradients(result, x)))
    if dtype == torch.float64:
        assert_same(result, loop(**x), x)


def test_repeated_keys_stay_accurate() -> None:
    """Undamped writes to one key make a dense system, whose powers are huge."""
    x = {name: y.detach() for name, y in make(1, 64).items()}
    x["k"] = x["k"][:, :1].expand_as(x["k"]).contiguous()
    x["beta"], x["g"] = torch.ones_like(x["beta"]), torch.zeros_like(x["g"])
    expected = loop(**x)
    result = chunked({name: y.float() for name, y in x.items()})
    for y, z in zip(result, expected, strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


def test_no_decay_is_the_plain_delta_rule() -> None:
    x = {name: y.detach() for name, y in make(1, 70).items()}
    x["g"] = torch.zeros_like(x["g"])
    q, k = l2_normalize(x["q"]), l2_normalize(x["k"])
    state, outputs = x["initial_state"], []
    for t in range(70):
        recalled = torch.einsum("bhk,bhkv->bhv", k[:, t], state)
        change = x["beta"][:, t, :, None] * (x["v"][:, t] - recalled)
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state) * KEY**-0.5)
    o, final = chunked(x)
    torch.testing.assert_close(o, torch.stack(outputs, 1), rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(final, state, rtol=1e-9, atol=1e-10)


def test_no_writes_is_pure_decay() -> None:
    x = {name: y.detach() for name, y in make(2, 70).items()}
    x["beta"] = torch.zeros_like(x["beta"])
    total = x["g"].sum(1).exp()[..., None, None]
    torch.testing.assert_close(chunked(x)[1], total * x["initial_state"], rtol=1e-9, atol=1e-14)


def test_scale_and_normalisation_can_be_chosen() -> None:
    x = {name: y.detach() for name, y in make(1, 20).items()}
    default = chunked(x)[0]
    torch.testing.assert_close(chunked(x, scale=3.0)[0], default * 3 * KEY**0.5)
    normal = {**x, "q": l2_normalize(x["q"]), "k": l2_normalize(x["k"])}
    torch.testing.assert_close(chunked(normal, qk_l2norm=False)[0], default)
    assert not torch.allclose(chunked(x, qk_l2norm=False)[0], default)


def test_16_bit_inputs_are_computed_in_fp32() -> None:
    x = {name: y.detach().bfloat16() for name, y in make(1, 70).items()}
    o, state = chunked(x)
    exact_o, exact_state = chunked({name: y.float() for name, y in x.items()})
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(o, exact_o.bfloat16()) and torch.equal(state, exact_state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunked(x)[1], exact_state)


def test_log_decay() -> None:
    a, A_log, dt_bias = torch.randn(2, 3, 4), torch.randn(4), torch.randn(4)
    expected = -torch.exp(A_log) * torch.log1p(torch.exp(a + dt_bias))
    torch.testing.assert_close(gdn_log_decay(a, A_log, dt_bias), expected)
    assert gdn_log_decay(a.bfloat16(), A_log.bfloat16(), dt_bias).dtype == torch.float32
    assert gdn_log_decay(a.double(), A_log, dt_bias).dtype == torch.float64
    assert (gdn_log_decay(a * 1e4, A_log, dt_bias) <= 0).all()


def test_wrong_shapes_are_refused() -> None:
    x = {name: y.detach() for name, y in make(2, 4).items()}
    wrong = {
        "q": x["q"][:, :, :1],
        "v": x["v"][:, :3],
        "g": x["g"][..., :1],
        "beta": x["beta"][..., None],
        "initial_state": x["initial_state"][:1],
    }
    for name, y in wrong.items():
        with pytest.raises(ValueError, match="shape"):
            chunked({**x, name: y})
    with pytest.raises(ValueError, match="shape"):
        gated_delta_rule_step(*(x[name][:, 0] for name in NAMES[:-1]), x["initial_state"][:1])
