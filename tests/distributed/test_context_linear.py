"""Every linear mixer over context-parallel ranks equals one rank: one layer in fp64.

Output, the input's gradient and every weight's gradient, for documents that lie across cuts, end on
them or between them, and for rows that are not packed. Two planted faults show that the comparison
sees a missing state and a missing halo. Then a whole model through the trainer, whose DDP sums the
gradients, and what travels, and how often.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.mixers.registry import RECURRENT, recurrent_mixer
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config
from tests.traffic import recorded

VARIANTS = {
    "mamba2 normed a head": ("mamba2", {"norm": "head", "groups": 4}),
    "hgrn2 normed a head": ("hgrn2", {"norm": "head", "lower_bound": 0.6}),
    "deltanet gated": ("deltanet", {"output_gate": True, "allow_neg_eigval": True}),
    "linear normalised": ("linear", {"normalize": True}),
    "mlstm uncapped": ("mlstm", {"gate_cap": None}),
}
CASES = {**{name: (name, {}) for name in RECURRENT}, **VARIANTS}
ROWS = {
    # Tokens a row, documents (None: two rows, not packed).
    "one document": (32, [32]),
    "borders inside": (128, [37, 51, 40]),
    "borders on cuts": (64, [16, 16, 32]),
    "documents inside a shard": (64, [20, 5, 3, 36]),
    "single tokens at cuts": (64, [15, 1, 1, 14, 1, 32]),
    "two rows": (32, None),
}
# Heads over the tensor-parallel ranks, and what heads share gathered from them.
WITH_TENSOR = ("gdn", "kda", "mamba2", "mamba2 normed a head", "gla", "mlstm", "hgrn2")
PLAIN = ParallelConfig(distributed_optimizer=False)
BOUND = 1e-9


def _config(case, parallel):
    mixer, changes = CASES[case]
    config = tiny_config(parallel=parallel)
    config.model.pattern, config.model.num_layers = mixer, 2
    if changes:
        setattr(config.model, mixer, replace(getattr(config.model, mixer), **changes))
    return config


def _layer(case, parallel):
    config = _config(case, parallel)
    layer = build(config, restart=True).model.decoder.layers[1].self_attention.double()
    for parameter in layer.parameters():  # fp32; here gradients come by autograd
        vars(parameter).pop("main_grad", None)
    return config, layer


def _packing(row, rank, size):
    """What the batch says about a row, and this rank's tokens."""
    import torch

    from megatron_lt2.parallel.sequence import packed_sequence, shard_sequence

    length, documents = ROWS[row]
    bounds = None
    if documents is not None:
        assert sum(documents) == length
        bounds = torch.tensor([0, *np.cumsum(documents)], dtype=torch.int32)
    if size > 1:
        packing = shard_sequence(length, rank, size, bounds)
        return packing, slice(packing.shard.start, packing.shard.stop)
    return (None if bounds is None else packed_sequence(bounds)), slice(None)


def _inputs(config, row):
    import torch

    length, documents = ROWS[row]
    generator = torch.Generator().manual_seed(3)
    shape = (length, 2 if documents is None else 1, config.model.hidden_size)
    return tuple(torch.randn(shape, generator=generator).double() for _ in range(2))


def _gathered(x, group):
    import torch
    import torch.distributed as dist

    pieces = [torch.empty_like(x) for _ in range(group.size())]
    dist.all_gather(pieces, x.contiguous(), group=group)
    return torch.cat(pieces)


def _plant(fault, monkeypatch):
    import torch

    from megatron_lt2.mixers import linear, linear_shards

    if fault == "no state":

        def empty(own, group, anchor, **_):
            return tuple(torch.zeros_like(x) for x in own.written)

        monkeypatch.setattr(linear_shards, "state_before", empty)
    elif fault == "no halo":

        def nothing(pieces, history, group, **_):
            return list(pieces), [None] * len(pieces)

        monkeypatch.setattr(linear, "exchange_halo", nothing)


def _compare(rank, world, parallel, rows, cases=tuple(CASES), fault=None, scan=False):
    """By case and row: output and gradients of a layer, put together over the ranks."""
    import torch.distributed as dist

    from megatron_lt2.parallel import state_exchange

    results = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        _plant(fault, monkeypatch)
        if scan:
            monkeypatch.setattr(state_exchange, "GATHERED_BYTES", 0)
        for case in cases:
            config, layer = _layer(case, parallel)
            context = layer.pg_collection.cp
            for row in rows:
                packing, mine = _packing(row, context.rank(), context.size())
                x, direction = (y[mine] for y in _inputs(config, row))
                x = x.clone().requires_grad_()
                layer.zero_grad()
                out, _ = layer(x, packed_seq_params=packing)
                (out * direction).sum().backward()
                for parameter in layer.parameters():
                    dist.all_reduce(parameter.grad, group=context)
                own = SimpleNamespace(model=layer)
                results[case, row] = {
                    "out": _gathered(out.detach(), context).numpy(),
                    "dx": _gathered(x.grad, context).numpy(),
                    **global_tensors(own, config, lambda p: p.grad, keep_dtype=True),
                }
    return results


