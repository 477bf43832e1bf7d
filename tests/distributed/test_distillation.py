"""A student's losses and gradients: as written out on one rank, and the same on every layout.

fp64, all parameters of student and teacher random, documents packed, two loops.
"""

from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.distill.settings import LossSettings
from megatron_lt2.parallel import platform
from tests.fp64 import build_in_fp64, loss_and_gradients, worst_error
from tests.ranks import run_ranks
from tests.tiny_run import feed_of, global_tensors, make_random, micro_batch_count, tiny_config

platform.install()

BOUND = 1e-9
STUDENT = ["gdn", "full", "gdn"]
CASES = {
    "mixer": ("mixer", LossSettings(measure="l2")),
    "hidden, teacher's stream": ("hidden", LossSettings(measure="relative", feed="teacher")),
    "hidden, own stream": ("hidden", LossSettings()),
    "logits": ("logits", LossSettings(ce=0.3, kl=0.8, temperature=2.0, loops="progressive")),
    "logits, top 7": ("logits", LossSettings(ce=0.2, top_k=7)),
}


def _config(**parallel):
    config = tiny_config(parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}))
    config.model = replace(config.model, pattern=STUDENT, tie_embeddings=True)
    config.megatron.ddp = {"grad_reduce_in_fp32": False}
    config.optimizer.clip_grad = 0.0
    return config


@contextmanager
def _distilling(kind, loss):
    """Models that this process builds are students of a random teacher."""
    from megatron_lt2.distill.model import DistilledModel, Objective
    from megatron_lt2.distill.trainer import freeze
    from megatron_lt2.model.core_config import padded_vocab_size, transformer_config
    from megatron_lt2.model.lt2_model import LT2Model
    from megatron_lt2.training import setup

    plain = setup.build_parts

    def build(config):
        def prepare(model):
            other = replace(config, model=replace(config.model, pattern="full"))
            teacher = LT2Model(
                transformer_config(other, on_gpu=False),
                other.model,
                padded_vocab_size=padded_vocab_size(other),
                max_sequence_length=other.data.sequence_length,
            )
            ignored = SimpleNamespace(reload_model_params=lambda: None)
            make_random(SimpleNamespace(model=teacher, optimizer=ignored), other, seed=9)
            teacher = teacher.double().requires_grad_(False).eval()
            model.pursue(Objective(teacher, kind, loss, STUDENT, steps=10))
            settings = SimpleNamespace(kind=kind, train=None, label=kind)
            freeze(model, SimpleNamespace(settings=settings, mixers=STUDENT))

        return plain(config, setup.Variation(DistilledModel, prepare))

    with mock.patch.object(setup, "build_parts", build):
        yield


def _results(rank, world, config, names):
    found = {}
    for name in names:
        with _distilling(*CASES[name]):
            found[name] = loss_and_gradients(config)
    return found


# Written out.


def _passes(model, batch, each):
    """The normed states of every loop; `each(loop, layer, x, mixed, h)` sees every pass."""
    decoder, states = model.decoder, []
    h = model.embedding(input_ids=batch.tokens, position_ids=batch.positions)
    angles = model._rotary(batch.positions, batch.packing)
    for loop in range(decoder.loops):
        start = h
        for i, layer in enumerate(decoder.layers):
            options = {
                "attention_mask": torch.tensor(loop),
                "rotary_pos_emb": angles,
                "packed_seq_params": batch.packing,
            }
            x = layer.input_layernorm(h)
            mixed, _ = layer.self_attention(x, **options)
            before, h = h, h + mixed
            h = h + layer.mlp(layer.pre_mlp_layernorm(h))[0]
            each(loop, i, options, before, x, mixed, h)
        h = h + decoder.loop_residual[loop] * start
        states.append(decoder.final_layernorm(h))
    return states


