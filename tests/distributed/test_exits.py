"""Sandwich norms, the norm between loops, the exit gate and its loss, on one rank and on several.

On one rank against a computation written out here; on several, loss and gradients equal one rank in
fp64 with all parameters random, and planted mistakes do not.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import AttentionConfig, ParallelConfig, RopeConfig
from tests.fp64 import build_in_fp64, loss_and_gradients, worst_error
from tests.ranks import run_ranks
from tests.tiny_run import feed_of, global_tensors, random_batch, tiny_config

BOUND = 1e-10
OURO = {
    "pattern": "full",
    "num_layers": 2,
    "loops": 3,
    "loop_residual": "none",
    "norm_mode": "sandwich",
    "inter_loop_norm": True,
    "exit_gate": True,
    "loss": "exits",
    "tie_embeddings": False,
    "rope": RopeConfig(theta=500.0),
    "attention": AttentionConfig(output_gate=False),
}
MODELS = {
    "ouro": OURO,
    "one key head, tied, another beta": {
        **OURO,
        **{"num_kv_heads": 1, "head_dim": 6, "tie_embeddings": True, "exit_entropy": 0.7},
    },
    "rho, no norm between loops": {
        **OURO,
        **{"inter_loop_norm": False, "loop_residual": "per_channel", "norm_mode": "pre"},
    },
    "rho and a norm between loops": {**OURO, "loop_residual": "per_channel"},
    "loss of the last loop": {**OURO, "loss": "final"},
    "one loop": {**OURO, "loss": "final", "loops": 1, "norm_eps": 1e-3},
}


def _config(model, recompute=False, isolate=True, **parallel):
    config = tiny_config(parallel=ParallelConfig(**{"distributed_optimizer": False, **parallel}))
    config.model = replace(config.model, **model)
    config.data.isolate_documents = isolate
    config.megatron.ddp = {"grad_reduce_in_fp32": False}
    config.memory.recompute_layers = float(recompute)
    return config


# The computation written out.


def _rms(x, weight, eps):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _turn(x, theta):
    """[b, s, heads, D], halves of a head rotated; angles, cos and sin in fp32 as in training."""
    half = x.shape[-1] // 2
    frequencies = 1.0 / theta ** (torch.arange(0, 2 * half, 2, dtype=torch.float32) / (2 * half))
    angles = torch.outer(torch.arange(x.shape[1], dtype=torch.float32), frequencies)
    cos, sin = (f(angles).double()[None, :, None] for f in (torch.cos, torch.sin))
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _attend(w, prefix, x, model):
    heads, groups, width = model.num_heads, model.kv_heads, model.attention_head_dim
    share = heads // groups
    fused = (x @ w[f"{prefix}.linear_qkv.weight"].T).unflatten(-1, (groups, share + 2, width))
    q = fused[..., :share, :].flatten(2, 3)
    k, v = (fused[..., share + i, :].repeat_interleave(share, 2) for i in (0, 1))
    q, k = _turn(q, model.rope.theta), _turn(k, model.rope.theta)
    scores = torch.einsum("bthd,bshd->bhts", q, k) / width**0.5
    ahead = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    mixed = torch.einsum("bhts,bshd->bthd", scores.masked_fill(ahead, -torch.inf).softmax(-1), v)
    return mixed.flatten(2) @ w[f"{prefix}.linear_proj.weight"].T


def _plain_losses(w, tokens, labels, model):
    """Loss of every token, cross entropies and exit probabilities of every loop."""
    eps = model.norm_eps
    head = w["embedding.word_embeddings.weight" if model.tie_embeddings else "output_layer.weight"]
    h = w["embedding.word_embeddings.weight"][tokens]
    entropies, gates = [], []
    for loop in range(model.loops):
        start = h
        for i in range(model.num_layers):
            at = f"decoder.layers.{i}"
            y = _attend(
                w, f"{at}.self_attention", _rms(h, w[f"{at}.input_layernorm.weight"], eps), model
            )
            sandwich = model.norm_mode == "sandwich"
            h = h + (_rms(y, w[f"{at}.post_mixer_layernorm.weight"], eps) if sandwich else y)
            y = _rms(h, w[f"{at}.pre_mlp_layernorm.weight"], eps)
            gate, up = (y @ w[f"{at}.mlp.linear_fc1.weight"].T).chunk(2, -1)
            y = (gate / (1 + torch.exp(-gate)) * up) @ w[f"{at}.mlp.linear_fc2.weight"].T
            h = h + (_rms(y, w[f"{at}.post_mlp_layernorm.weight"], eps) if sandwich else y)
        if model.loop_residual == "per_channel":
            h = h + w["decoder.loop_residual"][loop] * start
        normed = _rms(h, w["decoder.final_layernorm.weight"], eps)
        h = normed if model.inter_loop_norm else h
        p_label = (normed @ head.T).softmax(-1).gather(-1, labels[..., None])[..., 0]
        entropies.append(-p_label.log())
        logit = (normed @ w["decoder.exit_gate.weight"].T)[..., 0] + w["decoder.exit_gate.bias"]
        gates.append(1 / (1 + torch.exp(-logit)))
    left, shares = torch.ones_like(gates[0]), []
    for gate in gates[:-1]:
        shares.append(left * gate)
        left = left * (1 - gate)
    shares.append(left)
    if model.loss == "final":
        return entropies[-1], entropies, shares
    loss = sum(p * ce for p, ce in zip(shares, entropies, strict=True))
    certainty = sum(p * p.log() for p in shares)
    return loss + model.exit_entropy * certainty, entropies, shares


def _against_plain(rank, world, config, masked, exact=True):
    """Errors of losses, their parts and gradients, each relative to its maximum.

    exact: in fp64, else in fp32 with the loss as it is in training.
    """
    from megatron_lt2.training import steps
    from tests.tiny_run import build

    parts, model = (build_in_fp64 if exact else build)(config), config.model
    weights = global_tensors(parts, config, lambda p: p, keep_dtype=True)
    w = {n: torch.from_numpy(value).double().requires_grad_() for n, value in weights.items()}
    batch = random_batch(config, 0)
    mask = (torch.arange(batch["labels"].numel()).view_as(batch["labels"]) % 3 > 0).double()
    mask = mask if masked else torch.ones_like(mask)
    loss, entropies, shares = _plain_losses(w, batch["tokens"], batch["labels"], model)
    ((loss * mask).sum() / mask.sum()).backward()

    parts.ddp.zero_grad_buffer()
    feed = feed_of(config, range(1))
    rows = iter(mask.float())

    class Masked:
        def __next__(self):
            return replace(next(feed), loss_mask=next(rows)[None])

    sums = steps._run_schedule(config, parts, Masked(), len(mask), forward_only=False)
    means = sums[:-1] / sums[-1]
    expected = [(x * mask).sum() / mask.sum() for x in (loss, *entropies, *shares)]
    expected = expected if model.loss == "exits" else expected[:1]
    frozen = {n for n, p in parts.model.named_parameters() if not p.requires_grad}
    gradients = {
        name: p.main_grad.numpy()
        for name, p in parts.model.named_parameters()
        if name not in frozen
    }
    vocab = model.vocab_size
    for name, value in gradients.items():
        gradients[name] = value[:vocab] if "word" in name or "output_layer" in name else value
    wanted = {name: x.grad.numpy() for name, x in w.items() if name not in frozen}
    error = worst_error((float(means[0]), gradients), (float(expected[0]), wanted))
    off = max(abs(float(a / b) - 1) for a, b in zip(means, expected, strict=True))
    return error, off, sorted(frozen)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_written_out_computation(name):
    config = _config(MODELS[name], isolate=False)
    (loss, gradient, worst), off, frozen = run_ranks(1, _against_plain, config, True)[0]
    assert loss < 1e-6 and off < 1e-6  # sums over tokens are fp32
    assert gradient < BOUND, f"{worst}: relative error {gradient:.1e}"
    gate = ["decoder.exit_gate.bias", "decoder.exit_gate.weight"]
    assert frozen == (gate if MODELS[name]["loss"] == "final" else [])


def test_in_fp32_with_the_loss_of_training():
    config = _config(OURO, isolate=False)
    (loss, gradient, worst), off, _ = run_ranks(1, _against_plain, config, True, False)[0]
    assert loss < 1e-6 and off < 1e-6
    assert gradient < 1e-4, f"{worst}: relative error {gradient:.1e}"


# Several ranks.

LAYOUTS = {
    "two stages": (2, {"pipeline": 2}),
    "two stages, recomputed": (2, {"pipeline": 2, "recompute": True}),
    "two tensor-parallel ranks": (2, {"tensor": 2}),
    "tensor and sequence parallel": (2, {"tensor": 2, "sequence": True}),
    "two shards of a row": (2, {"context": 2}),
    "two stages of two ranks": (4, {"pipeline": 2, "tensor": 2, "sequence": True}),
    "two stages, two replicas": (4, {"pipeline": 2}),
}
SPREAD = ("ouro", "rho, no norm between loops", "tied")
"""The models of the layouts; "tied" is Ouro with one matrix for embedding and head."""


def _spread(settings):
    models = {**MODELS, "tied": {**OURO, "tie_embeddings": True}}
    return {name: _config(models[name], **settings) for name in SPREAD}


def _results(rank, world, configs):
    return {name: loss_and_gradients(config) for name, config in configs.items()}


@pytest.fixture(scope="module")
def single_rank():
    return run_ranks(1, _results, _spread({}))[0]


def test_heads_in_threes():
    """9 heads and 3 key heads on three tensor-parallel ranks, one pass: SmolLM2's shape."""
    heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 4}
    llama = {
        **{"pattern": "full", "num_layers": 2, "loops": 1, "loop_residual": "none", **heads},
        **{"norm_eps": 1e-5, "rope": RopeConfig(theta=1e5)},
        "attention": AttentionConfig(output_gate=False),
    }
    expected = run_ranks(1, _results, {"llama": _config(llama)})[0]["llama"]
    for rank in run_ranks(3, _results, {"llama": _config(llama, tensor=3)}):
        loss, gradient, worst = worst_error(rank["llama"], expected)
        assert loss < 1e-6
        assert gradient < BOUND, f"{worst}: relative error {gradient:.1e}"


