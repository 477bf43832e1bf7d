"""A layer of DSA in the training model on interpreted Triton kernels, against the plain form."""

from dataclasses import replace

import pytest

from tests.slow.interpreted import inside, outside, run_inside

pytest.importorskip("triton")

pytestmark = pytest.mark.slow


@outside
def test_in_a_process_with_the_interpreter() -> None:
    run_inside(__file__)


def _one_step(rank, world, kernels):
    """Metrics, and gradients of a tiny model, whose attention layers run with `kernels`."""
    from megatron_lt2.training import steps
    from megatron_lt2.training.indexers import indexed_layers, indexer_means
    from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

    config = tiny_config()
    config.model = replace(config.model, pattern="dsa", num_layers=1, loops=2)
    config.parallel.distributed_optimizer = False
    parts = build(config, restart=True)
    for layer in indexed_layers(parts.model):
        layer.kernels, layer.sampling = kernels, True
    parts.ddp.zero_grad_buffer()
    feed, count = feed_of(config, range(1)), micro_batch_count(config)
    steps._run_schedule(config, parts, feed, count, forward_only=False)
    gradients = global_tensors(parts, config, lambda p: p.main_grad)
    return indexer_means(config, parts.model), gradients


@inside
def test_the_layer_runs_on_them():
    from tests.ranks import run_ranks

    results = [run_ranks(1, _one_step, kernels)[0] for kernels in ("fla", "torch")]
    (means, found), (plain_means, expected) = results
    assert means == pytest.approx(plain_means, rel=1e-4) and means["indexer_loss"] > 0
    for name, gradient in expected.items():
        error = abs(found[name] - gradient).max() / abs(gradient).max()
        assert error < 1e-3, f"{name}: {error:.1e}"
        assert abs(gradient).max() > 0
