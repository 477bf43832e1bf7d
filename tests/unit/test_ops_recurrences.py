"""The chunk form and the step of every recurrence against a token-by-token loop in fp64."""

import random

import pytest
import torch
from torch import Tensor

from megatron_lt2.ops.linear import chunk_normalized_linear_attention
from megatron_lt2.ops.mlstm import chunk_mlstm
from tests.unit.recurrences import (
    BY_NAME,
    HEADS,
    KEY,
    MIXERS,
    RETENTION,
    VALUE,
    Mixer,
    assert_same,
    documents_by_loop,
    gradients,
    make,
    run_chunk,
    run_loop,
    run_steps,
)

every_mixer = pytest.mark.parametrize("mixer", MIXERS, ids=str)
DECAYING = [mixer for mixer in MIXERS if mixer.name in ("simple_gla", "gla", "gdn", "kda", "mlstm")]


def assert_close(ours: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@every_mixer
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 100, 500])
def test_equals_the_loop(mixer: Mixer, length: int) -> None:
    x = make(mixer, 2, length)
    assert_same(run_chunk(mixer, x), run_loop(mixer, x), x)


@every_mixer
@pytest.mark.parametrize(
    "bounds",
    [
        [0, 1],
        [0, 1, 2, 3],
        [0, 64, 128],
        [0, 63, 64, 65, 193, 197],
        [0, 5, 5, 140, 141],
        [0, 0, 4],
        [0, 70, 75, 75],
    ],
)
def test_packed_equals_separate_documents(mixer: Mixer, bounds: list[int]) -> None:
    x = make(mixer, 1, bounds[-1], documents=len(bounds) - 1)
    expected = documents_by_loop(mixer, x, bounds)
    for dtype in (torch.int32, torch.int64):
        packed = run_chunk(mixer, x, cu_seqlens=torch.tensor(bounds, dtype=dtype))
        assert_same(packed, expected, x)


@every_mixer
@pytest.mark.parametrize("chunk_size", [1, 16, 24, 37])
def test_chunk_size_changes_nothing_else(mixer: Mixer, chunk_size: int) -> None:
    x, bounds = make(mixer, 1, 60, documents=2), [0, 22, 60]
    result = run_chunk(mixer, x, cu_seqlens=torch.tensor(bounds), chunk_size=chunk_size)
    assert_same(result, documents_by_loop(mixer, x, bounds), x)


@every_mixer
def test_state_carries_over_cuts(mixer: Mixer) -> None:
    x = make(mixer, 2, 150)
    cuts = [0, *sorted(random.Random(3).sample(range(1, 150), 4)), 150]
    state, outputs = x["initial_state"], []
    for start, end in zip(cuts, cuts[1:], strict=False):
        own = {name: x[name][:, start:end] for name in mixer.names()}
        o, state = run_chunk(mixer, {**own, "initial_state": state})
        outputs.append(o)
    assert_same((torch.cat(outputs, 1), state), run_chunk(mixer, x), x)


@every_mixer
def test_steps_equal_the_chunk_form(mixer: Mixer) -> None:
    x = make(mixer, 2, 67)
    old = x["initial_state"].detach().clone()
    assert_same(run_steps(mixer, x), run_chunk(mixer, x), x)
    assert torch.equal(x["initial_state"], old)


@every_mixer
def test_no_state_means_zero_state(mixer: Mixer) -> None:
    x = make(mixer, 2, 70)
    if mixer.name == "mlstm":
        o = chunk_mlstm(*(x[name] for name in mixer.names()))[0]
    else:
        o, state = mixer.chunk(*(x[name] for name in mixer.names()))
        zero = {**x, "initial_state": torch.zeros_like(x["initial_state"])}
        assert_close(state, run_loop(mixer, zero)[1])
    zero = {**x, "initial_state": torch.zeros_like(x["initial_state"])}
    assert_close(o, run_loop(mixer, zero)[0])


@every_mixer
def test_empty_input_returns_the_state(mixer: Mixer) -> None:
    for x, borders in (
        (make(mixer, 2, 0), None),
        (make(mixer, 1, 0, documents=2), torch.tensor([0, 0, 0])),
    ):
        o, state = run_chunk(mixer, x, cu_seqlens=borders)
        assert o.shape == x["v"].shape
        torch.testing.assert_close(state, x["initial_state"], rtol=1e-15, atol=0)