QUICK = ("two stages of two ranks", "two shards of a row")


@pytest.mark.parametrize(
    "layout", [pytest.param(x, marks=[pytest.mark.slow] * (x not in QUICK)) for x in LAYOUTS]
)
def test_layout_equals_one_rank(single_rank, layout):
    world, settings = LAYOUTS[layout]
    for rank in run_ranks(world, _results, _spread(settings)):
        for name, got in rank.items():
            loss, gradient, worst = worst_error(got, single_rank[name])
            assert loss < 1e-6, name  # the sum over tokens is fp32
            assert gradient < BOUND, f"{name}, {worst}: relative error {gradient:.1e}"


def test_reference_is_not_trivial(single_rank):
    for name, (loss, gradients) in single_rank.items():
        assert 2 < loss < 12
        for parameter, gradient in gradients.items():
            assert np.abs(gradient).max() > 1e-6, f"{name}: {parameter} gets no gradient"
        assert "decoder.exit_gate.weight" in gradients


def _with_faults(rank, world, config):
    """Results with mistakes that the comparison must see."""
    from megatron_lt2.model import exits

    backward, forward = exits._Defer.backward, exits.ExitGate.forward

    def without(lost):
        def faulty(ctx, dy):
            given = list(backward(ctx, dy))
            given[lost] = torch.zeros_like(given[lost])
            return tuple(given)

        return faulty

    faults = {
        "none": (backward, forward),
        "losses of earlier loops lost": (without(1), forward),
        "gates of earlier loops lost": (without(2), forward),
        "nothing through the gate": (backward, lambda self, x: forward(self, x.detach())),
    }
    found = {}
    for name, (changed, gate) in faults.items():
        exits._Defer.backward, exits.ExitGate.forward = staticmethod(changed), gate
        found[name] = loss_and_gradients(config)
    exits._Defer.backward, exits.ExitGate.forward = staticmethod(backward), forward
    return found


