"""Shards on FLA's kernels, interpreted on the CPU in fp32, against one pass of the plain form."""

import pytest
import torch

from megatron_lt2.recurrent.names import RECURRENT
from tests.slow.interpreted import (
    inside,
    nan_in_fresh_memory,  # noqa: F401
    outside,
    run_inside,
)
from tests.unit.test_shard_maps import build, errors, in_shards, one_pass, with_gradients

pytest.importorskip("fla")
pytest.importorskip("triton")

pytestmark = pytest.mark.slow

ROWS = {
    # Documents and cuts: one piece a shard; several, the first and last shared with neighbours.
    "one document": ([48], [24]),
    "borders inside": ([10, 5, 14, 1, 18], [20, 36]),
}


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


@inside
@pytest.mark.parametrize("row", ROWS)
@pytest.mark.parametrize("case", [*RECURRENT, "linear normalised"])
def test_shards_equal_one_pass_of_the_plain_form(case: str, row: str) -> None:
    documents, cuts = ROWS[row]
    given = build(case, torch.float32, 48)
    expected = with_gradients(one_pass, *given, documents)
    got = with_gradients(in_shards, *given, documents, cuts, "fla")
    for name, error in errors(got, expected).items():
        assert error < 1e-4, f"{name}: {error:.1e}"
