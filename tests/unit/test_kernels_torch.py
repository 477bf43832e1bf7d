"""The kernels' torch backend is the plain operation, and decoding is its step."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lt2.kernels import backend
from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.kernels.gdn import gated_delta_net
from megatron_lt2.kernels.kda import kimi_delta_attention
from megatron_lt2.kernels.mlstm import extra_columns
from megatron_lt2.kernels.norms import gated_rms_norm, rms_norm
from megatron_lt2.kernels.rotary import rotary
from megatron_lt2.ops import conv, norms
from megatron_lt2.ops.gdn import chunk_gated_delta_rule
from megatron_lt2.ops.gla import chunk_gla
from megatron_lt2.ops.kda import chunk_kda
from megatron_lt2.ops.linear import chunk_normalized_linear_attention, feature_map
from megatron_lt2.ops.mlstm import chunk_mlstm
from megatron_lt2.ops.rope import apply_rope, rope_cos_sin
from megatron_lt2.ops.simple_gla import chunk_simple_gla
from tests.kernel_cases import KERNELS, MLSTM_M, Inputs, Kernel

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
BY_NAME = {kernel.name: kernel for kernel in KERNELS}
HEADS, KEY, VALUE = 2, 4, 6


def gates(x: Inputs, allow_neg_eigval: bool) -> tuple[Tensor, Tensor]:
    """Log decay and write strength by their formulas."""
    bias = x["dt_bias"].view(x["a"].shape[2:])
    rate = x["A_log"].exp().view(-1, *[1] * (x["a"].ndim - 3))
    beta = 1 / (1 + (-x["b"]).exp())
    return -rate * F.softplus(x["a"] + bias), beta * (2 if allow_neg_eigval else 1)


def by_hand(kernel: Kernel, x: Inputs, borders: Tensor | None) -> list[Tensor]:
    """What the kernel should return, from the plain operations."""
    q, k, v, state = x["q"], x["k"], x["v"], x["initial_state"]
    own = {"initial_state": state, "cu_seqlens": borders}
    if "scale" in kernel.options:
        own["scale"] = kernel.options["scale"]
    name = kernel.name.split("_")[0]
    if name in ("linear", "mamba2"):
        return [*chunk_simple_gla(q, k, v, x.get("g"), **own)]
    if name == "retnet":
        decay = torch.log(1 - 2.0 ** (-5 - torch.arange(HEADS))).expand(q.shape[:3])
        return [*chunk_simple_gla(q, k, v, decay, **own)]
    if name in ("gla", "hgrn2"):
        return [*chunk_gla(q, k, v, x["g"], **own)]
    if name == "deltanet":
        return [*chunk_gated_delta_rule(q, k, v, None, x["beta"], **own)]
    if name in ("gdn", "kda"):
        g, beta = gates(x, kernel.options.get("allow_neg_eigval", False))
        return [*(chunk_kda if name == "kda" else chunk_gated_delta_rule)(q, k, v, g, beta, **own)]
    if name == "mlstm":
        own["initial_state"] = state, torch.full_like(state[..., 0, 0], MLSTM_M)
        h, final = chunk_mlstm(q, k, v, x["i"], x["f"], **own)
        return [h, *final]
    assert name == "normalized"
    q, k = (feature_map(y, "elu1") for y in (q, k))
    return [*chunk_normalized_linear_attention(q, k, v, **own)]


@pytest.mark.parametrize("bounds", [None, [0, 3, 20]])
@pytest.mark.parametrize("kernel", [k for k in KERNELS if not k.padding], ids=lambda k: k.name)
def test_is_the_plain_operation(kernel: Kernel, bounds: list[int] | None) -> None:
    borders = None if bounds is None else torch.tensor(bounds)
    x = kernel.inputs(2 if bounds is None else 1, 20, HEADS, KEY, VALUE, 2)
    ours, expected = kernel("torch", x, borders), by_hand(kernel, x, borders)
    assert len(ours) == len(expected)
    for y, z in zip(ours, expected, strict=True):
        torch.testing.assert_close(y, z)
    (only,) = kernel("torch", x, borders, output_final_state=False)
    torch.testing.assert_close(only, ours[0], rtol=0, atol=0)


@every_kernel
def test_one_token_of_decoding_takes_the_step(kernel: Kernel, monkeypatch) -> None:
    """Without gradients and with a state; the chunk form agrees, but rounds differently."""
    x = kernel.inputs(3, 1, HEADS, KEY, VALUE, 3)
    expected = kernel("torch", {n: y.requires_grad_() for n, y in x.items()})
    taken = []
    real = backend.one_token

    def watched(*arguments) -> bool:
        taken.append(real(*arguments))
        return taken[-1]

    monkeypatch.setattr(backend, "one_token", watched)
    with torch.no_grad():
        ours = kernel("torch", x)
    assert taken == [True]
    for y, z in zip(ours, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-6)
    kernel("torch", x)  # with gradients
    x = {n: y.detach() for n, y in x.items()}
    kernel("torch", kernel.inputs(1, 1, HEADS, KEY, VALUE, 1), torch.tensor([0, 1]))
    kernel("torch", kernel.inputs(1, 2, HEADS, KEY, VALUE, 1))
    del x["initial_state"]
    kernel("torch", x)
    assert taken == [True, False, False, False, False]


@pytest.mark.parametrize("name", ["gdn_padding", "kda_padding"])
def test_padding_does_nothing(name: str) -> None:
    kernel = BY_NAME[name]
    x = kernel.inputs(2, 30, HEADS, KEY, VALUE, 2)
    function = kimi_delta_attention if name.startswith("kda") else gated_delta_net
    names = ["q", "k", "v", "a", "b"]
    real = torch.ones(30, dtype=torch.bool)
    real[[0, 1, 2, 9, 17, 29]] = False
    own = {"backend": "torch", "initial_state": x["initial_state"], "output_final_state": True}
    o, state = function(
        *(x[n] for n in names), x["A_log"], x["dt_bias"], real_BT=real.expand(2, 30), **own
    )
    expected = function(*(x[n][:, real] for n in names), x["A_log"], x["dt_bias"], **own)
    torch.testing.assert_close(o[:, real], expected[0])
    torch.testing.assert_close(state, expected[1])


def test_values_are_filled_up_to_aligned_rows() -> None:
    for value in range(1, 40):
        assert extra_columns(value) >= 1 and (value + extra_columns(value)) % 8 == 0


def test_conv_and_norms() -> None:
    random = torch.Generator().manual_seed(0)
    x, gate = torch.randn(2, 2, 9, 12, generator=random).unbind()
    taps, bias, weight = torch.randn(12, 4), torch.randn(12), torch.randn(12)
    options = {"activation": None, "bias_D": bias}
    y, final = causal_conv1d(x, taps, backend="torch", output_final_state=True, **options)
    expected = conv.causal_conv1d(x, taps, **options)
    assert torch.equal(y, expected[0]) and final is not None and torch.equal(final, expected[1])
    assert causal_conv1d(x, taps, backend="torch")[1] is None

    assert torch.equal(rms_norm(x, weight, 1e-5, backend="torch"), norms.rms_norm(x, weight, 1e-5))
    for options in ({}, {"activation": "sigmoid"}, {"gate_first": True}):
        ours = gated_rms_norm(x, gate, weight, 1e-5, backend="torch", **options)
        assert torch.equal(ours, norms.gated_rms_norm(x, gate, weight, 1e-5, **options))


@pytest.mark.parametrize("bounds", [None, [0, 3, 3, 9]])
def test_rotary_counts_from_the_start_of_each_document(bounds: list[int] | None) -> None:
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 9, 3, 6, generator=random), torch.randn(1, 9, 2, 6, generator=random)
    positions = list(range(9)) if bounds is None else [*range(3), *range(6)]
    cos, sin = rope_cos_sin(torch.tensor(positions)[None], 6, 100.0)
    borders = None if bounds is None else torch.tensor(bounds)
    for given in (None, torch.tensor(positions)[None]):
        ours = rotary(q, k, theta=100.0, backend="torch", positions_BT=given, cu_seqlens=borders)
        for y, x in zip(ours, (q, k), strict=True):
            assert torch.equal(y, apply_rope(x, cos, sin))
    with pytest.raises(ValueError, match="batch size is 2"):
        rotary(q.expand(2, 9, 3, 6), k, theta=1e4, backend="torch", cu_seqlens=torch.tensor([0, 9]))


def test_given_positions_need_no_kernel() -> None:
    q = torch.randn(2, 3, 1, 4, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([[0, 0, 1], [4, 5, 6]])
    ours = rotary(q, q, theta=100.0, backend="fla", positions_BT=positions)[0]
    assert torch.equal(ours, apply_rope(q, *rope_cos_sin(positions, 4, 100.0)))
