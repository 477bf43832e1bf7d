"""What the planner predicts that ranks send is what they send: bytes and calls, one step each."""

from dataclasses import replace

import pytest

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, micro_batch_count, tiny_config
from tests.traffic import recorded

platform.install()

from megatron_lt2.model import traffic  # noqa: E402

LAYOUTS = {
    "TP 2": (2, {"tensor": 2}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "TP 2 + SP recomputed": (2, {"tensor": 2, "sequence": True, "recompute": True}),
    "CP 2": (2, {"context": 2}),
    "CP 3": (3, {"context": 3}),
    "CP 3 recomputed": (3, {"context": 3, "recompute": True}),
    "CP 3 scanned": (3, {"context": 3, "scan": True}),
    "CP 2 by heads": (2, {"context": 2, "context_exchange": "heads"}),
    "TP 2 + SP x CP 2": (4, {"tensor": 2, "sequence": True, "context": 2}),
    "TP 2 + SP x CP 2 by heads": (
        4,
        {"tensor": 2, "sequence": True, "context": 2, "context_exchange": "heads"},
    ),
    "PP 3": (3, {"pipeline": 3}),
}
OURO = {
    "pattern": "full",
    "loops": 3,
    "loop_residual": "none",
    "norm_mode": "sandwich",
    "inter_loop_norm": True,
    "exit_gate": True,
    "loss": "exits",
    "tie_embeddings": False,
}
PATTERNS = ("gdn", "mamba2", "full", "window", "kda", "mlstm", "ouro")
QUICK = ("TP 2 + SP", "CP 3", "CP 3 scanned", "CP 2 by heads", "PP 3")


def _config(pattern, settings):
    settings = dict(settings)
    recompute = settings.pop("recompute", False)
    settings.pop("scan", None)
    config = tiny_config(parallel=ParallelConfig(distributed_optimizer=False, **settings))
    config.model = replace(config.model, **(OURO if pattern == "ouro" else {"pattern": pattern}))
    config.model.num_layers = 3
    # Rows, because with documents what attention exchanges depends on them.
    config.data.isolate_documents = False
    config.training.global_batch_size, config.precision.dtype = 3, "fp32"
    config.memory.recompute_layers = float(recompute)
    return config


def _counted(rank, world, settings, patterns):
    """By pattern and group: bytes of every call that this rank makes, in order."""
    from megatron.core import parallel_state

    from megatron_lt2.parallel import state_exchange
    from megatron_lt2.training.steps import _run_schedule

    found = {}
    if settings.get("scan"):
        state_exchange.GATHERED_BYTES = 0  # the process runs this function only
    for pattern in patterns:
        config = _config(pattern, settings)
        parts = build(config, restart=True)
        parts.ddp.zero_grad_buffer()
        groups = {
            id(parallel_state.get_tensor_model_parallel_group()): "tensor",
            id(parallel_state.get_context_parallel_group()): "context",
            id(parallel_state.get_pipeline_model_parallel_group()): "pipeline",
        }
        with recorded() as calls:
            feed = feed_of(config, range(1))
            _run_schedule(config, parts, feed, micro_batch_count(config), forward_only=False)
        found[pattern] = {name: [] for name in groups.values()}
        for call in calls:
            group = groups.get(call.group)
            # The stages also tell each other the loss, once a step.
            if group is not None and (group != "pipeline" or call.name == "isend"):
                found[pattern][group].append(call.sent)
    return found


def _most(ranks, pattern, group):
    """Bytes and calls, of each call what the rank sends that sends most."""
    if group == "pipeline":  # a stage between two others
        own = ranks[1][pattern][group]
        return sum(own), len(own)
    calls = list(zip(*(rank[pattern][group] for rank in ranks), strict=True))
    return sum(map(max, calls)), len(calls)


def _compare(name, patterns, monkeypatch):
    world, settings = LAYOUTS[name]
    if settings.get("scan"):
        monkeypatch.setattr(traffic, "GATHERED_BYTES", 0)
    ranks = run_ranks(world, _counted, settings, patterns)
    for pattern in patterns:
        config = _config(pattern, settings)
        expected = {group: [0.0, 0.0] for group in ("tensor", "context", "pipeline")}
        for one in traffic.transfers(config, world):
            if one.group in expected:
                expected[one.group][0] += one.bytes
                expected[one.group][1] += one.messages
        for group, (sent, calls) in expected.items():
            assert _most(ranks, pattern, group) == (pytest.approx(sent), calls), (pattern, group)
        assert sum(sent for sent, _ in expected.values()) > 0


@pytest.mark.parametrize("layout", QUICK)
def test_predicted_traffic_is_counted_traffic(layout, monkeypatch):
    patterns = ("gdn", "mamba2") if layout == "CP 3 scanned" else (*PATTERNS[:4], "ouro")
    _compare(layout, patterns, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_predicted_traffic_of_all_layouts(layout, monkeypatch):
    _compare(layout, PATTERNS, monkeypatch)
