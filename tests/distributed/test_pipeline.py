"""Loops on a pipeline equal one rank: loss, every gradient, their norm, evaluation, five steps.

All parameters are random, rho among them: at zero it would hide that a stage lost the loop's input.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lt2.config.mixers import WindowConfig
from megatron_lt2.config.schema import ParallelConfig
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

STEPS = 5


def _case(pattern="gdn+full", loops=2, layers=3, **parallel):
    config = tiny_config(parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}))
    config.model.pattern, config.model.loops, config.model.num_layers = pattern, loops, layers
    config.training.eval_batches = 1
    # With Adam's usual epsilon the first steps are signs of gradients, which rounding can flip.
    config.optimizer.eps, config.optimizer.lr = 0.1, 1e-3
    return config


def _unpacked():
    config = _case(layers=2)
    config.model.tie_embeddings, config.data.isolate_documents = False, False
    config.training.micro_batch_size = 2
    return config


def _packed_pairs():
    config = _case(pattern="window+gla", layers=2)
    config.model.window = WindowConfig(size=5)
    config.training.micro_batch_size = 2
    return config


def _without_rho():
    config = _case(layers=2)
    config.model.loop_residual = "none"
    return config


def _recomputed():
    config = _case(loops=3)
    config.memory.recompute_layers = 1.0
    return config


CASES = {
    "one loop": _case(loops=1),
    "two loops": _case(),
    "three loops": _case(loops=3),
    "mamba2, kda and full": _case(pattern="mamba2+kda+full"),
    "rows and an untied head": _unpacked(),
    "two sequences in a packed row": _packed_pairs(),
    "no rho": _without_rho(),
    "recomputed": _recomputed(),
}
OTHER_SPLITS = {"two loops": [1, 2]}


def _run(config):
    """Loss, gradients and validation loss at the start; then norms, losses, weights of steps."""
    from megatron_lt2.training.steps import _run_schedule, evaluate, mean_over_ranks, train_step

    parts = build(config, restart=True)
    count = micro_batch_count(config)
    parts.ddp.zero_grad_buffer()
    sums = _run_schedule(config, parts, feed_of(config, range(1)), count, forward_only=False)
    result = {"loss": mean_over_ranks(*sums)}
    if not config.parallel.distributed_optimizer:  # else a rank holds its share of the sums only
        result["gradients"] = global_tensors(parts, config, lambda p: p.main_grad)
    result["valid"] = evaluate(config, parts, feed_of(config, range(7, 8)), count)
    feed, steps = feed_of(config, range(STEPS)), []
    for _ in range(STEPS):
        step = train_step(config, parts, feed, count)
        steps.append((step.grad_norm, mean_over_ranks(step.loss_sum, step.tokens)))
    parts.gather_parameters()
    return {**result, "steps": steps, "weights": global_tensors(parts, config, lambda p: p)}


def _small_buckets(config):
    config.megatron.ddp = {"bucket_size": 3001}
    return config


def _runs(rank, world, configs):
    return {name: _run(config) for name, config in configs.items()}


def _error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


def _assert_equal(got, expected, gradient=1e-5, weight=2e-5):
    assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert got["valid"] == pytest.approx(expected["valid"], rel=1e-6)
    if "gradients" in got:
        assert got["gradients"].keys() == expected["gradients"].keys()
        for name, reference in expected["gradients"].items():
            error = _error(got["gradients"][name], reference)
            assert error <= gradient, f"{name}: relative gradient error {error:.1e}"
    # A step multiplies the rounding of the one before by up to five.
    np.testing.assert_allclose(got["steps"][0], expected["steps"][0], rtol=max(1e-6, gradient / 10))
    np.testing.assert_allclose(got["steps"], expected["steps"], rtol=max(1e-4, gradient))
    assert got["weights"].keys() == expected["weights"].keys()
    for name, reference in expected["weights"].items():
        difference = np.abs(got["weights"][name] - reference).max()
        assert difference <= weight, f"{name}: weights differ by {difference:.1e}"


@pytest.fixture(scope="module")
def single_rank():
    return run_ranks(1, _runs, CASES)[0]


@pytest.fixture(scope="module")
def two_stages():
    configs = {
        name: replace(config, parallel=replace(config.parallel, pipeline=2))
        for name, config in CASES.items()
    }
    for name, layers in OTHER_SPLITS.items():
        config = configs[name]
        parallel = replace(config.parallel, pipeline_layers=layers)
        configs[f"{name} split {layers}"] = replace(config, parallel=parallel)
    return run_ranks(2, _runs, configs)


@pytest.mark.parametrize("case", CASES)
def test_reference_is_not_trivial(single_rank, case):
    expected = single_rank[case]
    assert 3 < expected["loss"] < 12
    assert expected["steps"][-1] != expected["steps"][0]
    assert ("decoder.loop_residual" in expected["gradients"]) == (case != "no rho")
    for name, gradient in expected["gradients"].items():
        assert np.abs(gradient).max() > 1e-6, f"{name} gets no gradient"


@pytest.mark.parametrize("case", [*CASES, *(f"{n} split {s}" for n, s in OTHER_SPLITS.items())])
def test_two_stages_equal_one_rank(single_rank, two_stages, case):
    for rank in two_stages:
        _assert_equal(rank[case], single_rank[case.partition(" split")[0]])


FOUR_RANKS = {
    "four stages": (_case(layers=5, pipeline=4), {}),
    "four stages of one loop": (_case(layers=5, loops=1, pipeline=4), {}),
    "two stages, two replicas": (_case(pipeline=2, distributed_optimizer=True), {}),
    "two stages, two replicas, overlapped": (
        _small_buckets(_case(pipeline=2, distributed_optimizer=True, overlap_grad_reduce=True)),
        {},
    ),
    "two stages, gradients of replicas overlapped": (
        _small_buckets(_case(pipeline=2, overlap_grad_reduce=True)),
        {},
    ),
    # Rounding of tensor parallelism alone, see test_mixer_layouts.py.
    "two stages of two tensor-parallel ranks": (
        _case(pipeline=2, tensor=2, sequence=True),
        {"gradient": 5e-4, "weight": 1e-4},
    ),
}


@pytest.fixture(scope="module")
def single_rank_of_four():
    configs = {
        name: replace(config, parallel=ParallelConfig(distributed_optimizer=False))
        for name, (config, _) in FOUR_RANKS.items()
    }
    return run_ranks(1, _runs, configs)[0]


@pytest.fixture(scope="module")
def four_ranks():
    return run_ranks(4, _runs, {name: config for name, (config, _) in FOUR_RANKS.items()})


@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks_equal_one(single_rank_of_four, four_ranks, case):
    for rank in four_ranks:
        _assert_equal(rank[case], single_rank_of_four[case], **FOUR_RANKS[case][1])


def test_stages_add_nothing_to_the_rounding_of_tensor_parallelism(four_ranks):
    config = _case(tensor=2, sequence=True)
    expected = run_ranks(2, _runs, {"tensor": config})[0]["tensor"]
    _assert_equal(four_ranks[0]["two stages of two tensor-parallel ranks"], expected)


def _gradients_with_faults(rank, world, config):
    """By fault, the gradients it leads to; "none" for none."""
    import torch

    from megatron_lt2.model.looped_block import LoopedTransformerBlock
    from megatron_lt2.training.steps import _run_schedule

    run_stage, add_residual = (
        LoopedTransformerBlock._run_stage,
        LoopedTransformerBlock._add_residual,
    )

    def changing_what_is_carried(change):
        def faulty(self, *args):
            out = run_stage(self, *args)
            if self.post_process:
                return out
            h, x = out.chunk(2)
            return torch.cat([h, change(x)])

        return {"_run_stage": faulty}

    def rho_detached(self, loop, h, x):
        if self.loop_residual is None:
            return h
        return h + self.loop_residual[loop].detach() * x

    faults = {
        "none": {},
        "loop input not carried": changing_what_is_carried(torch.zeros_like),
        "gradient of the loop input dropped": changing_what_is_carried(torch.Tensor.detach),
        "gradient of rho dropped": {"_add_residual": rho_detached},
    }
    parts, results = build(config), {}
    for name, changed in faults.items():
        for attribute, value in changed.items():
            setattr(LoopedTransformerBlock, attribute, value)
        parts.ddp.zero_grad_buffer()
        feed = feed_of(config, range(1))
        _run_schedule(config, parts, feed, micro_batch_count(config), forward_only=False)
        results[name] = global_tensors(parts, config, lambda p: p.main_grad)
        LoopedTransformerBlock._run_stage = run_stage
        LoopedTransformerBlock._add_residual = add_residual
    return results


def test_planted_faults_are_seen(single_rank):
    expected = single_rank["two loops"]["gradients"]
    got = run_ranks(2, _gradients_with_faults, _case(pipeline=2))[0]
    worst = {
        fault: max(_error(gradients[name], expected[name]) for name in expected)
        for fault, gradients in got.items()
    }
    assert worst.pop("none") <= 1e-5
    assert len(worst) == 3
    for fault, error in worst.items():
        assert error > 1e-2, f"{fault}: only {error:.1e}"


def _without_the_embedding_reduction(rank, world, config):
    from megatron.core.distributed import finalize_model_grads as module

    module_globals = module.__globals__
    module_globals["_allreduce_word_embedding_grads"] = lambda *args, **kwargs: None
    _run(config)


def test_tied_embeddings_need_the_gradients_of_both_ends():
    with pytest.raises(AssertionError, match="tied embeddings"):
        run_ranks(2, _without_the_embedding_reduction, _case(pipeline=2))


def _messages(rank, world, configs):
    """By case: bytes of each message that this rank sends in one step, and how many receivers."""
    import torch.distributed as dist

    from megatron_lt2.training.steps import _run_schedule

    sent = []
    isend, batched = dist.isend, dist.batch_isend_irecv

    def counting_isend(tensor, *args, **kwargs):
        sent.append(tensor.numel() * tensor.element_size())
        return isend(tensor, *args, **kwargs)

    def counting_batch(operations):
        sent.extend(o.tensor.numel() * o.tensor.element_size() for o in operations if o.op is isend)
        return batched(operations)

    results = {}
    for name, config in configs.items():
        parts = build(config, restart=True)
        parts.ddp.zero_grad_buffer()
        loops, count = config.model.loops, micro_batch_count(config)
        dist.isend = counting_isend if loops > 1 else isend
        dist.batch_isend_irecv = counting_batch
        feed = feed_of(config, range(1))
        for forward_only in (True, False):
            sent.clear()
            _run_schedule(config, parts, feed, count, forward_only=forward_only)
            results[name, forward_only] = list(sent)
            feed = feed_of(config, range(1))
        dist.isend, dist.batch_isend_irecv = isend, batched
    return results


def test_messages_a_micro_batch():
    stages = 3
    cases = {
        "one loop": _case(loops=1, pipeline=stages),
        "two loops": _case(pipeline=stages),
        "three loops": _case(loops=3, pipeline=stages),
        "no rho": _without_rho(),
    }
    cases["no rho"].parallel.pipeline, cases["no rho"].model.num_layers = stages, 3
    for config in cases.values():
        config.training.global_batch_size = stages
    ranks = run_ranks(stages, _messages, cases)
    for name, config in cases.items():
        loops, count = config.model.loops, config.training.global_batch_size
        state = config.data.sequence_length * config.model.hidden_size * 4
        carried = state * (1 if name == "no rho" else 2)
        forward = sorted([state] * (loops - 1) + [carried] * (loops * (stages - 1)))
        for forward_only, ways in ((True, 1), (False, 2)):
            sent = sorted(size for rank in ranks for size in rank[name, forward_only])
            assert sent == sorted(forward * count * ways), name
