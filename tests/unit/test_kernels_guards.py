"""The guards around FLA's kernels: wrong inputs never reach them."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.kernels.norms import gated_rms_norm, rms_norm
from megatron_lt2.kernels.rotary import rotary
from tests.kernel_cases import KERNELS, Inputs, Kernel

every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
DELTA = [kernel for kernel in KERNELS if {"beta", "b"} & set(kernel.gates)]


@pytest.fixture
def interpreting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guards of single calls pass the CPU, so that the others can be reached.

    FLA itself stays out of reach: what a guard lets through fails the test.
    """
    monkeypatch.setenv("TRITON_INTERPRET", "1")

    def reached(module: str, name: str) -> None:
        raise AssertionError(f"{module}.{name} was reached")

    for name in ("gdn", "gla", "kda", "simple_gla", "conv", "norms", "rotary"):
        monkeypatch.setattr(f"megatron_lt2.kernels.{name}.fla_function", reached)


def small(kernel: Kernel, **sizes: int) -> Inputs:
    own = {"batch": 1, "length": 5, "heads": 2, "key": 4, "value": 6, "documents": 1} | sizes
    return kernel.inputs(*own.values())


def refused(kernel: Kernel, x: Inputs, message: str, borders: Tensor | None = None) -> None:
    with pytest.raises(ValueError, match=message) as error:
        kernel("fla", x, borders)
    assert "\n" not in str(error.value)


@every_kernel
def test_good_inputs_pass(interpreting, kernel: Kernel) -> None:
    with pytest.raises(AssertionError, match="was reached"):
        kernel("fla", small(kernel))


@every_kernel
def test_heads_must_agree(interpreting, kernel: Kernel) -> None:
    """`chunk_simple_gla` would read keys out of bounds."""
    x = small(kernel)
    for change in (
        {"q": x["q"][:, :, :1], "k": x["k"][:, :, :1]},
        {"k": x["k"][:, :, :1]},
        {"v": torch.cat([x["v"], x["v"]], 2)},
        {"v": x["v"][:, :4]},
    ):
        # Parameters of the gates are measured against the keys' heads.
        refused(kernel, {**x, **change}, "same batch, length and heads|numbers, but has")


@every_kernel
def test_gates_and_states_must_fit(interpreting, kernel: Kernel) -> None:
    x = small(kernel)
    for name, kind in kernel.gates.items():
        message = "numbers, but has" if kind in ("H", "HK") else "one number a token(,| and) head"
        refused(kernel, {**x, name: x[name][..., :1]}, message)
    state = x["initial_state"]
    for wrong in (state[..., :-1], state[:, :1], torch.cat([state, state])):
        refused(kernel, {**x, "initial_state": wrong}, "state must have shape")
    with_two = torch.tensor([0, 2, 5])
    refused(kernel, x, "state must have shape", with_two)


@every_kernel
def test_head_sizes_are_even(interpreting, kernel: Kernel) -> None:
    refused(kernel, small(kernel, key=5), "even numbers.*not 5 and")
    if not kernel.columns:  # those with a column of ones fill their values up
        refused(kernel, small(kernel, value=7), "even numbers.*not 4 and 7")


@pytest.mark.parametrize("kernel", DELTA, ids=lambda kernel: kernel.name)
def test_delta_rules_hold_256_key_channels(interpreting, kernel: Kernel) -> None:
    refused(kernel, small(kernel, key=258), "up to 256 key channels a head, not 258")


@every_kernel
def test_dtypes(interpreting, kernel: Kernel) -> None:
    x = small(kernel)
    refused(kernel, {**x, "v": x["v"].bfloat16()}, "one of bf16, fp16, fp32 for q, k, v")
    refused(kernel, {n: y.double() for n, y in x.items()}, "one of bf16, fp16, fp32 for q, k, v")


@every_kernel
def test_packed_batches_are_refused(interpreting, kernel: Kernel) -> None:
    refused(kernel, small(kernel, batch=2), "batch size is 2", torch.tensor([0, 5]))


def test_decay_is_given_once(interpreting) -> None:
    (kernel,) = [kernel for kernel in KERNELS if kernel.name == "mamba2"]
    x = small(kernel)
    gates = torch.zeros(2), torch.zeros(3)
    for backend in ("torch", "fla"):
        with pytest.raises(ValueError, match="either g or decay_H"):
            kernel.function(*list(x.values())[:4], decay_H=gates[0], backend=backend)
        with pytest.raises(ValueError, match="decay_H needs one number a head"):
            kernel.function(*list(x.values())[:3], None, decay_H=gates[1], backend=backend)


def test_conv_norm_and_rotary(interpreting) -> None:
    x = torch.zeros(1, 5, 3)
    heads = torch.zeros(2, 5, 2, 4)
    weight, one = torch.zeros(3, 4), torch.ones(1)
    borders = torch.tensor([0, 5])
    calls: list[tuple[str, Callable[[], object]]] = [
        ("channels", lambda: causal_conv1d(x, torch.zeros(4, 4), backend="fla")),
        ("bias has shape", lambda: causal_conv1d(x, weight, bias_D=one, backend="fla")),
        ("bf16", lambda: causal_conv1d(x.double(), weight, backend="fla")),
        (
            "batch size is 2",
            lambda: causal_conv1d(x.expand(2, 5, 3), weight, backend="fla", cu_seqlens=borders),
        ),
        ("gate", lambda: gated_rms_norm(x, x[:, :1], torch.ones(3), 1e-5, backend="fla")),
        ("weight", lambda: gated_rms_norm(x, x, one, 1e-5, backend="fla")),
        ("bf16", lambda: gated_rms_norm(x, x.bfloat16(), torch.ones(3), 1e-5, backend="fla")),
        (
            "not 'tanh'",
            lambda: gated_rms_norm(x, x, torch.ones(3), 1e-5, backend="fla", activation="tanh"),
        ),
        ("weight", lambda: rms_norm(x, one, 1e-5, backend="fla")),
        ("bf16", lambda: rms_norm(x.double(), torch.ones(3), 1e-5, backend="fla")),
        ("bf16", lambda: rotary(heads, heads.half(), theta=1e4, backend="fla")),
        (
            "batch size is 2",
            lambda: rotary(heads, heads, theta=1e4, backend="fla", cu_seqlens=borders),
        ),
        (
            "up to 256 channels",
            lambda: rotary(x[..., None, :1].expand(1, 5, 1, 258), heads, theta=1e4, backend="fla"),
        ),
        (
            "even number of channels",
            lambda: rotary(heads[..., :3], heads[..., :3], theta=1e4, backend="fla"),
        ),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@every_kernel
def test_fla_on_the_cpu_is_refused(monkeypatch: pytest.MonkeyPatch, kernel: Kernel) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    refused(kernel, small(kernel), "CUDA GPU")


def test_fla_on_the_cpu_is_refused_outside_of_recurrences(monkeypatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    x, heads = torch.zeros(1, 5, 3), torch.zeros(1, 5, 2, 4)
    for call in (
        lambda: causal_conv1d(x, torch.zeros(3, 4), backend="fla"),
        lambda: gated_rms_norm(x, x, torch.ones(3), 1e-5, backend="fla"),
        lambda: rms_norm(x, torch.ones(3), 1e-5, backend="fla"),
        lambda: rotary(heads, heads, theta=1e4, backend="fla"),
    ):
        with pytest.raises(ValueError, match="CUDA GPU"):
            call()


@every_kernel
def test_unresolved_backend_is_refused(kernel: Kernel) -> None:
    with pytest.raises(ValueError, match="not 'auto'"):
        kernel("auto", small(kernel))