def test_planted_faults_are_seen(single_rank):
    expected = single_rank["ouro"]
    found = run_ranks(2, _with_faults, _spread({"pipeline": 2})["ouro"])[0]
    errors = {name: worst_error(got, expected)[1] for name, got in found.items()}
    assert errors.pop("none") < BOUND
    assert len(errors) == 3
    for fault, error in errors.items():
        assert error > 1e-3, f"{fault}: only {error:.1e}"


def _steps(rank, world, config):
    """Three optimizer steps: losses, parts of the last one, validation loss."""
    from megatron_lt2.training import steps
    from tests.tiny_run import build, micro_batch_count

    parts, count = build(config, restart=True), micro_batch_count(config)
    feed, found = feed_of(config, range(3)), []
    for _ in range(3):
        step = steps.train_step(config, parts, feed, count)
        found.append(steps.mean_over_ranks(step.loss_sum, step.tokens))
    means = steps.exit_means(step.exit_sums, step.tokens)
    parts.gather_parameters()
    valid = steps.evaluate(config, parts, feed_of(config, range(7, 8)), count)
    return found, means, valid


def _overlapped(**parallel):
    config = _config(OURO, distributed_optimizer=True, overlap_grad_reduce=True, **parallel)
    config.megatron.ddp = {"bucket_size": 3001}
    return config