@every_mixer
def test_document_cannot_see_another(mixer: Mixer) -> None:
    borders = torch.tensor([0, 70, 75, 150])
    x = {name: y.detach().float() for name, y in make(mixer, 1, 150, documents=3).items()}
    before = run_chunk(mixer, x, cu_seqlens=borders)
    changed = {name: y.clone() for name, y in x.items()}
    for name in mixer.names():
        changed[name][:, 71] = float("nan")
    after = run_chunk(mixer, changed, cu_seqlens=borders)
    others = [t for t in range(150) if not 70 <= t < 75]
    assert torch.equal(before[0][:, others], after[0][:, others])
    assert torch.equal(before[1][[0, 2]], after[1][[0, 2]])
    assert after[1][1].isnan().any()


@every_mixer
def test_causal(mixer: Mixer) -> None:
    x = {name: y.detach() for name, y in make(mixer, 1, 100).items()}
    before = run_chunk(mixer, x)[0]
    x["v"][:, 80] += 1.0
    after = run_chunk(mixer, x)[0]
    assert torch.equal(before[:, :80], after[:, :80])
    assert not torch.equal(before[:, 80], after[:, 80])


@pytest.mark.parametrize("mixer", [m for m in MIXERS if m.name != "retention"], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_tokens_without_key_and_decay_do_nothing(mixer: Mixer, packed: bool) -> None:
    """What stands where an exported model has padding; the input gate may be anything there."""
    x = {name: y.detach() for name, y in make(mixer, 1, 90).items()}
    real = [t for t in range(90) if not (t < 7 or 20 <= t < 41 or t >= 85)]
    for name in ("k", "g", "f"):
        if name in x:
            x[name][:, [t for t in range(90) if t not in real]] = 0
    if mixer.name == "normalized":  # its feature map would not keep a key of 0
        x["k"][:, real] = x["k"][:, real].abs()
        mixer = Mixer("plain", {}, mixer.loop, chunk_normalized_linear_attention, mixer.step, True)
        x["q"] = x["q"].abs()
    borders = {"cu_seqlens": torch.tensor([0, 90])} if packed else {}
    o, state = run_chunk(mixer, x, **borders)
    fewer = {name: y if name == "initial_state" else y[:, real] for name, y in x.items()}
    expected = run_chunk(mixer, fewer)
    assert_close(o[:, real], expected[0])
    assert_close(state, expected[1])


@pytest.mark.parametrize("mixer", DECAYING, ids=str)
@pytest.mark.parametrize("decay", [-50.0, -1e4])
def test_strong_decay_stays_finite(mixer: Mixer, decay: float) -> None:
    gate = "f" if mixer.name == "mlstm" else "g"
    for dtype in (torch.float64, torch.float32):
        x = make(mixer, 1, 130, dtype=dtype)
        g = x[gate].detach().clone()
        g[:, 3:100:2] = decay
        g[:, 64:70] = decay
        x[gate] = g.requires_grad_()
        result = run_chunk(mixer, x)
        assert all(y.isfinite().all() for y in (*result, *gradients(result, x)))
        if dtype == torch.float64:
            assert_same(result, run_loop(mixer, x), x)


@pytest.mark.parametrize("mixer", [BY_NAME["gla"], BY_NAME["kda"]], ids=str)
def test_channels_may_decay_very_differently(mixer: Mixer) -> None:
    """A factor e^{-G} a key would overflow here, and one common reference a head would vanish."""
    x = make(mixer, 1, 130)
    rates = torch.tensor([0.0, -1e-3, -1.0, -30.0, -300.0], dtype=torch.float64)
    x["g"] = (x["g"].detach() * 0.1 + rates).requires_grad_()
    assert_same(run_chunk(mixer, x), run_loop(mixer, x), x)
    wide, narrow = (
        {n: y.detach().to(d) for n, y in x.items()} for d in (torch.float64, torch.float)
    )
    for y, z in zip(run_chunk(mixer, narrow), run_chunk(mixer, wide), strict=True):
        torch.testing.assert_close(y.double(), z, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("gated", "plain"),
    [("simple_gla", "linear"), ("gla", "linear"), ("gdn", "delta"), ("kda", "delta")],
)
def test_decay_one_is_the_ungated_rule(gated: str, plain: str) -> None:
    x = make(BY_NAME[gated], 2, 100)
    x["g"] = torch.zeros_like(x["g"]).requires_grad_()
    others = {name: y for name, y in x.items() if name != "g"}
    ours, theirs = run_chunk(BY_NAME[gated], x), run_chunk(BY_NAME[plain], others)
    assert_same(ours, theirs, others)


@pytest.mark.parametrize(("channel", "head"), [("gla", "simple_gla"), ("kda", "gdn")])
def test_equal_decay_of_all_channels_is_decay_of_the_head(channel: str, head: str) -> None:
    x = make(BY_NAME[head], 2, 100)
    expanded = {**x, "g": x["g"].unsqueeze(-1).expand(*x["g"].shape, KEY)}
    assert_same(run_chunk(BY_NAME[channel], expanded), run_chunk(BY_NAME[head], x), x)


def test_constant_decay_is_a_gate_that_never_changes() -> None:
    x = make(BY_NAME["retention"], 2, 100)
    gated = {**x, "g": RETENTION.expand(2, 100, HEADS)}
    ours, theirs = run_chunk(BY_NAME["retention"], x), run_chunk(BY_NAME["simple_gla"], gated)
    assert_same(ours, theirs, x)


@pytest.mark.parametrize("name", ["gdn", "kda"])
def test_no_writes_is_pure_decay(name: str) -> None:
    x = {n: y.detach() for n, y in make(BY_NAME[name], 2, 70).items()}
    x["beta"] = torch.zeros_like(x["beta"])
    total = x["g"].sum(1).exp()
    total = total[..., None] if name == "kda" else total[..., None, None]
    state = run_chunk(BY_NAME[name], x)[1]
    torch.testing.assert_close(state, total * x["initial_state"], rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("mixer", MIXERS[:7], ids=str)
def test_one_token_from_nothing_is_an_outer_product(mixer: Mixer) -> None:
    x = {name: y.detach() for name, y in make(mixer, 2, 1).items()}
    x["initial_state"] = torch.zeros_like(x["initial_state"])
    k = x["k"][:, 0]
    if "beta" in x:
        k = k / (k.square().sum(-1, keepdim=True) + 1e-6).sqrt() * x["beta"][:, 0, :, None]
    expected = torch.einsum("bhk,bhv->bhkv", k, x["v"][:, 0])
    assert_close(run_chunk(mixer, x)[1], expected)


@pytest.mark.parametrize("mixer", MIXERS[:7], ids=str)
def test_scale_multiplies_the_output(mixer: Mixer) -> None:
    x = {name: y.detach() for name, y in make(mixer, 1, 20).items()}
    default, state = run_chunk(mixer, x)
    scaled, same_state = run_chunk(mixer, x, scale=3.0)
    assert_close(scaled, default * 3 * KEY**0.5)
    assert_close(same_state, state)
    token = [x[name][:, 0] for name in mixer.names()]
    assert_close(
        mixer.step(*token, x["initial_state"], scale=3.0)[0],
        mixer.step(*token, x["initial_state"])[0] * 3 * KEY**0.5,
    )


# The table puts a feature map before "normalized", which has to round its result.
@pytest.mark.parametrize("mixer", [m for m in MIXERS if m.name != "normalized"], ids=str)
def test_16_bit_inputs_are_computed_in_fp32(mixer: Mixer) -> None:
    x = {name: y.detach().bfloat16() for name, y in make(mixer, 1, 70).items()}
    x["initial_state"] = x["initial_state"].float()
    o, state = run_chunk(mixer, x)
    exact_o, exact_state = run_chunk(mixer, {name: y.float() for name, y in x.items()})
    assert o.dtype == torch.bfloat16 and state.dtype == torch.float32
    assert torch.equal(o, exact_o.bfloat16()) and torch.equal(state, exact_state)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(run_chunk(mixer, x)[1], exact_state)
    token = [x[name][:, 0] for name in mixer.names()]
    assert mixer.step(*token, x["initial_state"])[0].dtype == torch.bfloat16


@every_mixer
def test_wrong_shapes_are_refused(mixer: Mixer) -> None:
    x = {name: y.detach() for name, y in make(mixer, 2, 4).items()}
    wrong = {
        "q": x["q"][:, :, :1],
        "v": x["v"][:, :3],
        "initial_state": x["initial_state"][:1],
        **{name: x[name][..., :1] for name in mixer.gates},
    }
    for name, y in wrong.items():
        with pytest.raises(ValueError, match="shape"):
            run_chunk(mixer, {**x, name: y})
    token = [x[name][:, 0] for name in mixer.names()]
    with pytest.raises(ValueError, match="shape"):
        mixer.step(*token, x["initial_state"][:1])
    with pytest.raises(ValueError, match="batch size is 2"):
        run_chunk(mixer, x, cu_seqlens=torch.tensor([0, 4]))
    assert x["v"].shape[-1] == VALUE
