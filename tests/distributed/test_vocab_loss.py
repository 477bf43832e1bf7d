"""The head's loss over chunks of tokens equals megatron-core's on the logits of all tokens.

As a function on random numbers and in whole models, on one rank and on two; and mistakes put in on
purpose do not.
"""

from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch

from megatron_lt2.config.schema import ParallelConfig
from megatron_lt2.parallel import platform
from tests.fp64 import token_losses
from tests.ranks import run_ranks
from tests.tiny_run import build, feed_of, global_tensors, micro_batch_count, tiny_config

platform.install()

LENGTH, ROWS, WIDTH, VOCABULARY = 14, 3, 12, 37
PADDED = 64
"""Of two ranks the second has 5 rows that are no padding."""
BOUND = {torch.float32: 1e-6, torch.float64: 1e-12}


def _numbers(dtype):
    """Hidden states [s, b, d], weight [v, d], labels [b, s], and what each loss is multiplied by:
    some tokens are masked, and padding rows of the weight are large."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(LENGTH, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    weight = torch.randn(PADDED, WIDTH, generator=generator, dtype=torch.float64)
    weight[VOCABULARY:] *= 9
    labels = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    labels[0, :4] = torch.tensor([0, 31, 32, VOCABULARY - 1])  # ends of the ranks' rows
    factors = torch.randn(ROWS, LENGTH, generator=generator, dtype=torch.float64)
    factors[torch.rand(ROWS, LENGTH, generator=generator) < 0.2] = 0.0
    return hidden.to(dtype), weight.to(dtype), labels, factors.to(dtype)


def _head(rank, world, sequence, dtype):
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import ColumnParallelLinear
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_lt2.parallel.start import start_ranks

    if not parallel_state.model_parallel_is_initialized():
        start_ranks(ParallelConfig(tensor=world, sequence=sequence), 1)
    config = TransformerConfig(
        **{"num_layers": 1, "hidden_size": WIDTH, "num_attention_heads": 2},
        **{"tensor_model_parallel_size": world, "sequence_parallel": sequence},
        **{"params_dtype": dtype, "use_cpu_initialization": True, "perform_initialization": False},
        gradient_accumulation_fusion=False,
    )
    return ColumnParallelLinear(
        WIDTH,
        PADDED,
        config=config,
        init_method=lambda x: x,
        bias=False,
        gather_output=False,
        tp_group=parallel_state.get_tensor_model_parallel_group(),
    )


def _both(rank, world, sequence, dtypes, fault=None):
    """By dtype: (losses, gradients of hidden states and weight) of the reference and of ours."""
    from types import SimpleNamespace

    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    from megatron_lt2.parallel.vocab_loss import VocabularyHead

    found = {}
    for dtype in dtypes:
        hidden, weight, labels, factors = _numbers(dtype)
        head = _head(rank, world, sequence, dtype)
        rows = PADDED // world
        if sequence:
            hidden = hidden.chunk(world)[rank]

        def reference(x, head, dtype=dtype, labels=labels, rows=rows):
            logits, _ = head(x)
            logits[..., max(0, VOCABULARY - rank * rows) :] = torch.finfo(dtype).min
            if dtype == torch.float64:  # megatron-core's loss is fp32
                groups = SimpleNamespace(pg_collection=SimpleNamespace(tp=head.tp_group))
                return token_losses(groups, labels, logits)
            losses = vocab_parallel_cross_entropy(
                logits, labels.t().contiguous(), tp_group=head.tp_group
            )
            return losses.t()

        def ours(x, head, labels=labels):
            head = VocabularyHead.adopt(head, VOCABULARY, "torch")
            with _chunks_of(5), _faults(fault):
                return head(x, labels=labels)

        results = []
        for losses_of in (reference, ours):
            x = hidden.clone().requires_grad_()
            head.weight.data = weight[rank * rows : (rank + 1) * rows].clone()
            head.weight.grad = None
            losses = losses_of(x, head)
            assert losses.dtype == dtype and losses.is_contiguous() == (losses_of is ours)
            with _chunks_of(5), _faults(fault if losses_of is ours else None):
                (losses * factors).sum().backward()
            results.append([y.numpy() for y in (losses.detach(), x.grad, head.weight.grad)])
        found[dtype] = results
    return found


@contextmanager
def _chunks_of(tokens):
    from megatron_lt2.kernels import linear_cross_entropy as kernels

    with mock.patch.object(kernels, "chunk_tokens", lambda *given: tokens):
        yield


@contextmanager
def _faults(name):
    """Mistakes that the comparisons must see."""
    import torch.distributed as dist

    from megatron_lt2.ops import linear_cross_entropy as ops
    from megatron_lt2.parallel import vocab_loss, weight_gradient

    gradients, statistics = ops.logits_to_gradients, ops.row_statistics
    reduce, add = dist.all_reduce, weight_gradient.WeightGradient.add
    patches = {
        None: lambda: mock.patch.object(ops, "wide_dtype", ops.wide_dtype),
        "padding has a probability": lambda: mock.patch.object(
            ops, "row_statistics", lambda z, t, real: statistics(z, t, z.shape[1])
        ),
        "padding has a gradient": lambda: mock.patch.object(
            ops, "logits_to_gradients", lambda z, t, lse, w, real: gradients(z, t, lse, w, len(z.T))
        ),
        "every token weighs the same": lambda: mock.patch.object(
            ops,
            "logits_to_gradients",
            lambda z, t, lse, w, real: gradients(z, t, lse, torch.ones_like(w), real),
        ),
        "the weight's gradient of the last chunk only": lambda: mock.patch.object(
            weight_gradient.WeightGradient,
            "add",
            lambda self, dy, x: (self._own.zero_(), add(self, dy, x)),
        ),
        "sums of this rank only": lambda: mock.patch.object(
            vocab_loss.dist,
            "all_reduce",
            lambda x, *given, **options: x.dim() == 2 or reduce(x, *given, **options),
        ),
        "the input's gradient of this rank only": lambda: mock.patch.object(
            vocab_loss.dist,
            "all_reduce",
            lambda x, *given, **options: x.dim() == 3 or reduce(x, *given, **options),
        ),
    }
    with patches[name]():
        yield


def _errors(pair):
    """Largest relative error of the losses and of the gradients."""
    return [
        float(np.abs(got - expected).max() / np.abs(expected).max())
        for expected, got in zip(*pair, strict=True)
    ]


@pytest.mark.parametrize(
    "world, sequence", [(1, False), (2, False), (2, True)], ids=["one rank", "TP 2", "TP 2 + SP"]
)
def test_losses_and_gradients_equal_megatrons(world, sequence):
    for found in run_ranks(world, _both, sequence, list(BOUND)):
        for dtype, bound in BOUND.items():
            assert max(_errors(found[dtype])) < bound, (dtype, _errors(found[dtype]))


@pytest.mark.parametrize(
    "fault, world",
    [
        ("padding has a probability", 1),
        ("padding has a gradient", 1),
        ("every token weighs the same", 1),
        ("the weight's gradient of the last chunk only", 1),
        ("sums of this rank only", 2),
        ("the input's gradient of this rank only", 2),
    ],
)
def test_planted_faults_are_seen(fault, world):
    for found in run_ranks(world, _both, False, [torch.float64], fault):
        assert not max(_errors(found[torch.float64])) < 1e-3, fault


UNTIED = {"tie_embeddings": False}
EXITS = {
    "pattern": "full",
    "inter_loop_norm": True,
    "exit_gate": True,
    "loss": "exits",
}
MODELS = {
    "tied": {},
    "untied": UNTIED,
    "exits, tied": EXITS,
    "exits, untied": {**EXITS, **UNTIED},
}
LAYOUTS = {
    "one rank": (1, {}),
    "TP 2": (2, {"tensor": 2}),
    "TP 2 + SP": (2, {"tensor": 2, "sequence": True}),
    "CP 2": (2, {"context": 2}),
    "PP 2": (2, {"pipeline": 2}),
}


def _models(rank, world, configs):
    """By model: loss and gradients with the logits of all tokens, and with those of chunks."""
    from megatron_lt2.model.lt2_model import LT2Model
    from megatron_lt2.training.steps import _run_schedule, mean_over_ranks

    def all_logits(self, hidden, labels):
        return self.compute_language_model_loss(labels, self._logits(hidden))

    found = []
    for config in configs:
        pair = []
        for losses in (all_logits, LT2Model._token_losses):
            with mock.patch.object(LT2Model, "_token_losses", losses), _chunks_of(7):
                parts = build(config, restart=True)
                parts.ddp.zero_grad_buffer()
                feed, count = feed_of(config, range(1)), micro_batch_count(config)
                sums = _run_schedule(config, parts, feed, count, forward_only=False)
            loss = mean_over_ranks(sums[0], sums[-1])
            pair.append((loss, global_tensors(parts, config, lambda p: p.main_grad)))
        found.append(pair)
    return found


def _tied_fault(rank, world, config):
    """Losing what the lookup says about a weight that is the embedding and the head."""
    from megatron_lt2.parallel import vocab_loss

    with mock.patch.object(vocab_loss, "mark_tied", lambda weight: None):
        return _models(rank, world, [config])[0]


def test_a_lost_gradient_of_the_lookup_is_seen():
    key = "embedding.word_embeddings.weight"
    expected, got = run_ranks(1, _tied_fault, tiny_config())[0]
    error = np.abs(got[1][key] - expected[1][key]).max() / np.abs(expected[1][key]).max()
    assert error > 1e-2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_models_train_as_with_all_logits(layout):
    world, sizes = LAYOUTS[layout]
    configs = []
    for model in MODELS.values():
        config = tiny_config(parallel=ParallelConfig(distributed_optimizer=False, **sizes))
        config.model = replace(config.model, **model)
        config.training.global_batch_size = 2
        configs.append(config)
    for found in run_ranks(world, _models, configs):
        for name, (expected, got) in zip(MODELS, found, strict=True):
            assert got[0] == pytest.approx(expected[0], rel=1e-6), name
            assert got[1].keys() == expected[1].keys()
            for key, gradient in expected[1].items():
                error = np.abs(got[1][key] - gradient).max() / np.abs(gradient).max()
                assert error < 2e-5, f"{name}, {key}: relative error {error:.1e}"
