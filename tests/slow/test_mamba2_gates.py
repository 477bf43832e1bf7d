"""The Triton kernels of Mamba2's gates, interpreted on the CPU, against single operations."""

import pytest
import torch

from megatron_lt2.kernels.mamba2 import decays_and_keys
from tests.slow.interpreted import (
    assert_backends_agree,
    inside,
    nan_in_fresh_memory,  # noqa: F401
    outside,
    run_inside,
)

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


@inside
@pytest.mark.parametrize("length", [1, 31, 32, 77])
@pytest.mark.parametrize(("heads", "groups"), [(4, 1), (4, 2), (3, 3)])
@pytest.mark.parametrize("sliced", [False, True])
def test_agrees(length: int, heads: int, groups: int, sliced: bool) -> None:
    channels = 12
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    inputs = {
        "raw": 8 * random(2, length, heads),  # reaches where softplus is the identity
        "B": random(2, length, groups * channels),
        "A_log": random(heads),
        "dt_bias": random(heads),
    }

    def call(backend: str, x: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        raw, B = x["raw"], x["B"]
        if sliced:  # as slices of one matrix product
            together = torch.cat([B, raw], dim=-1)
            B, raw = together.split([B.shape[-1], heads], dim=-1)
        decays, keys = decays_and_keys(raw, B, x["A_log"], x["dt_bias"], groups, backend=backend)
        return [decays, keys]

    assert_backends_agree(call, inputs)
