"""Attention under context parallelism equals one rank: loss, gradients, steps, checkpoints.

A tiny model of attention layers with random parameters. The batches place documents on purpose: one
that fills its row, some that end on a cut between ranks, inside a rank, or straddle a cut.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import ParallelConfig, WindowConfig
from tests.ranks import run_ranks
from tests.tiny_run import EOD, build, global_tensors, micro_batch_count, tiny_config

LENGTH = 24
ENDS = ([], [5, 11], [2, 3, 14], [0, 12, 17, 23])
"""Places of EOD in the rows of a batch. Ranks are cut at 12 (two), or at 6, 12 and 18 (four)."""


def _parallel(**settings):
    return ParallelConfig(distributed_optimizer=False, **settings)


LAYOUTS = {
    "cp2": (2, _parallel(context=2)),
    "cp4": (4, _parallel(context=4)),
    "cp2 x tp2": (4, _parallel(context=2, tensor=2)),
    "cp2 x tp2 with sequence parallelism": (4, _parallel(context=2, tensor=2, sequence=True)),
    "cp2 x dp2": (4, _parallel(context=2)),
}
# Pattern, key/value heads (of 4 query heads), window, rows a micro-batch, whether packed. Two ranks
# divide 4 and 2 key heads, but not the one that tensor parallelism leaves of 2; four divide 4.
CASES = {
    "full": ("full", 4, 5, 1, True),
    "full, 2 key heads": ("full", 2, 5, 1, True),
    "full, 1 key head": ("full", 1, 5, 1, True),
    "full, two rows": ("full", 2, 5, 2, True),
    "window": ("window", 2, 5, 1, True),
    "window of many ranks": ("window", 2, 16, 1, True),
    "full and window": ("full+window", 2, 7, 1, True),
    "full and window, two rows": ("full+window", 2, 7, 2, True),
    "full and window, unpacked": ("full+window", 2, 7, 2, False),
    "window of many ranks, unpacked": ("window", 1, 16, 2, False),
    "full, 1 key head, unpacked": ("full", 1, 5, 2, False),
}


def _config(case, parallel):
    pattern, key_heads, window, rows, packed = CASES[case]
    config = tiny_config(parallel=parallel)
    config.model = replace(
        config.model,
        pattern=pattern,
        num_layers=1 + pattern.count("+"),
        num_kv_heads=key_heads,
        window=WindowConfig(size=window),
    )
    config.data.isolate_documents = packed
    config.training.micro_batch_size = rows
    # With Adam's usual epsilon the first steps are signs of gradients, which rounding can flip.
    config.optimizer.eps = 0.1
    return config


def _cases(parallel):
    if parallel.tensor > 1 and not parallel.sequence:
        return ["full", "full and window", "full and window, unpacked"]
    return [case for case in CASES if CASES[case][1] % parallel.tensor == 0]


def _batch(step):
    """Four rows; no token of the first rank's half of the first one counts."""
    generator = torch.Generator().manual_seed(70 + step)
    tokens = torch.randint(1, 61, (len(ENDS), LENGTH + 1), generator=generator)
    for row, ends in zip(tokens, ENDS, strict=True):
        row[ends] = EOD
    mask = torch.ones(len(ENDS), LENGTH)
    mask[0, : LENGTH // 2] = 0
    mask[2, 7:9] = 0
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask}


def _feed(config, steps):
    from megatron.core import parallel_state

    from megatron_lt2.data.datasets import sample_ids
    from megatron_lt2.training.steps import DataFeed

    def source():
        for step in steps:
            for ids in sample_ids(
                0,
                global_batch=len(ENDS),
                micro_batch=config.training.micro_batch_size,
                rank=parallel_state.get_data_parallel_rank(),
                replicas=parallel_state.get_data_parallel_world_size(),
            ):
                yield {name: value[ids] for name, value in _batch(step).items()}

    return DataFeed(source(), config, EOD)


def _results(config, steps=3):
    """Loss, tokens counted, gradients; then norms and weights of some steps."""
    from megatron_lt2.training.steps import _run_schedule, evaluate, mean_over_ranks, train_step

    parts = build(config, restart=True)
    count = micro_batch_count(config)
    parts.ddp.zero_grad_buffer()
    loss_sum, tokens = _run_schedule(
        config, parts, _feed(config, range(1)), count, forward_only=False
    )
    results = {
        "loss": mean_over_ranks(loss_sum, tokens),
        "tokens": float(tokens),
        "gradients": global_tensors(parts, config, lambda p: p.main_grad),
        "evaluation": evaluate(config, parts, _feed(config, range(1, 2)), count),
    }
    feed = _feed(config, range(steps))
    results["norms"] = [train_step(config, parts, feed, count).grad_norm for _ in range(steps)]
    results["weights"] = global_tensors(parts, config, lambda p: p)
    return results