def test_steps_with_overlap_equal_one_rank():
    """The optimizer is sharded, and gradients are reduced as soon as a weight is ready."""
    base = _overlapped()
    base.optimizer.eps, base.optimizer.lr = 0.1, 1e-3
    losses, means, valid = run_ranks(1, _steps, base)[0]
    assert sum(means[f"exit_share_{t}"] for t in (1, 2, 3)) == pytest.approx(1)
    assert len({round(means[f"loss_loop_{t}"], 6) for t in (1, 2, 3)}) == 3
    spread = _overlapped(pipeline=2)
    spread.optimizer = base.optimizer
    for got in run_ranks(4, _steps, spread):
        assert got[0] == pytest.approx(losses, rel=1e-5)
        assert got[1] == pytest.approx(means, rel=1e-4)
        assert got[2] == pytest.approx(valid, rel=1e-5)


def _frozen_gate(rank, world, config):
    from megatron_lt2.training import steps
    from tests.tiny_run import build, micro_batch_count

    parts = build(config, restart=True)
    before = {n: p.detach().clone() for n, p in parts.model.named_parameters()}
    steps.train_step(config, parts, feed_of(config, range(1)), micro_batch_count(config))
    parts.gather_parameters()
    return {n for n, p in parts.model.named_parameters() if torch.equal(p, before[n])}


def test_a_gate_that_the_loss_does_not_reach_stays_as_it_is():
    config = _overlapped()
    config.model = replace(config.model, loss="final")
    for unchanged in run_ranks(2, _frozen_gate, config):
        assert unchanged == {"decoder.exit_gate.weight", "decoder.exit_gate.bias"}


def _kept_logits(rank, world, configs):
    """By model: tensors as wide as the vocabulary that wait for the backward pass."""
    from tests.tiny_run import build

    found = []
    for config in configs:
        parts, kept = build(config, restart=True), []
        batch = next(feed_of(config, range(1)))
        width = parts.model.output_layer.weight.shape[0]

        def keep(x, kept=kept, width=width):
            if x.shape[-1] == width:
                kept.append(tuple(x.shape))
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            parts.model(
                batch.tokens,
                batch.positions,
                labels=batch.labels,
                packed_seq_params=batch.packing,
            )
            count = len(kept)
            logits = parts.model(batch.tokens, batch.positions, packed_seq_params=batch.packing)
            logits.logsumexp(-1)
        assert len(kept) > count, "logits are seen where they are kept"
        found.append(count)
    return found


def test_no_logits_wait_for_the_backward_pass():
    few, many = ({**OURO, "loops": loops} for loops in (2, 6))
    counts = run_ranks(
        1, _kept_logits, [_config({**OURO, "loss": "final"}), *map(_config, (few, many))]
    )
    assert counts[0] == [0, 0, 0]
