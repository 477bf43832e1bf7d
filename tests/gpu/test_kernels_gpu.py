"""FLA's kernels in bf16 on a GPU against the plain PyTorch operations in fp32 on the same numbers.

On an empty Triton cache every shape is tuned and compiled first, which takes minutes.
"""

import pytest
import torch
from torch import Tensor

from megatron_lt2.kernels.backend import resolve_backend
from megatron_lt2.kernels.conv import causal_conv1d
from megatron_lt2.kernels.gdn import gated_delta_rule
from megatron_lt2.kernels.norms import gated_rms_norm
from megatron_lt2.ops.gdn import chunk_gated_delta_rule

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]

HEADS = 4
LENGTH = 301
BOUNDS = [0, 1, 65, 67, 195, 301]
DIMS = [(96, 192), (128, 128)]
TOLERANCE = 1e-2


def relative_error(x: Tensor, reference: Tensor) -> float:
    return ((x.double() - reference.double()).norm() / reference.double().norm()).item()


def assert_backends_agree(call, inputs: dict[str, Tensor]) -> None:
    """Outputs and gradients agree: FLA on the inputs as given, torch on their fp32 values."""
    results = {}
    for backend in ("torch", "fla"):
        own = {
            name: (x.float() if backend == "torch" else x).detach().requires_grad_()
            for name, x in inputs.items()
        }
        outputs = [y for y in call(backend, **own) if y is not None]
        random = torch.Generator("cuda").manual_seed(5)
        weights = [torch.randn(y.shape, generator=random, device="cuda") for y in outputs]
        # Rounded for both, as the incoming gradient is bf16 where the output is.
        weights = [w.bfloat16().float() for w in weights]
        torch.autograd.backward(outputs, [w.to(y) for w, y in zip(weights, outputs, strict=True)])
        results[backend] = outputs, {name: x.grad for name, x in own.items()}
    errors = {
        f"output {i}": relative_error(y, z)
        for i, (y, z) in enumerate(zip(results["fla"][0], results["torch"][0], strict=True))
    }
    for name, reference in results["torch"][1].items():
        errors[f"gradient of {name}"] = relative_error(results["fla"][1][name], reference)
    # `not <=` also catches nan.
    bad = {name: error for name, error in errors.items() if not error <= TOLERANCE}
    assert not bad, f"relative errors above {TOLERANCE}: {bad}; all: {errors}"


def normal(*shape: int, seed: int) -> Tensor:
    random = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=random, device="cuda")


def borders_on_gpu(packed: bool) -> Tensor | None:
    return torch.tensor(BOUNDS, dtype=torch.int32, device="cuda") if packed else None


def gdn_inputs(batch: int, documents: int, key: int, value: int) -> dict[str, Tensor]:
    shape = (batch, LENGTH, HEADS)
    return {
        "q": normal(*shape, key, seed=0).bfloat16(),
        "k": normal(*shape, key, seed=1).bfloat16(),
        "v": normal(*shape, value, seed=2).bfloat16(),
        "g": torch.nn.functional.logsigmoid(normal(*shape, seed=3) + 3),
        "beta": normal(*shape, seed=4).sigmoid(),
        "initial_state": normal(documents, HEADS, key, value, seed=5) * 0.1,
    }


def test_fla_is_the_choice_on_this_gpu() -> None:
    assert resolve_backend("auto", "cuda") == "fla"


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("key", "value"), DIMS)
def test_gdn(key: int, value: int, packed: bool) -> None:
    borders = borders_on_gpu(packed)
    batch, documents = (1, len(BOUNDS) - 1) if packed else (2, 2)

    def call(backend: str, q, k, v, g, beta, initial_state):
        return gated_delta_rule(
            q,
            k,
            v,
            g,
            beta,
            backend=backend,
            initial_state=initial_state,
            cu_seqlens=borders,
            output_final_state=True,
        )

    assert_backends_agree(call, gdn_inputs(batch, documents, key, value))


def test_gdn_without_states_as_in_training() -> None:
    def call(backend: str, q, k, v, g, beta):
        return gated_delta_rule(q, k, v, g, beta, backend=backend)

    inputs = gdn_inputs(2, 2, 96, 192)
    del inputs["initial_state"]
    assert_backends_agree(call, inputs)


@pytest.mark.parametrize("packed", [False, True])
def test_conv(packed: bool) -> None:
    """The input is a slice of a wider, transposed tensor, as the model makes it."""
    borders = borders_on_gpu(packed)
    batch, documents, channels = (1, len(BOUNDS) - 1, 768) if packed else (2, 2, 768)

    def call(backend: str, wide, weight, state):
        return causal_conv1d(
            wide.transpose(0, 1)[..., :channels],
            weight,
            backend=backend,
            initial_state_NDW=state,
            cu_seqlens=borders,
            output_final_state=True,
        )

    inputs = {
        "wide": normal(LENGTH, batch, channels + 64, seed=0),
        "weight": normal(channels, 4, seed=1),
        "state": normal(documents, channels, 3, seed=2),
    }
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


@pytest.mark.parametrize("dim", [128, 192])
def test_gated_norm(dim: int) -> None:
    def call(backend: str, x, gate, weight):
        return [gated_rms_norm(x, gate, weight, 1e-5, backend=backend)]

    inputs = {
        "x": normal(2, LENGTH, HEADS, dim, seed=0),
        "gate": normal(2, LENGTH, HEADS, dim, seed=1),
        "weight": normal(dim, seed=2),
    }
    assert_backends_agree(call, {name: x.bfloat16() for name, x in inputs.items()})


def test_chunk_form_on_the_gpu_equals_the_cpu() -> None:
    inputs = gdn_inputs(1, len(BOUNDS) - 1, 24, 48)
    borders = borders_on_gpu(packed=True)
    results = []
    for device in ("cuda", "cpu"):
        x = {name: y.detach().double().to(device).requires_grad_() for name, y in inputs.items()}
        state = x["initial_state"]
        o, final = chunk_gated_delta_rule(
            x["q"],
            x["k"],
            x["v"],
            x["g"],
            x["beta"],
            initial_state=state,
            cu_seqlens=borders.to(device) if borders is not None else None,
        )
        (o.square().sum() + final.square().sum()).backward()
        results.append([o, final, *(y.grad for y in x.values())])
    for on_gpu, on_cpu in zip(*results, strict=True):
        torch.testing.assert_close(on_gpu.cpu(), on_cpu, rtol=1e-9, atol=1e-10)