def _all_cases(rank, world, parallel):
    from megatron.core import parallel_state

    results = {case: _results(_config(case, parallel)) for case in _cases(parallel)}
    model_rank = parallel_state.get_tensor_model_parallel_rank()
    return results, model_rank


@pytest.fixture(scope="module")
def single_rank():
    return run_ranks(1, _all_cases, _parallel())[0][0]


@pytest.fixture(scope="module", params=LAYOUTS)
def layout(request):
    world, parallel = LAYOUTS[request.param]
    return parallel, run_ranks(world, _all_cases, parallel)


def _error(got, expected):
    return np.abs(got - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("case", CASES)
def test_reference_is_not_trivial(single_rank, case):
    expected = single_rank[case]
    assert 3 < expected["loss"] < 12
    assert expected["tokens"] == len(ENDS) * LENGTH - LENGTH // 2 - 2
    for name, gradient in expected["gradients"].items():
        assert np.abs(gradient).max() > 1e-6, f"{name} gets no gradient"


@pytest.mark.parametrize("case", CASES)
def test_layout_equals_single_rank(single_rank, layout, case):
    parallel, ranks = layout
    if case not in _cases(parallel):
        pytest.skip("another layout has this case, or tensor parallelism cannot split its heads")
    expected = single_rank[case]
    # Every token once over context and data ranks, whatever the tensor ranks.
    counted = [results[case]["tokens"] for results, model_rank in ranks if model_rank == 0]
    assert sum(counted) == expected["tokens"]
    for results, _ in ranks:
        got = results[case]
        assert got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
        assert got["evaluation"] == pytest.approx(expected["evaluation"], rel=1e-6)
        assert got["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in got["gradients"].items():
            error = _error(gradient, expected["gradients"][name])
            assert error < 1e-5, f"{name}: relative gradient error {error:.1e}"
        assert got["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        for name, weight in got["weights"].items():
            assert np.abs(weight - expected["weights"][name]).max() < 2e-6, name


def _no_exchange(attention):
    attention.heads_divide = lambda *_: False
    attention.with_earlier_keys = lambda x, *_: x


def _mask_from_the_first_key(attention):
    attention.heads_divide = lambda *_: False
    attention._causal_mask = lambda queries, keys, device: torch.ones(
        queries, keys, dtype=torch.bool
    ).tril()


def _halo_of_the_wrong_tokens(attention):
    exchange = attention.with_earlier_keys
    attention.heads_divide = lambda *_: False

    def shifted(x, *args):
        out = exchange(x, *args)
        earlier = len(out) - len(x)
        return torch.cat([out[:earlier].roll(1, 0), out[earlier:]])

    attention.with_earlier_keys = shifted


def _heads_to_the_wrong_rank(attention):
    back = attention.to_tokens
    attention.to_tokens = lambda x, group: back(x, group).roll(1, 2)


def _positions_within_the_rank(attention):
    from megatron_lt2.model.lt2_model import LT2Model

    rotary = LT2Model._rotary
    LT2Model._rotary = lambda self, positions, packing: rotary(
        self, positions - positions[:, :1], packing
    )


def _gradients_of_sent_keys_lost(attention):
    exchange = attention.with_earlier_keys
    attention.heads_divide = lambda *_: False

    def one_way(x, *args):
        out = exchange(x.detach(), *args)
        return torch.cat([out[: len(out) - len(x)], x])

    attention.with_earlier_keys = one_way


FAULTS = {
    "no exchange": _no_exchange,
    "mask from the first key": _mask_from_the_first_key,
    "halo of the wrong tokens": _halo_of_the_wrong_tokens,
    "heads to the wrong rank": _heads_to_the_wrong_rank,
    "positions within the rank": _positions_within_the_rank,
    "gradients of sent keys lost": _gradients_of_sent_keys_lost,
}


def _with_faults(rank, world):
    """By fault: loss, gradients and their norm."""
    from megatron_lt2.mixers import attention
    from megatron_lt2.model.lt2_model import LT2Model

    results = {}
    sound, rotary = vars(attention).copy(), LT2Model._rotary
    for fault, plant in FAULTS.items():
        plant(attention)
        results[fault] = _results(_config("full and window", _parallel(context=2)), steps=1)
        vars(attention).update(sound)
        LT2Model._rotary = rotary
    return results


@pytest.fixture(scope="module")
def faulty():
    return run_ranks(2, _with_faults)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_the_comparison_finds_a_planted_fault(single_rank, faulty, fault):
    expected, got = single_rank["full and window"], faulty[fault]
    errors = [_error(g, expected["gradients"][name]) for name, g in got["gradients"].items()]
    assert max(errors) > 1e-2
    assert got["norms"][0] != pytest.approx(expected["norms"][0], rel=1e-4)
    same_loss = got["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert same_loss == (fault == "gradients of sent keys lost")


CHANGED = {0: 4, 1: 0, 2: 8, 3: 14}
"""A token of each row that is changed: of a document that straddles cuts, or lies on one rank."""


def _losses_of_changes(rank, world, parallel):
    """By way: loss of every token of this rank before and after each change."""
    from megatron.core import parallel_state

    from megatron_lt2.data.batch import make_batch

    found = {}
    for case in ("full", "full, 1 key head", "window of many ranks"):
        config = _config(case, parallel)
        model = build(config, restart=True).model
        place = parallel_state.get_context_parallel_rank()

        def losses(tokens, model=model, place=place):
            labels = (tokens + 1) % 61
            batch = make_batch(
                tokens,
                labels,
                torch.ones(tokens.shape),
                eod=EOD,
                isolate_documents=True,
                rank=place,
                size=parallel.context,
            )
            with torch.no_grad():
                out = model(
                    batch.tokens,
                    batch.positions,
                    labels=batch.labels,
                    packed_seq_params=batch.packing,
                )
            return out[0].numpy()

        found[case] = {}
        for row, token in CHANGED.items():
            tokens = _batch(0)["tokens"][row : row + 1]
            other = tokens.clone()
            other[0, token] = other[0, token] % 60 + 1
            found[case][row] = (losses(tokens), losses(other))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_changed_token_changes_its_own_document_only(ranks):
    results = run_ranks(ranks, _losses_of_changes, _parallel(context=ranks))
    for case in results[0]:
        for row, token in CHANGED.items():
            before, after = (
                np.concatenate([rank[case][row][i] for rank in results]) for i in (0, 1)
            )
            end = next(e + 1 for e in [*ENDS[row], LENGTH - 1] if e >= token)
            differ = before != after
            # Bit for bit: what comes before the change, and every later document.
            assert not differ[:token].any() and not differ[end:].any(), (case, row)
            assert differ[token:end].all(), (case, row)


def _refusal(rank, world, comm_type):
    config = _config("full", _parallel(context=2))
    config.megatron.transformer["cp_comm_type"] = comm_type
    try:
        build(config)
    except ValueError as error:
        return str(error)
    return None


def test_refuses_a_way_of_exchange_that_is_not_its_own():
    for refusal in run_ranks(2, _refusal, "p2p"):
        assert "cp_comm_type 'p2p' has no effect" in refusal


def _without_shard(rank, world):
    from megatron_lt2.parallel.sequence import packed_sequence

    model = build(_config("full", _parallel(context=2))).model
    tokens = _batch(0)["tokens"][:1, :12]
    packing = packed_sequence(torch.tensor([0, 5, 12], dtype=torch.int32))
    try:
        model(tokens, torch.arange(12)[None], packed_seq_params=packing)
    except ValueError as error:
        return str(error)
    return None


def test_refuses_tokens_of_which_it_does_not_know_the_place():
    for refusal in run_ranks(2, _without_shard):
        assert "ShardedSequence" in refusal


def _trained(rank, world, config, steps, save_at):
    """First step, losses, weights of a run that goes on from its newest checkpoint."""
    from megatron_lt2.training.checkpoint import Checkpointer
    from megatron_lt2.training.metrics import RunLog
    from megatron_lt2.training.steps import mean_over_ranks, train_step

    parts = build(config)
    log = RunLog(config.run_dir, steps, tensorboard=False, active=rank == 0)
    checkpoints = Checkpointer(config, parts, log)
    first = checkpoints.load_newest()
    feed = _feed(config, range(first, steps))
    losses = []
    for step in range(first + 1, steps + 1):
        result = train_step(config, parts, feed, micro_batch_count(config))
        losses.append((mean_over_ranks(result.loss_sum, result.tokens), result.grad_norm))
        if step == save_at:
            checkpoints.save(step, background=False)
    checkpoints.close()
    return first, losses, global_tensors(parts, config, lambda p: p)


def test_distributed_optimizer_and_checkpoints(single_rank, tmp_path):
    """Optimizer state lies on context ranks too; a resumed run goes on bit for bit, and another
    layout reads it."""
    config = replace(_config("full and window", ParallelConfig(context=2)), run_dir=str(tmp_path))
    whole = run_ranks(2, _trained, config, 3, 2)
    again = run_ranks(2, _trained, config, 3, None)
    alone = run_ranks(1, _trained, replace(config, parallel=ParallelConfig()), 3, None)[0]
    expected = single_rank["full and window"]
    for (first, losses, weights), (resumed, rest, same) in zip(whole, again, strict=True):
        assert (first, resumed) == (0, 2)
        assert rest == losses[2:]
        assert [norm for _, norm in losses] == pytest.approx(expected["norms"], rel=1e-5)
        for name, weight in weights.items():
            assert np.abs(weight - expected["weights"][name]).max() < 2e-6, name
            assert np.array_equal(weight, same[name]), name
    assert alone[0] == 2
    assert alone[1][0] == pytest.approx(whole[0][1][2], rel=1e-5)
    for name, weight in alone[2].items():
        assert np.abs(weight - expected["weights"][name]).max() < 2e-6, name
