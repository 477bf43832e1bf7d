"""Every mixer in every layout of ranks equals one rank, in fp64 with all parameters random.

Rounding in fp32 hides small mistakes and is taken for mistakes where gradients cancel, so the
models here are cast to fp64, and so are their loss and gradient buffers. Loss and every gradient
are compared.

    python -m pytest -m slow tests/slow/test_layout_matrix.py     # the full matrix
    python -m tests.slow.test_layout_matrix                       # its table
"""

import numpy as np
import pytest

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

PATTERNS = (*MIXER_NAMES, "gdn+full", "kda+window", "mamba2+full", "gdn+mlstm")
LAYOUTS = {
    "TP 2": (2, {"tensor": 2}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "PP 2": (2, {"pipeline": 2}),
    "CP 2": (2, {"context": 2}),
    "CP 4": (4, {"context": 4}),
    "DP 2": (2, {}),
    "TP 2 + SP x CP 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "PP 2 x CP 2": (4, {"pipeline": 2, "context": 2}),
    "PP 2 x TP 2 + SP": (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
    "PP 2 x DP 2": (4, {"pipeline": 2}),
    "TP 2 + SP x CP 2 x PP 2": (
        8,
        {"tensor": 2, "sequence": True, "context": 2, "pipeline": 2},
    ),
}
"""Ranks, and settings of `parallel`; the ranks that are left are data-parallel."""

BOUND = 1e-10


def _config(pattern, settings):
    config = tiny_config(parallel=ParallelConfig(distributed_optimizer=False, **settings))
    config.model.pattern, config.model.num_layers = pattern, 2
    config.megatron.ddp = {"grad_reduce_in_fp32": False}
    return config


def _loss_in_fp64(model, labels, logits):
    """Cross entropy of every token [b, s] from this rank's part of the vocabulary [s, b, rows]."""
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

    whole = gather_from_tensor_model_parallel_region(logits, group=model.pg_collection.tp)
    chosen = whole.gather(-1, labels.t().unsqueeze(-1)).squeeze(-1)
    return (whole.logsumexp(-1) - chosen).t()


def _build_in_fp64(config):
    """The training parts, with weights, gradients, messages between stages and loss in fp64."""
    import torch

    from megatron_lt2.model import init

    fill = init.initialise

    def fill_in_fp64(model, *args):
        fill(model, *args)
        model.double()  # before DDP lays out its buffers

    init.initialise = fill_in_fp64
    try:
        parts = build(config, restart=True)
    finally:
        init.initialise = fill
    model = parts.model
    model.compute_language_model_loss = lambda labels, logits: _loss_in_fp64(model, labels, logits)
    if parts.pipeline is not None:
        parts.pipeline.config.pipeline_dtype = torch.float64
    return parts


def _results(rank, world, settings, patterns):
    """By pattern: loss and gradients."""
    from megatron_lt2.training import steps

    found = {}
    for pattern in patterns:
        config = _config(pattern, settings)
        parts = _build_in_fp64(config)
        feed = feed_of(config, range(1))
        parts.ddp.zero_grad_buffer()
        sums = steps._run_schedule(
            config, parts, feed, micro_batch_count(config), forward_only=False
        )
        loss = steps.mean_over_ranks(*sums)
        found[pattern] = (
            loss,
            global_tensors(parts, config, lambda p: p.main_grad, keep_dtype=True),
        )
    return found


def _worst(got, expected):
    """Relative error of the loss; the largest of a gradient (of its maximum), and whose it is."""
    loss, gradients = got
    assert gradients.keys() == expected[1].keys()
    errors = {
        name: np.abs(gradients[name] - value).max() / np.abs(value).max()
        for name, value in expected[1].items()
    }
    worst = max(errors, key=errors.get)
    return abs(loss / expected[0] - 1), errors[worst], worst


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
            loss, gradient, name = _worst(got, single_rank[pattern])
            assert loss < 1e-6, pattern  # the sum over tokens is fp32
            assert gradient < BOUND, f"{pattern}, {name}: relative error {gradient:.1e}"


def test_a_covering_part():
    """In a few seconds: three patterns that touch every kind of exchange, in one mixed layout."""
    patterns = ("gdn+full", "mamba2+window", "kda+mlstm")
    expected = _single_rank(patterns)
    world, settings = LAYOUTS["PP 2 x CP 2"]
    for rank in run_ranks(world, _results, settings, patterns):
        for pattern, got in rank.items():
            loss, gradient, name = _worst(got, expected[pattern])
            assert loss < 1e-6, pattern  # the sum over tokens is fp32
            assert gradient < BOUND, f"{pattern}, {name}: relative error {gradient:.1e}"


def main():
    """Print the table: the largest relative error of a gradient."""
    expected = _single_rank(PATTERNS)
    print("| | " + " | ".join(LAYOUTS) + " |\n|" + "---|" * (1 + len(LAYOUTS)))
    columns = {}
    for layout, (world, settings) in LAYOUTS.items():
        found = run_ranks(world, _results, settings, PATTERNS, timeout=600)[0]
        columns[layout] = {p: _worst(found[p], expected[p])[1] for p in PATTERNS}
    for pattern in PATTERNS:
        cells = " | ".join(f"{columns[layout][pattern]:.0e}" for layout in LAYOUTS)
        print(f"| `{pattern}` | {cells} |")


if __name__ == "__main__":
    main()
