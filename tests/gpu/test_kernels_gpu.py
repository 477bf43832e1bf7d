"""FLA's kernels in bf16 on a GPU against the plain PyTorch operations in fp32 on the same numbers.

Select a kernel with -k, e.g. -k kda. On an empty Triton cache every shape is tuned and compiled
first, which takes minutes.
"""

import pytest
import torch
from torch import Tensor

from megatron_lt2.kernels.backend import resolve_backend
from megatron_lt2.kernels.conv import Part, causal_conv1d, convolve_parts
from megatron_lt2.kernels.norms import gated_rms_norm, rms_norm
from megatron_lt2.kernels.rotary import rotary
from tests.kernel_cases import KERNELS, Inputs, Kernel

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HEADS = 4
LENGTH = 301
BOUNDS = [0, 1, 65, 67, 195, 301]
OUTPUT_TOLERANCE = 1e-2
GRADIENT_TOLERANCE = 2e-2
CANCELLING_TOLERANCE = 5e-2
"""For gradients that sum terms of both signs over all tokens, or pass a division."""
SUMMED = ("A_log", "dt_bias", "weight", "bias")
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)


def relative_error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def assert_backends_agree(call, inputs: Inputs, divides: bool = False) -> None:
    """Outputs and gradients agree: FLA on the inputs as given, torch on their fp32 values."""
    results = {}
    for backend in ("torch", "fla"):
        own = {
            name: (x.float() if backend == "torch" else x).detach().requires_grad_()
            for name, x in inputs.items()
        }
        outputs = call(backend, own)
        random = torch.Generator("cuda").manual_seed(5)
        weights = [torch.randn(y.shape, generator=random, device="cuda") for y in outputs]
        # Rounded for both, as the incoming gradient is bf16 where the output is. The mLSTM's
        # stabiliser is an output without gradient.
        pairs = [
            (y, w.bfloat16().to(y))
            for w, y in zip(weights, outputs, strict=True)
            if y.requires_grad
        ]
        torch.autograd.backward([y for y, _ in pairs], [w for _, w in pairs])
        results[backend] = outputs, {name: x.grad for name, x in own.items()}
    errors, limits = {}, {}
    for n, (y, z) in enumerate(zip(results["fla"][0], results["torch"][0], strict=True)):
        errors[f"output {n}"] = relative_error(y, z)
        limits[f"output {n}"] = OUTPUT_TOLERANCE
    for name, reference in results["torch"][1].items():
        errors[f"gradient of {name}"] = relative_error(results["fla"][1][name], reference)
        cancels = divides or name in SUMMED
        limits[f"gradient of {name}"] = CANCELLING_TOLERANCE if cancels else GRADIENT_TOLERANCE
    # `not <=` also catches nan.
    bad = {name: error for name, error in errors.items() if not error <= limits[name]}
    assert not bad, f"too large: {bad}; all: {errors}"


