"""`memory.*` changes what is kept, not what comes out: loss and gradients, to the last bit.

Only where nothing is added in another order: a layer that runs again adds up its input's gradient
before rho's part comes in, and the gradients of what autograd sums, such as norms, reach
megatron-core's sums one by one. So there is no rho here and one micro-batch a rank where shares of
layers run again. With rho, and more micro-batches, they agree up to rounding.
"""

from dataclasses import replace

import numpy as np
import pytest

from megatron_lt2.config.schema import MemoryConfig, ParallelConfig
from megatron_lt2.mixers.registry import MIXER_NAMES
from tests.fp64 import build_in_fp64, loss_and_gradients, worst_error
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

NONE, CHEAP = MemoryConfig(), MemoryConfig(recompute_cheap=True)
HALF, ALL = MemoryConfig(recompute_layers=0.5), MemoryConfig(recompute_layers=1.0)
BOTH = MemoryConfig(recompute_cheap=True, recompute_layers=0.4)
EXITS = {"exit_gate": True, "loss": "exits", "inter_loop_norm": True, "norm_mode": "sandwich"}
LAYOUTS = {
    "one rank": (1, {}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "PP 2": (2, {"pipeline": 2}),
    "CP 2": (2, {"context": 2}),
}


def _config(memory=NONE, parallel=None, batch=1, rho=False, **model):
    sizes = ParallelConfig(distributed_optimizer=False, **(parallel or {}))
    config = tiny_config(parallel=sizes)
    config.model = replace(config.model, **{"pattern": "gdn+full+mamba2", "loops": 3, **model})
    config.model.loop_residual = "per_channel" if rho else "none"
    config.training.global_batch_size = 2 if sizes.pipeline > 1 else batch
    config.memory = replace(memory)
    return config


def _results(rank, world, configs):
    """Loss sums and gradients in fp32, of each config."""
    from megatron_lt2.training.steps import _run_schedule

    found = []
    for config in configs:
        parts = build(config, restart=True)
        parts.ddp.zero_grad_buffer()
        count = micro_batch_count(config)
        sums = _run_schedule(config, parts, feed_of(config, range(1)), count, forward_only=False)
        found.append((sums.tolist(), global_tensors(parts, config, lambda p: p.main_grad)))
    return found


def _assert_same_bits(results, but=()):
    """but: what a pass uses more than once, so that sums over passes are grouped otherwise."""
    (loss, gradients), *others = results
    assert all(np.abs(value).max() > 0 for value in gradients.values())
    for other_loss, other in others:
        assert other_loss == loss
        assert other.keys() == gradients.keys()
        for name, value in gradients.items():
            if name.endswith(but):
                np.testing.assert_allclose(other[name], value, rtol=1e-5, err_msg=name)
            else:
                np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize("exits", [False, True], ids=["last loop", "exits"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_setting_gives_the_same_bits(layout, exits):
    world, parallel = LAYOUTS[layout]
    model = EXITS if exits else {}
    memories = (NONE, CHEAP, HALF, ALL, BOTH)
    configs = [_config(memory, parallel, **model) for memory in memories]
    # Over context ranks the decays make a rank's state map too.
    but = ("A_log", "dt_bias") if "context" in parallel else ()
    for results in run_ranks(world, _results, configs):
        _assert_same_bits(results[:2])
        _assert_same_bits(results, but)


@pytest.mark.parametrize(
    "patterns", [MIXER_NAMES[:7], MIXER_NAMES[7:]], ids=["some mixers", "the other mixers"]
)
def test_every_mixer_with_cheap_parts_made_again(patterns):
    """With rho and several micro-batches too: no order of sums changes."""
    for packed in (True, False):
        pairs = []
        for pattern in patterns:
            for memory in (NONE, CHEAP):
                config = _config(memory, batch=2, rho=True, pattern=pattern, num_layers=1, loops=2)
                config.data.isolate_documents = packed
                pairs.append(config)
        results = run_ranks(1, _results, pairs)[0]
        for i in range(0, len(results), 2):
            _assert_same_bits(results[i : i + 2])


def _exact(rank, world, configs):
    return [loss_and_gradients(config) for config in configs]


def test_with_rho_and_micro_batches_up_to_rounding():
    configs = [_config(memory, batch=4, rho=True) for memory in (NONE, HALF, ALL, BOTH)]
    for config in configs:
        config.megatron.ddp = {"grad_reduce_in_fp32": False}
    expected, *others = run_ranks(1, _exact, configs)[0]
    for got in others:
        loss, gradient, name = worst_error(got, expected)
        assert loss == 0
        assert gradient < 1e-12, f"{name}: relative error {gradient:.1e}"


def _with_a_fault(rank, world, fault):
    from megatron_lt2.mixers.norm import RMSNorm
    from megatron_lt2.parallel.remake import Keeping

    if fault == "another input":
        again = Keeping.again
        Keeping.again = lambda self, kept: again(self, tuple(x * (1 + 2e-7) for x in kept))
    if fault == "another norm":
        norm, calls = RMSNorm._norm, []

        def drifting(self, x, weight):
            calls.append(1)
            return norm(self, x, weight) * (1 if len(calls) % 2 else 1 + 2e-7)

        RMSNorm._norm = drifting
    return _results(rank, world, [_config(NONE), _config(CHEAP)])


@pytest.mark.parametrize("fault", ["another input", "another norm"])
def test_a_tensor_made_otherwise_is_seen(fault):
    results = run_ranks(1, _with_a_fault, fault)[0]
    with pytest.raises(AssertionError):
        _assert_same_bits(results)


def _kept_bytes(rank, world, configs):
    """Bytes of the storages that wait for the backward pass, weights not counted."""
    import torch

    found = []
    for config in configs:
        parts = build_in_fp64(config)
        batch, kept = next(feed_of(config, range(1))), {}
        weights = {p.untyped_storage().data_ptr() for p in parts.model.parameters()}

        def keep(x, kept=kept, weights=weights):
            storage = x.untyped_storage()
            if storage.data_ptr() not in weights:
                kept[storage.data_ptr()] = (storage.nbytes(), x)  # alive, so the address is unique
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            parts.model(
                batch.tokens,
                batch.positions,
                labels=batch.labels,
                packed_seq_params=batch.packing,
            )
        found.append(sum(size for size, _ in kept.values()))
    return found


GATED = {"gdn": 4 * 12, "mamba2": 4 * 16, "full": 0, "kda": 0}
"""Channels of the gated norm's output; plain torch keeps kda's sigmoid instead of the gate itself,
so that nothing is won."""


@pytest.mark.parametrize("pattern", GATED)
def test_outputs_of_norms_are_not_kept(pattern):
    """Of both norms of a layer and of the gated one; convolutions give their memory back otherwise
    (kernels/rematerialise.py), which saved tensors do not show."""
    configs = [_config(memory, pattern=pattern, num_layers=2) for memory in (NONE, CHEAP)]
    kept, cheap = run_ranks(1, _kept_bytes, configs)[0]
    model, tokens = configs[0].model, configs[0].data.sequence_length
    width = 2 * model.hidden_size + GATED[pattern]
    assert kept - cheap == 2 * model.loops * tokens * width * 8


def test_layers_that_run_again_keep_their_input():
    memories = (NONE, MemoryConfig(recompute_layers=1 / 3), ALL)
    kept, third, none = run_ranks(1, _kept_bytes, [_config(memory) for memory in memories])[0]
    passes, stream = 9, 24 * 32 * 8
    assert none < 2 * passes * stream < third / 2 < kept / 2
    assert kept - third == pytest.approx((kept - none) / 3, rel=0.05)
