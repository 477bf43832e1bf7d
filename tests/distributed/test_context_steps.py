"""Training over context-parallel ranks: five optimizer steps with stages, and recomputed layers.

In fp32 through the trainer's own step. Gradients in fp64 are compared in the matrix of layouts
(tests/slow/test_layout_matrix.py), whose covering part is quick.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lt2.config.schema import ParallelConfig
from tests.distributed.test_pipeline import _assert_equal, _case, _runs
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count
from tests.traffic import recorded

ONE = ParallelConfig(distributed_optimizer=False)
CASES = {
    "gdn and full": _case(pattern="gdn+full", pipeline=2, context=2),
    "gdn and full by heads": _case(
        pattern="gdn+full", pipeline=2, context=2, context_exchange="heads"
    ),
    "mamba2, kda and window": _case(pattern="mamba2+kda+window", pipeline=2, context=2),
    "mlstm and gla, sharded optimizer": _case(
        pattern="mlstm+gla", pipeline=2, context=2, distributed_optimizer=True
    ),
}


@pytest.mark.parametrize(
    "names", [("gdn and full",), pytest.param(tuple(CASES)[1:], marks=pytest.mark.slow)]
)
def test_five_steps_on_stages_of_two_ranks_equal_one_rank(names):
    cases = {name: CASES[name] for name in names}
    alone = {name: replace(config, parallel=ONE) for name, config in cases.items()}
    (expected,) = run_ranks(1, _runs, alone)
    for rank in run_ranks(4, _runs, cases):
        for name in cases:
            # Passing states rounds otherwise than one long scan does.
            _assert_equal(rank[name], expected[name], gradient=5e-4, weight=1e-4)


def _recomputed(rank, world, configs):
    """By case: gradients without and with recomputation, and the collectives of a step each."""
    from megatron_lt2.training.steps import _run_schedule

    found = {}
    for name, config in configs.items():
        for config.memory.recompute_layers in (0.0, 1.0):
            parts = build(config, restart=True)
            parts.ddp.zero_grad_buffer()
            feed = feed_of(config, range(1))
            with recorded() as calls:
                _run_schedule(config, parts, feed, micro_batch_count(config), forward_only=False)
            gradients = global_tensors(parts, config, lambda p: p.main_grad)
            found.setdefault(name, []).append((gradients, len(calls)))
    return found


@pytest.mark.parametrize("isolate", [True, False], ids=["packed", "rows"])
def test_recomputed_layers_give_the_same_gradients(isolate):
    """Up to rounding (sums run in another order), and by repeating the forward pass's exchanges."""
    configs = {
        name: _case(pattern=pattern, layers=3, context=2, context_exchange=exchange)
        for name, pattern, exchange in (
            ("state", "gdn+mamba2+kda", "state"),
            ("more states", "mlstm+hgrn2+retnet", "state"),
            ("heads", "gdn+mamba2+linear", "heads"),
        )
    }
    for config in configs.values():
        config.data.isolate_documents, config.training.micro_batch_size = isolate, 2
    for rank in run_ranks(2, _recomputed, configs):
        for name, ((plain, calls), (again, more_calls)) in rank.items():
            assert more_calls > calls, name
            for key, gradient in plain.items():
                error = np.abs(again[key] - gradient).max() / np.abs(gradient).max()
                assert error < 1e-4, f"{name} {key}: relative error {error:.1e}"
