"""FLA's recurrences, interpreted on the CPU, against ours; in fp32 but for DeltaNet's own kernel.

The interpreter is slow, so every case packs documents or has rows, and a state or none; DeltaNet's
own kernel takes fp16 only.
"""

import pytest
import torch

from tests.kernel_cases import KERNELS, Kernel
from tests.slow.interpreted import (
    assert_backends_agree,
    inside,
    nan_in_fresh_memory,  # noqa: F401
    outside,
    run_inside,
)

pytest.importorskip("fla")
pytest.importorskip("triton")

pytestmark = pytest.mark.slow

HEADS, KEY, VALUE = 2, 12, 20
ROWS = None
PACKED = torch.tensor([0, 1, 65, 67, 70], dtype=torch.int32)
PACKED_64 = torch.tensor([0, 64, 70, 70], dtype=torch.int64)
every_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
BORDERS = pytest.mark.parametrize(
    "borders", [ROWS, PACKED, PACKED_64], ids=["rows", "packed", "packed64"]
)


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


def sizes(borders: torch.Tensor | None) -> tuple[int, int, int]:
    """Batch, length, documents."""
    return (2, 67, 2) if borders is None else (1, int(borders[-1]), len(borders) - 1)


@inside
@BORDERS
@every_kernel
def test_from_a_state(kernel: Kernel, borders: torch.Tensor | None) -> None:
    batch, length, documents = sizes(borders)
    inputs = kernel.inputs(batch, length, HEADS, KEY, VALUE, documents)
    assert_backends_agree(lambda backend, x: kernel(backend, x, borders), inputs)


@inside
@pytest.mark.parametrize("borders", [ROWS, PACKED], ids=["rows", "packed"])
@every_kernel
def test_from_nothing(kernel: Kernel, borders: torch.Tensor | None) -> None:
    batch, length, documents = sizes(borders)
    inputs = kernel.inputs(batch, length, HEADS, KEY, VALUE, documents)
    del inputs["initial_state"]

    def call(backend: str, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return kernel(backend, x, borders, output_final_state=False)

    assert_backends_agree(call, inputs)


@inside
@BORDERS
def test_deltanet_kernel_in_fp16(borders: torch.Tensor | None) -> None:
    (kernel,) = [kernel for kernel in KERNELS if kernel.name == "deltanet"]
    batch, length, documents = sizes(borders)
    inputs = kernel.inputs(batch, length, HEADS, KEY, VALUE, documents, dtype=torch.float16)
    assert_backends_agree(lambda backend, x: kernel(backend, x, borders), inputs, 1e-2)


@inside
@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_mlstm_with_large_input_gates(sign: float) -> None:
    (kernel,) = [kernel for kernel in KERNELS if kernel.name == "mlstm"]
    inputs = kernel.inputs(1, 70, HEADS, KEY, VALUE, 4)
    # Weights of one sign: a denominator that cancels would say more about rounding than about m.
    inputs |= {name: inputs[name].abs() for name in "qk"}
    inputs["i"] = inputs["i"] + sign * 100 * (torch.arange(70) % 3 == 0)[:, None]
    assert_backends_agree(lambda backend, x: kernel(backend, x, PACKED), inputs, 1e-4)


@inside
@pytest.mark.parametrize("name", ["mamba2", "gla"])
def test_strong_decay(name: str) -> None:
    (kernel,) = [kernel for kernel in KERNELS if kernel.name == name]
    inputs = kernel.inputs(1, 70, HEADS, KEY, VALUE, 4)
    inputs["g"][:, ::5] = -50.0
    # Sums of log decays reach several hundreds, where fp32 resolves no more than this.
    assert_backends_agree(lambda backend, x: kernel(backend, x, PACKED), inputs, 1e-4)


@inside
@every_kernel
def test_one_token_of_decoding(kernel: Kernel) -> None:
    """The recurrent kernels, from a state and without gradients."""
    x = kernel.inputs(3, 1, HEADS, KEY, VALUE, 3)
    with torch.no_grad():
        ours, theirs = kernel("torch", x), kernel("fla", x)
    assert len(ours) == len(theirs)
    for y, z in zip(ours, theirs, strict=True):
        assert z.dtype == y.dtype
        torch.testing.assert_close(z, y, rtol=1e-5, atol=1e-5)
    if kernel.name == "deltanet":
        half = kernel.inputs(3, 1, HEADS, KEY, VALUE, 3, dtype=torch.float16)
        with torch.no_grad():
            for y, z in zip(kernel("torch", half), kernel("fla", half), strict=True):
                torch.testing.assert_close(z, y, rtol=1e-2, atol=1e-2)