@pytest.fixture(scope="module")
def single():
    return run_ranks(1, _compare, PLAIN, tuple(ROWS))[0]


def _errors(expected, got):
    """By tensor: largest difference relative to the largest value."""
    assert got.keys() == expected.keys()
    return {
        name: np.abs(got[name] - x).max() / max(np.abs(x).max(), 1e-30)
        for name, x in expected.items()
    }


def _assert_equal(single, ranks, rows, cases=tuple(CASES)):
    for rank in ranks:
        assert len(rank) == len(cases) * len(rows)
        for key, got in rank.items():
            for name, error in _errors(single[key], got).items():
                assert error < BOUND, f"{key}, {name}: relative error {error:.1e}"


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_layer_equals_one_rank(single, ranks):
    got = run_ranks(ranks, _compare, replace(PLAIN, context=ranks), tuple(ROWS))
    _assert_equal(single, got, ROWS)


def test_a_layer_equals_one_rank_with_tensor_parallelism(single):
    parallel = replace(PLAIN, context=2, tensor=2)
    got = run_ranks(4, _compare, parallel, ("borders inside",), WITH_TENSOR)
    _assert_equal(single, got, ("borders inside",), WITH_TENSOR)


def test_the_scan_equals_one_rank(single):
    rows = ("one document", "borders inside", "single tokens at cuts")
    cases = ("gdn", "kda", "mamba2", "gla", "linear normalised", "mlstm")  # every kind of map
    got = run_ranks(4, _compare, replace(PLAIN, context=4), rows, cases, None, True)
    _assert_equal(single, got, rows, cases)


@pytest.mark.parametrize("fault", ["no state", "no halo"])
def test_a_planted_fault_is_seen(single, fault):
    rows = ("one document", "borders on cuts")
    got = run_ranks(2, _compare, replace(PLAIN, context=2), rows, tuple(CASES), fault)[0]
    for (case, row), tensors in got.items():
        errors = _errors(single[case, row], tensors)
        convolved = case.split()[0] in ("gdn", "kda", "deltanet", "mamba2")
        if row == "one document" and (fault == "no state" or convolved):
            assert errors["out"] > 1e-3 and errors["dx"] > 1e-3, (case, errors)
        elif row == "borders on cuts":
            # No document crosses the cut in the middle: nothing should have been exchanged.
            assert max(errors.values()) < BOUND, (case, errors)


def _isolation(rank, world):
    """By case: how much each document's output changes on this rank when another one does."""
    import torch

    results = {}
    documents = [12, 28, 24]  # the second lies across the cut
    ends = np.cumsum(documents)
    bounds = torch.tensor([0, *ends], dtype=torch.int32)
    from megatron_lt2.parallel.sequence import shard_sequence

    for case in CASES:
        config, layer = _layer(case, replace(PLAIN, context=world))
        packing = shard_sequence(64, rank, world, bounds)
        mine = slice(packing.shard.start, packing.shard.stop)
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(64, 1, config.model.hidden_size, generator=generator).double()
        document = torch.bucketize(torch.arange(64), bounds[1:], right=True)
        with torch.no_grad():
            before, _ = layer(x[mine], packed_seq_params=packing)
            for number in range(len(documents)):
                for change in (1.0, float("nan")):
                    changed = x.clone()
                    changed[document == number] += change
                    after, _ = layer(changed[mine], packed_seq_params=packing)
                    kept = (document != number)[mine]
                    moved = (after - before)[~kept].abs()
                    results[case, number, change] = (
                        float((after - before)[kept].abs().sum()),
                        float(moved.nan_to_num(9.0).max()) if len(moved) else None,
                    )
    return results


def test_a_document_never_reaches_another_across_a_cut():
    for rank in run_ranks(2, _isolation):
        assert len(rank) == len(CASES) * 6
        for key, (others, own) in rank.items():
            assert others < 1e-11, key
            assert own is None or own > 1e-6, key