def normal(*shape: int, seed: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cuda")


def borders_on_gpu(packed: bool) -> Tensor | None:
    return torch.tensor(BOUNDS, dtype=torch.int32, device="cuda") if packed else None


def production_inputs(kernel: Kernel, batch: int, documents: int, length: int = LENGTH) -> Inputs:
    x = kernel.inputs(
        batch,
        length,
        HEADS,
        kernel.key,
        kernel.value,
        documents,
        device="cuda",
        dtype=torch.bfloat16,
    )
    x["initial_state"] *= 0.1
    if kernel.name == "mlstm":
        # The read-out divides by max(|den|, 1), and den is a bf16 number: where it is close to 1,
        # rounding decides whether den gets a gradient at all. Small input gates, as at the start
        # of training, keep it below; the interpreter's tests cross the kink in fp32.
        x["i"] -= 4
    return x


def test_fla_is_the_choice_on_this_gpu() -> None:
    assert resolve_backend("auto", "cuda") == "fla"


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
@every_kernel
def test_recurrence(kernel: Kernel, packed: bool) -> None:
    borders = borders_on_gpu(packed)
    batch, documents = (1, len(BOUNDS) - 1) if packed else (2, 2)
    inputs = production_inputs(kernel, batch, documents)

    def call(backend: str, x: Inputs) -> list[Tensor]:
        return kernel(backend, x, borders)

    assert_backends_agree(call, inputs, divides=kernel.columns > 0)


@every_kernel
def test_recurrence_without_states_as_in_training(kernel: Kernel) -> None:
    inputs = production_inputs(kernel, 2, 2)
    del inputs["initial_state"]

    def call(backend: str, x: Inputs) -> list[Tensor]:
        return kernel(backend, x, output_final_state=False)

    assert_backends_agree(call, inputs, divides=kernel.columns > 0)


@every_kernel
def test_recurrence_of_one_token(kernel: Kernel) -> None:
    x = production_inputs(kernel, 3, 3, length=1)
    with torch.no_grad():
        ours = kernel("torch", {name: y.float() for name, y in x.items()})
        theirs = kernel("fla", x)
    errors = [relative_error(z, y) for y, z in zip(ours, theirs, strict=True)]
    assert all(error <= OUTPUT_TOLERANCE for error in errors), errors


@every_kernel
def test_plain_recurrence_on_the_gpu_equals_the_cpu(kernel: Kernel) -> None:
    x = kernel.inputs(1, LENGTH, HEADS, 24, 48, len(BOUNDS) - 1)
    results = []
    for device in ("cuda", "cpu"):
        own = {name: y.double().to(device).requires_grad_() for name, y in x.items()}
        outputs = kernel("torch", own, torch.tensor(BOUNDS, device=device))
        sum(y.square().sum() for y in outputs).backward()
        results.append([*outputs, *(y.grad for y in own.values())])
    for on_gpu, on_cpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_conv(packed: bool, with_bias: bool) -> None:
    """The input is a slice of a wider, transposed tensor, as the model makes it."""
    borders = borders_on_gpu(packed)
    batch, documents, channels = (1, len(BOUNDS) - 1, 768) if packed else (2, 2, 768)

    def call(backend: str, x: Inputs) -> list[Tensor]:
        y, state = causal_conv1d(
            x["wide"].transpose(0, 1)[..., :channels],
            x["weight"],
            backend=backend,
            bias_D=x.get("bias"),
            initial_state_NDW=x["state"],
            cu_seqlens=borders,
            output_final_state=True,
        )
        assert state is not None
        return [y, state]

    inputs = {
        "wide": normal(LENGTH, batch, channels + 64, seed=0),
        "weight": normal(channels, 4, seed=1),
        "state": normal(documents, channels, 3, seed=2),
    }
    if with_bias:
        inputs["bias"] = normal(channels, seed=3)
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_conv_in_parts(packed: bool, taps: int) -> None:
    """q, k and v of a delta rule: heads of 96 channels of length 1, and values."""
    borders = borders_on_gpu(packed)
    batch, parts = 1 if packed else 2, [Part(384, unit=96), Part(384, unit=96), Part(768)]

    def call(backend: str, x: Inputs) -> list[Tensor]:
        own = x["wide"].transpose(0, 1)[..., :1536]
        return convolve_parts(own, x["weight"], parts, backend=backend, cu_seqlens=borders)

    inputs = {
        "wide": normal(LENGTH, batch, 1536 + 64, seed=0),
        "weight": normal(1536, taps, seed=1),
    }
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


@pytest.mark.parametrize("gate_first", [False, True], ids=["norm_first", "gate_first"])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("dim", [128, 192, 256])
def test_gated_norm(dim: int, activation: str, gate_first: bool) -> None:
    def call(backend: str, x: Inputs) -> list[Tensor]:
        options = {"activation": activation, "gate_first": gate_first}
        return [gated_rms_norm(x["x"], x["gate"], x["weight"], 1e-5, backend=backend, **options)]

    inputs = {
        "x": normal(2, LENGTH, HEADS, dim, seed=0),
        "gate": normal(2, LENGTH, HEADS, dim, seed=1),
        "weight": normal(dim, seed=2),
    }
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


@pytest.mark.parametrize("dim", [128, 2048])
def test_norm(dim: int) -> None:
    def call(backend: str, x: Inputs) -> list[Tensor]:
        return [rms_norm(x["x"], x["weight"], 1e-5, backend=backend)]

    inputs = {"x": normal(2, LENGTH, HEADS, dim, seed=0), "weight": normal(dim, seed=2)}
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


@pytest.mark.parametrize("packed", [False, True], ids=["rows", "packed"])
def test_rotary(packed: bool) -> None:
    borders, batch = borders_on_gpu(packed), 1 if packed else 2

    def call(backend: str, x: Inputs) -> list[Tensor]:
        return list(rotary(x["q"], x["k"], theta=1e4, backend=backend, cu_seqlens=borders))

    inputs = {name: normal(batch, LENGTH, HEADS, 128, seed=n) for n, name in enumerate("qk")}
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})