def _plain_loss(student, teacher, kind, loss, batch, vocabulary):
    """Sum over tokens, as the formulas say."""
    seen, terms = {}, []

    def keep(loop, i, options, before, x, mixed, h):
        seen[loop, i] = (options, before, x, mixed, h)

    def nothing(*given):
        pass

    def distance(y, target):
        square = ((y - target) ** 2).mean(-1)
        if loss.measure == "l2":
            return (square + 1e-12).sqrt()
        return square / (target**2).mean(-1) if loss.measure == "relative" else square

    with torch.no_grad():
        ahead = _passes(teacher, batch, keep)
    if kind == "logits":
        own = _passes(student, batch, nothing)
        weights = [1 / 3, 2 / 3] if loss.loops == "progressive" else [0.0, 1.0]
        total = 0.0
        for weight, s, t in zip(weights, own, ahead, strict=True):
            s = s @ student.embedding.word_embeddings.weight[:vocabulary].T
            t = t @ teacher.embedding.word_embeddings.weight[:vocabulary].T
            q = (s / loss.temperature).log_softmax(-1)
            if loss.top_k:
                ids = t.topk(loss.top_k).indices
                t, q = t.gather(-1, ids), q.gather(-1, ids)
            p = (t / loss.temperature).log_softmax(-1)
            kl = (p.exp() * (p - q)).sum(-1)
            total = total + loss.kl * loss.temperature**2 * weight * kl.sum()
        ce = -s.log_softmax(-1).gather(-1, batch.labels.T[..., None]).sum()
        return total + loss.ce * ce
    if kind == "hidden" and loss.feed == "student":
        _passes(
            student,
            batch,
            lambda loop, i, o, b, x, m, h: terms.append(distance(h, seen[loop, i][4])),
        )
        return torch.stack(terms).mean(0).sum()
    for (_, i), (options, before, x, mixed, h) in seen.items():
        layer = student.decoder.layers[i]
        if kind == "mixer":
            if STUDENT[i] != "full":
                terms.append(distance(layer.self_attention(x, **options)[0], mixed))
        else:
            terms.append(distance(layer(hidden_states=before, **options)[0], h))
    return torch.stack(terms).mean(0).sum()


def _written_out(rank, world, config):
    """By case: what the trainer's step gives, and the plain computation with autograd."""
    found = {}
    for name, (kind, loss) in CASES.items():
        with _distilling(kind, loss):
            got = loss_and_gradients(config)
            parts = build_in_fp64(config)
        model, teacher = parts.model, parts.model.objective.teacher
        parts.ddp.zero_grad_buffer()
        total, tokens = 0.0, 0
        feed = feed_of(config, range(1))
        for _ in range(micro_batch_count(config)):
            batch = next(feed)
            value = _plain_loss(model, teacher, kind, loss, batch, config.model.vocab_size)
            value.backward()
            total, tokens = total + float(value), tokens + batch.loss_mask.sum()
        # The step divides by all tokens.
        plain = global_tensors(
            SimpleNamespace(model=model, pipeline=None),
            config,
            lambda p, tokens=tokens: _of(p) / tokens,
            keep_dtype=True,
        )
        found[name] = (got, (total / float(tokens), plain))
    return found


def _of(parameter):
    """The gradient of a parameter, from wherever it is kept; zeros if it has none."""
    main = getattr(parameter, "main_grad", None)
    return torch.zeros_like(parameter) if main is None else main


def _with_zeros(rank, world, config, names):
    """`_results` where a frozen parameter counts as one without gradient."""
    import tests.fp64 as fp64

    collect = fp64.global_tensors

    def all_of_them(parts, config, local_of, **options):
        return collect(parts, config, _of, **options)

    with mock.patch.object(fp64, "global_tensors", all_of_them):
        return _results(rank, world, config, names)


def _written_out_with_zeros(rank, world, config):
    import tests.fp64 as fp64

    collect = fp64.global_tensors

    def all_of_them(parts, config, local_of, **options):
        return collect(parts, config, _of, **options)

    with mock.patch.object(fp64, "global_tensors", all_of_them):
        return _written_out(rank, world, config)


def _trained(gradients):
    return {name for name, value in gradients.items() if abs(value).max() > 0}


@pytest.fixture(scope="module")
def single_rank():
    return run_ranks(1, _written_out_with_zeros, _config())[0]


def test_losses_and_gradients_as_written_out(single_rank):
    for name, (got, expected) in single_rank.items():
        assert _trained(got[1]) == _trained(expected[1]), name
        assert len(_trained(got[1])) >= 10, name
        kept = _trained(expected[1])
        loss, gradient, worst = worst_error(
            *((x, {n: g[n] for n in kept}) for x, g in (got, expected))
        )
        # The sum over tokens and 1 / their number, which multiplies all gradients, are fp32.
        assert loss < 1e-6, name
        assert gradient < 1e-7, f"{name}, {worst}: relative error {gradient:.1e}"


def test_only_new_mixers_learn_in_stage_mixer(single_rank):
    trained = _trained(single_rank["mixer"][0][1])
    assert all(".self_attention." in name for name in trained)
    assert {name.split(".")[2] for name in trained} == {"0", "2"}


