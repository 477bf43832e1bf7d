"""FLA's native sparse attention, interpreted on the CPU in fp32, against ours.

The window branch runs as plain torch here: FLA's kernels serve the other two.
"""

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

from megatron_lt2.kernels.nsa import nsa  # noqa: E402
from megatron_lt2.ops.reach import reach_of_documents  # noqa: E402

pytestmark = pytest.mark.slow

BLOCK, COUNT, WINDOW, HEADS, CHANNELS = 8, 4, 11, 16, 16


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@inside
@pytest.mark.parametrize(
    "bounds, earlier",
    [(None, 0), ([0, 1, 44, 47], 0), ([0, 18, 23], 35)],
    ids=["one document", "packed", "after earlier keys"],
)
def test_nsa(bounds: list[int] | None, earlier: int) -> None:
    length = 53 if bounds is None else bounds[-1]
    borders = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    keys = earlier + length
    inputs = {
        "q": normal(1, length, HEADS, CHANNELS, seed=0),
        "k": normal(1, keys, 1, CHANNELS, seed=1),
        "v": normal(1, keys, 1, CHANNELS, seed=2),
        **{f"g{i}": normal(1, length, HEADS, seed=3 + i).sigmoid() for i in range(3)},
    }
    reach = reach_of_documents(length, borders, earlier, torch.device("cpu"))

    def call(backend: str, x: dict[str, Tensor]) -> list[Tensor]:
        out = nsa(
            x["q"],
            x["k"],
            x["v"],
            (x["g0"], x["g1"], x["g2"]),
            reach,
            block=BLOCK,
            count=COUNT,
            window=WINDOW,
            backend=backend,
            cu_seqlens=borders,
        )
        return [out]

    assert_backends_agree(call, inputs)
