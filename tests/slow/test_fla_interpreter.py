"""FLA's convolution, norms and rotary embedding, interpreted on the CPU in fp32, against ours."""

import pytest
import torch
from torch import Tensor

from tests.slow.interpreted import (
    assert_backends_agree,
    inside,
    nan_in_fresh_memory,  # noqa: F401
    outside,
    run_inside,
)

pytest.importorskip("fla")
pytest.importorskip("triton")

from megatron_lt2.kernels.conv import causal_conv1d  # noqa: E402
from megatron_lt2.kernels.norms import gated_rms_norm, rms_norm  # noqa: E402
from megatron_lt2.kernels.rotary import rotary  # noqa: E402

pytestmark = pytest.mark.slow


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@inside
@pytest.mark.parametrize("kernel", ["own", "fla"])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
@pytest.mark.parametrize("bounds", [None, [0, 1, 3, 65, 70]])
def test_conv(
    bounds: list[int] | None, activation: str | None, with_bias: bool, kernel: str
) -> None:
    batch, length = (2, 67) if bounds is None else (1, bounds[-1])
    documents = batch if bounds is None else len(bounds) - 1
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    inputs = {
        "x": normal(batch, length, 10, seed=0),
        "weight": normal(10, 4, seed=1),
        "state": normal(documents, 10, 3, seed=2),
    }
    if with_bias:
        inputs["bias"] = normal(10, seed=3)

    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        y, state = causal_conv1d(
            x["x"],
            x["weight"],
            backend=backend,
            bias_D=x.get("bias"),
            activation=activation,
            initial_state_NDW=x["state"],
            cu_seqlens=borders,
            output_final_state=True,
            kernel=kernel,
        )
        assert state is not None
        return [y, state]

    assert_backends_agree(call, inputs)


@inside
def test_conv_of_a_strided_input() -> None:
    """The model hands over a slice of a wider, transposed tensor."""

    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        own = x["wide"].transpose(0, 1)[..., 2:12]
        return [causal_conv1d(own, x["weight"], backend=backend)[0]]

    assert_backends_agree(
        call, {"wide": normal(67, 2, 16, seed=0), "weight": normal(10, 4, seed=1)}
    )


@inside
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_gated_norm(activation: str, gate_first: bool) -> None:
    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        options = {"activation": activation, "gate_first": gate_first}
        return [gated_rms_norm(x["x"], x["gate"], x["weight"], 1e-3, backend=backend, **options)]

    inputs = {
        "x": normal(2, 35, 3, 20, seed=0),
        "gate": normal(2, 35, 3, 20, seed=1),
        "weight": normal(20, seed=2),
    }
    assert_backends_agree(call, inputs)


@inside
def test_norm() -> None:
    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        return [rms_norm(x["x"], x["weight"], 1e-3, backend=backend)]

    assert_backends_agree(call, {"x": normal(2, 35, 3, 20, seed=0), "weight": normal(20, seed=2)})


@inside
@pytest.mark.parametrize("bounds", [None, [0, 1, 20, 20, 53]])
def test_rotary(bounds: list[int] | None) -> None:
    batch, length = (2, 21) if bounds is None else (1, bounds[-1])
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)

    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        return list(rotary(x["q"], x["k"], theta=100.0, backend=backend, cu_seqlens=borders))

    inputs = {"q": normal(batch, length, 3, 12, seed=0), "k": normal(batch, length, 2, 12, seed=1)}
    assert_backends_agree(call, inputs)