LAYOUTS = {
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "CP 2": (2, {"context": 2}),
    "TP 2": (2, {"tensor": 2}),
    "TP 2 x CP 2 + SP": (4, {"tensor": 2, "context": 2, "sequence": True}),
    "DP 2": (2, {}),
}
QUICK = ("TP 2 + SP", "CP 2")


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in LAYOUTS]
)
def test_layout_equals_one_rank(single_rank, layout):
    world, sizes = LAYOUTS[layout]
    for rank in run_ranks(world, _with_zeros, _config(**sizes), list(CASES)):
        for name, got in rank.items():
            expected = single_rank[name][0]
            kept = _trained(expected[1])
            assert _trained(got[1]) == kept, name
            loss, gradient, worst = worst_error(
                *((x, {n: g[n] for n in kept}) for x, g in (got, expected))
            )
            assert loss < 1e-6, name
            assert gradient < BOUND, f"{name}, {worst}: relative error {gradient:.1e}"


def _without_the_gathers_rule(rank, world, config, names):
    """Gradients of gathered losses summed over tensor-parallel ranks, which all have the same."""
    from megatron_lt2.distill import model

    gather = model.tensor_parallel.gather_from_sequence_parallel_region

    def faulty(x, tensor_parallel_output_grad, group):
        return gather(x, tensor_parallel_output_grad=True, group=group)

    fake = SimpleNamespace(gather_from_sequence_parallel_region=faulty)
    with mock.patch.object(model, "tensor_parallel", fake):
        return _with_zeros(rank, world, config, names)


def test_a_planted_fault_is_seen(single_rank):
    config = _config(tensor=2, sequence=True)
    loss, gradients = run_ranks(2, _without_the_gathers_rule, config, ["mixer"])[0]["mixer"]
    expected = single_rank["mixer"][0][1]
    name = "decoder.layers.0.self_attention.out_proj.weight"
    assert abs(gradients[name] / expected[name] - 1).max() > 0.1


def _rules(rank, world, config):
    """Losses and gradients for other micro-batches, and for other text where nothing counts; what
    a step leaves of the teacher and the random numbers."""
    import tests.tiny_run as tiny

    plain, found = tiny.random_batch, {}

    def padded(change):
        def batch(config, step):
            given = plain(config, step)
            given["loss_mask"][:, -7:] = 0.0
            if change:  # behind all that counts
                given["tokens"][:, -6:] = 3
                given["labels"][:, -7:] = 3
            return given

        return batch

    cases = {"1": (1, plain), "2": (2, plain), "4": (4, plain)}
    cases |= {"padded": (2, padded(False)), "other padding": (2, padded(True))}
    for name, (rows, batch) in cases.items():
        config.training.micro_batch_size = rows
        with mock.patch.object(tiny, "random_batch", batch):
            found[name] = _with_zeros(rank, world, config, ["logits"])["logits"]
    with _distilling(*CASES["logits"]):
        parts = build_in_fp64(config)
    teacher, state = parts.model.objective.teacher, torch.get_rng_state()
    parts.ddp.train()
    batch = next(feed_of(config, range(1)))
    options = {"packed_seq_params": batch.packing, "parts": True}
    one, two = (
        parts.ddp(batch.tokens, batch.positions, labels=batch.labels, **options).detach()
        for _ in range(2)
    )
    facts = {
        "same twice": torch.equal(one, two),
        "random numbers": torch.equal(state, torch.get_rng_state()),
        "student trains": parts.model.training,
        "teacher does not": not any(module.training for module in teacher.modules()),
        "no gradients": not any(
            p.requires_grad or p.grad is not None for p in teacher.parameters()
        ),
        "no submodule": not any(module is teacher for module in parts.model.modules()),
    }
    return found, facts


def test_micro_batches_padding_and_what_a_step_leaves():
    found, facts = run_ranks(1, _rules, _config())[0]
    assert all(facts.values()), facts
    for one, other in (("1", "2"), ("1", "4"), ("padded", "other padding")):
        kept = _trained(found[one][1])
        loss, gradient, worst = worst_error(
            *((x, {n: g[n] for n in kept}) for x, g in (found[other], found[one]))
        )
        assert loss < 1e-6 and gradient < 1e-7, (one, other, worst, gradient)
    assert abs(found["1"][0] - found["padded"][0]) > 1e-3
