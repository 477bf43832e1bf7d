"""Every mixer in every layout of ranks equals one rank, in fp64 with all parameters random.

Rounding in fp32 hides small mistakes and is taken for mistakes where gradients cancel, so the
models here are cast to fp64, and so are their loss and gradient buffers. Loss and every gradient
are compared, and the weights after five optimizer steps.

    python -m pytest -m slow tests/slow/test_layout_matrix.py     # the full matrix
    python -m tests.slow.test_layout_matrix                       # its table
"""

from dataclasses import replace

import pytest

from megatron_lt2.config.schema import AttentionConfig, ParallelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES
from tests.fp64 import loss_and_gradients, weights_after, worst_error
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

EXITS = {
    "ouro": {
        "pattern": "full",
        "loops": 3,
        "loop_residual": "none",
        "norm_mode": "sandwich",
        "inter_loop_norm": True,
        "exit_gate": True,
        "loss": "exits",
        "tie_embeddings": False,
        "attention": AttentionConfig(output_gate=False),
    },
    "gdn+full with exits": {"pattern": "gdn+full", "exit_gate": True, "loss": "exits"},
}
"""Models with a loss at every loop, by name: settings of `model`."""

SPARSE = ("gdn+dsa", "gdn+nsa", "gdn+window", "full->window=3")
STAGES = "gdn+dsa in two stages"
"""Two dense steps, then sparse ones."""

HYBRIDS = ("gdn+full", "kda+window", "mamba2+full", "gdn+mlstm")
PATTERNS = (*MIXER_NAMES, *HYBRIDS, *SPARSE, STAGES, *EXITS)
LAYOUTS = {
    "TP 2": (2, {"tensor": 2}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "PP 2": (2, {"pipeline": 2}),
    "CP 2": (2, {"context": 2}),
    "CP 4": (4, {"context": 4}),
    "CP 2 by heads": (2, {"context": 2, "context_exchange": "heads"}),
    "CP 4 by heads": (4, {"context": 4, "context_exchange": "heads"}),
    "DP 2": (2, {}),
    "TP 2 + SP x CP 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "CP 2 recomputed": (2, {"context": 2, "recompute": True}),
    "PP 2 x CP 2": (4, {"pipeline": 2, "context": 2}),
    "PP 2 x CP 2 recomputed": (4, {"pipeline": 2, "context": 2, "recompute": True}),
    "PP 2 x TP 2 + SP": (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
    "PP 2 x DP 2": (4, {"pipeline": 2}),
    "TP 2 + SP x CP 2 x PP 2": (
        8,
        {"tensor": 2, "sequence": True, "context": 2, "pipeline": 2},
    ),
}
"""Ranks, and settings of `parallel`; the ranks that are left are data-parallel. "recompute": layers
are run again in the backward pass."""

BOUND = 1e-10
STEPS_BOUND = 1e-8
"""After five steps: each amplifies the rounding of the one before, most in the mLSTM (5e-10)."""


def _config(pattern, settings):
    settings = dict(settings)
    recompute = settings.pop("recompute", False)
    config = tiny_config(parallel=ParallelConfig(distributed_optimizer=False, **settings))
    config.model = replace(config.model, **{"pattern": pattern, **EXITS.get(pattern, {})})
    config.model.num_layers = 2
    if pattern == STAGES:
        config.model.pattern, config.model.dsa.dense_steps = "gdn+dsa", 2
    config.megatron.ddp = {"grad_reduce_in_fp32": False}
    if recompute:
        config.memory.recompute_layers = 1.0
    return config


def _results(rank, world, settings, patterns):
    """By pattern: loss and gradients."""
    return {pattern: loss_and_gradients(_config(pattern, settings)) for pattern in patterns}


def _steps(rank, world, settings, patterns):
    """By pattern: all weights after five optimizer steps."""
    return {pattern: weights_after(_config(pattern, settings), 5) for pattern in patterns}


def _assert_same_weights(got, expected):
    for pattern, weights in got.items():
        for name, value in expected[pattern].items():
            error = abs(weights[name] - value).max() / abs(value).max()
            assert error < STEPS_BOUND, f"{pattern}, {name}: relative difference {error:.1e}"


def _single_rank(patterns):
    return run_ranks(1, _results, {}, patterns)[0]


@pytest.fixture(scope="module")
def single_rank():
    return _single_rank(PATTERNS)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_equals_one_rank(single_rank, layout):
    world, settings = LAYOUTS[layout]
    for rank in run_ranks(world, _results, settings, PATTERNS, timeout=600):
        for pattern, got in rank.items():
            loss, gradient, name = worst_error(got, single_rank[pattern])
            assert loss < 1e-6, pattern  # the sum over tokens is fp32
            assert gradient < BOUND, f"{pattern}, {name}: relative error {gradient:.1e}"


@pytest.fixture(scope="module")
def single_rank_steps():
    return run_ranks(1, _steps, {}, PATTERNS, timeout=600)[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_five_steps_equal_those_of_one_rank(single_rank_steps, layout):
    world, settings = LAYOUTS[layout]
    for rank in run_ranks(world, _steps, settings, PATTERNS, timeout=900):
        _assert_same_weights(rank, single_rank_steps)


COVERING = ("gdn+full", "mamba2+window", "kda+mlstm", "nsa+dsa", "full->window=3")


@pytest.fixture(scope="module")
def single_rank_of_covering():
    return _single_rank(COVERING)


@pytest.mark.parametrize("layout", ["PP 2 x CP 2", "PP 2 x CP 2 recomputed", "CP 4 by heads"])
def test_a_covering_part(single_rank_of_covering, layout):
    """In a few seconds: three patterns that touch every kind of exchange, in mixed layouts."""
    world, settings = LAYOUTS[layout]
    for rank in run_ranks(world, _results, settings, COVERING):
        for pattern, got in rank.items():
            loss, gradient, name = worst_error(got, single_rank_of_covering[pattern])
            assert loss < 1e-6, pattern  # the sum over tokens is fp32
            assert gradient < BOUND, f"{pattern}, {name}: relative error {gradient:.1e}"


def test_five_steps_of_a_covering_part():
    expected = run_ranks(1, _steps, {}, COVERING[:2])[0]
    world, settings = LAYOUTS["TP 2 + SP x CP 2"]
    for rank in run_ranks(world, _steps, settings, COVERING[:2]):
        _assert_same_weights(rank, expected)


def main():
    """Print the table: the largest relative error of a gradient."""
    expected = _single_rank(PATTERNS)
    print("| | " + " | ".join(LAYOUTS) + " |\n|" + "---|" * (1 + len(LAYOUTS)))
    columns = {}
    for layout, (world, settings) in LAYOUTS.items():
        found = run_ranks(world, _results, settings, PATTERNS, timeout=600)[0]
        columns[layout] = {p: worst_error(found[p], expected[p])[1] for p in PATTERNS}
    for pattern in PATTERNS:
        cells = " | ".join(f"{columns[layout][pattern]:.0e}" for layout in LAYOUTS)
        print(f"| `{pattern}` | {cells} |")


if __name__ == "__main__":
    main()