def _model(rank, world, parallel, isolate):
    """Loss, gradients and their norm of a model of all linear mixers, through the trainer."""
    from megatron_lt2.training.steps import _run_schedule, mean_over_ranks, train_step

    config = tiny_config(parallel=parallel)
    config.model.pattern, config.model.num_layers = list(RECURRENT), len(RECURRENT)
    config.training.micro_batch_size = 2
    config.data.isolate_documents = isolate
    parts = build(config)
    feed = feed_of(config, range(2))
    parts.ddp.zero_grad_buffer()
    count = micro_batch_count(config)
    loss_sum, tokens = _run_schedule(config, parts, feed, count, forward_only=False)
    gradients = global_tensors(parts, config, lambda p: p.main_grad)
    return {
        "loss": mean_over_ranks(loss_sum, tokens),
        "gradients": gradients,
        "norm": train_step(config, parts, feed, count).grad_norm,
    }


@pytest.mark.parametrize("isolate", [True, False], ids=["packed", "rows"])
def test_a_model_equals_one_rank(isolate):
    (expected,) = run_ranks(1, _model, PLAIN, isolate)
    for got in run_ranks(2, _model, replace(PLAIN, context=2), isolate):
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert got["norm"] == pytest.approx(expected["norm"], rel=1e-4)
        for name, error in _errors(expected["gradients"], got["gradients"]).items():
            assert error < 1e-3, f"{name}: relative error {error:.1e}"


def _traffic(rank, world, lengths, parallel=PLAIN):
    """By case and length: the collectives of a forward and of a backward pass."""
    import torch

    from megatron_lt2.parallel.sequence import shard_sequence

    results = {}
    for case in CASES:
        config, layer = _layer(case, replace(parallel, context=world))
        for length in lengths:
            # Eight documents a rank: their number makes no difference either.
            bounds = torch.arange(0, length + 1, length // 16, dtype=torch.int32)
            for packed in (False, True):
                packing = shard_sequence(length, rank, world, bounds if packed else None)
                x = torch.randn(length // world, 1, config.model.hidden_size).double()
                x.requires_grad_()
                with recorded() as forward:
                    out, _ = layer(x, packed_seq_params=packing)
                with recorded() as backward:
                    out.sum().backward()
                results[case, length, packed] = [
                    [(call.name, call.bytes) for call in calls] for calls in (forward, backward)
                ]
    return results


def _expected_bytes(case, world):
    """Bytes that a rank puts into the exchange of the state, and into that of the halo."""
    config = _config(case, PLAIN)
    name = CASES[case][0]
    layout = recurrent_mixer(name)(config.model.mixer_settings(name)).layout
    heads, k, v = layout.heads, layout.head_k_dim, layout.head_v_dim
    kept = {
        **dict.fromkeys(("gdn", "kda", "deltanet"), k * k),
        **dict.fromkeys(("gla", "hgrn2"), k),
        "mlstm": k + 2,  # n, and two numbers of its scale
    }.get(name, 1)
    if case == "linear normalised":
        kept += k
    halo = (layout.conv_size - 1) * sum(map(layout.rows, layout.conv_names))
    return 8 * heads * (k * v + kept), 8 * max(halo, 0)


def test_two_collectives_a_pass_whose_size_is_fixed():
    world = 2
    for rank, found in enumerate(run_ranks(world, _traffic, (64, 256))):
        assert len(found) == 4 * len(CASES)
        for (case, *_), (forward, backward) in found.items():
            state, halo = _expected_bytes(case, world)
            # The halo's sender pays in the forward pass, its receiver in the backward pass.
            there, back = (halo, 0) if rank == 0 else (0, halo)
            expected = [("all_to_all_single", there)] if halo else []
            assert forward == [*expected, ("all_gather_into_tensor", state)], case
            expected = [("all_to_all_single", back)] if halo else []
            assert backward == [("reduce_scatter_tensor", world * state), *expected], case


def _uncut(rank, world):
    import torch

    from megatron_lt2.parallel.sequence import shard_sequence

    _, layer = _layer("gdn", replace(PLAIN, context=world))
    x = torch.zeros(8, 1, 32, dtype=torch.float64)
    messages = []
    for packing in (None, shard_sequence(32, rank, 4)):
        with pytest.raises(ValueError, match="context-parallel ranks") as caught:
            layer(x, packed_seq_params=packing)
        messages.append(str(caught.value))
    return messages


def test_a_batch_that_is_not_cut_for_these_ranks_is_refused():
    for messages in run_ranks(2, _uncut):
        assert messages[0].startswith(
            "the batch is cut for 1 context-parallel ranks, but there are 2"
        )
        assert messages[1].startswith(
            "the batch is cut for 4 context-parallel ranks, but there are 2"
        )
