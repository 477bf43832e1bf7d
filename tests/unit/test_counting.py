"""Declared costs against real models: parameters exactly, operations by torch's counter.

The counter sees matrix products as they are executed. The differences from what is declared are
exact and known: the head also multiplies the padding rows of the vocabulary; attention's
fused kernel is not seen on CPU, and its plain form fills the whole square of scores where a causal
query needs half; the chunked recurrence does other products than the plain recurrence, which is
what is declared, so only its step form is comparable.
"""

from dataclasses import replace

import pytest

from megatron_lt2.config.mixers import DeltaNetConfig, GDNConfig, Mamba2Config
from megatron_lt2.config.schema import AttentionConfig, ModelConfig
from megatron_lt2.parallel import platform
from tests.ranks import run_ranks
from tests.tiny_run import tiny_config

platform.install()

from megatron_lt2.mixers.registry import MIXER_NAMES, get_mixer  # noqa: E402
from megatron_lt2.model.activations import Share, layer_bytes  # noqa: E402
from megatron_lt2.model.core_config import padded_vocab_size  # noqa: E402
from megatron_lt2.model.cost import head_bytes, layer_parameters, stage_parameters  # noqa: E402
from megatron_lt2.model.counting import (  # noqa: E402
    count_parameters,
    estimate_memory,
    forward_flops_per_token,
    training_flops_per_token,
)
from megatron_lt2.model.pattern import expand_pattern  # noqa: E402
from megatron_lt2.scaling import MEASURED_PEAKS, measured_run  # noqa: E402

TINY = tiny_config().model
GATE_OFF = AttentionConfig(output_gate=False)
SHAPES = {
    "grouped queries": TINY,
    "a key for each query": replace(TINY, num_kv_heads=None),
    "one key": replace(TINY, num_kv_heads=1, pattern="full"),
    "head dimension": replace(TINY, head_dim=6, pattern="full"),
    "untied": replace(TINY, tie_embeddings=False),
    "gate off": replace(TINY, attention=GATE_OFF),
    "no loop residual": replace(TINY, loop_residual="none"),
    "five loops": replace(TINY, loops=5),
    "gdn only": replace(TINY, pattern="gdn"),
    "gdn geometry": replace(
        TINY, pattern="gdn", gdn=GDNConfig(num_heads=3, head_k_dim=4, head_v_dim=6, conv_size=3)
    ),
    **{name: replace(TINY, pattern=name) for name in MIXER_NAMES},
    "gated deltanet": replace(TINY, pattern="deltanet", deltanet=DeltaNetConfig(output_gate=True)),
    "mamba2 normed a head": replace(TINY, pattern="mamba2", mamba2=Mamba2Config(norm="head")),
    "full only": replace(TINY, pattern="full"),
    "sandwich norms": replace(TINY, norm_mode="sandwich"),
    "exit gate": replace(TINY, exit_gate=True),
    "a list": replace(TINY, pattern=["full", "gdn", "gdn"]),
    "ffn by the rule": replace(TINY, ffn_hidden_size=None),
}


def _real_counts(rank, world, config, shapes):
    """Parameters of the real models and the rows of padding that they hold."""
    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.setup import build_parts

    start_ranks(config.parallel, 1)
    counts = []
    for model in shapes:
        config.model = model
        real = build_parts(config).model
        tables = [p for n, p in real.named_parameters() if "embedding" in n or "output_layer" in n]
        padding = sum(t.shape[0] - model.vocab_size for t in tables) * model.hidden_size
        assert padding > 0
        counts.append(sum(p.numel() for p in real.parameters()) - padding)
    return counts


def test_declared_parameters_are_those_of_the_real_model():
    counts = run_ranks(1, _real_counts, tiny_config(), list(SHAPES.values()))[0]
    declared = [count_parameters(model) for model in SHAPES.values()]
    assert dict(zip(SHAPES, declared, strict=True)) == dict(zip(SHAPES, counts, strict=True))
    assert len(set(counts)) > 8


@pytest.mark.parametrize(
    "pattern, gate, billions",
    [("full", False, 1.342), ("gdn", True, 1.520), ("4*gdn+full", True, 1.503)],
)
def test_the_papers_sizes(pattern, gate, billions):
    model = ModelConfig(
        vocab_size=128256, pattern=pattern, attention=AttentionConfig(output_gate=gate)
    )
    assert count_parameters(model) / 1e9 == pytest.approx(billions, rel=1e-3)


@pytest.mark.parametrize("layers, parameters", [(24, 1_434_652_673), (48, 2_667_974_657)])
def test_ouros_published_sizes(layers, parameters):
    model = ModelConfig(
        **{"vocab_size": 49152, "num_layers": layers, "pattern": "full", "loop_residual": "none"},
        **{"norm_mode": "sandwich", "inter_loop_norm": True, "exit_gate": True, "loss": "exits"},
        **{"tie_embeddings": False, "attention": GATE_OFF},
    )
    assert count_parameters(model) == parameters


def test_the_loss_over_exits_runs_the_head_in_every_loop():
    last = replace(TINY, exit_gate=True)
    every = replace(last, loss="exits")
    more = forward_flops_per_token(every, 24) - forward_flops_per_token(last, 24)
    assert more == 2 * TINY.hidden_size * (TINY.vocab_size + 1)  # two loops
    config = tiny_config(model=every)
    # The logits make the peak, those of one loop and of a chunk of its tokens.
    config.model.vocab_size, config.data.sequence_length = 2**16, 2**15
    head = 2**29 + 2 * 2**15 * TINY.hidden_size  # and the hidden states' gradient
    assert estimate_memory(config, 1, 2).logits == head


def test_what_is_alive_at_the_head():
    config = tiny_config()
    config.model.vocab_size = 2**16
    logits, weight, hidden = 24 * 2**16, 32 * 2**16, 24 * 32
    assert head_bytes(config, Share(tokens=24)) == 2 * (logits + hidden)
    assert head_bytes(config, Share(tokens=24, sequence=True)) == 2 * (logits + 2 * hidden)
    config.model.tie_embeddings = False  # autograd gets a gradient of the weight's size
    assert head_bytes(config, Share(tokens=24)) == 2 * (weight + hidden)
    config.parallel.tensor = 2
    assert head_bytes(config, Share(tokens=24, tensor=2)) == weight + 2 * hidden
    config.parallel.tensor, config.parallel.pipeline = 1, 2
    config.model.tie_embeddings = True  # a copy of the embedding
    assert head_bytes(config, Share(tokens=24)) == 6 * weight + 2 * hidden


def _counted(rank, world, config, cases):
    """Operations a token that the counter sees: (plain products, all with unfused attention)."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    from megatron_lt2.parallel.start import start_ranks
    from megatron_lt2.training.setup import build_parts

    start_ranks(config.parallel, 1)
    result = []
    for model, length in cases:
        config.model = model
        real = build_parts(config).model
        tokens = torch.arange(length)[None] % model.vocab_size
        positions = torch.arange(length)[None]
        with (
            torch.no_grad(),
            sdpa_kernel(SDPBackend.MATH),
            FlopCounterMode(display=False) as counter,
        ):
            # Losses only where the head runs in every loop: their kernels are not products.
            real(tokens, positions, labels=tokens if model.loss == "exits" else None)
        counts = counter.get_flop_counts()["Global"]
        products = counts[torch.ops.aten.mm] + counts.get(torch.ops.aten.addmm, 0)
        result.append((products / length, counter.get_total_flops() / length))
    return result


def _beyond_matrices(model, length, only=None):
    names = expand_pattern(model.pattern, model.num_layers, MIXER_NAMES)
    names = [name for name in names if only in (None, name)]
    return model.loops * sum(get_mixer(name).token_flops(model, length) for name in names)


def test_declared_operations_are_those_of_the_real_model():
    config = tiny_config()
    cases = [
        (replace(TINY, pattern=pattern, loops=loops, **more), length)
        for pattern, loops, length, more in [
            ("full", 1, 24, {}),
            ("full", 3, 37, {}),
            ("full", 2, 24, {"attention": GATE_OFF, "num_kv_heads": 1}),
            ("gdn+full", 2, 24, {}),
            ("gdn+full", 3, 37, {"tie_embeddings": False}),
            ("gdn", 2, 24, {}),
            ("full", 3, 24, {"exit_gate": True, "loss": "exits", "norm_mode": "sandwich"}),
        ]
    ]
    counted = run_ranks(1, _counted, config, cases)[0]
    for (model, length), (products, everything) in zip(cases, counted, strict=True):
        declared = forward_flops_per_token(model, length)
        config.model = model
        padding = 2 * (padded_vocab_size(config) - model.vocab_size) * model.hidden_size
        padding *= model.heads_run
        assert products == declared - _beyond_matrices(model, length) + padding
        if model.pattern == "full":
            # Twice the causal half: the square of scores has `length` keys a query.
            square = _beyond_matrices(model, length) * 2 * length / (length + 1)
            assert everything - products == pytest.approx(square, rel=1e-9)
        else:
            assert everything - products > _beyond_matrices(model, length, "full")


@pytest.mark.parametrize("pattern", ["full", "gdn", "gdn+full"])
def test_operations_are_linear_in_loops(pattern):
    def at(loops):
        return forward_flops_per_token(replace(TINY, pattern=pattern, loops=loops), 24)

    head = 2 * TINY.vocab_size * TINY.hidden_size
    for loops in (2, 3, 7):
        assert at(loops) - head == pytest.approx(loops * (at(1) - head), rel=1e-12)


def test_only_attention_grows_with_the_length():
    for pattern, grows in (("full", True), ("gdn", False)):
        model = replace(TINY, pattern=pattern)
        short, long = (forward_flops_per_token(model, length) for length in (100, 200))
        assert (long > short) == grows


def test_recurrence_counts_three_products_with_the_state():
    model = replace(TINY, pattern="gdn", loops=1)
    heads, k, v, taps = 4, 6, 12, 4
    recurrence, conv = 3 * 2 * heads * k * v, 2 * heads * (2 * k + v) * taps
    assert get_mixer("gdn").token_flops(model, 24) == recurrence + conv


def test_training_costs_three_forwards():
    assert training_flops_per_token(TINY, 24) == 3 * forward_flops_per_token(TINY, 24)


def test_memory_estimate_follows_the_shards():
    config = tiny_config()
    rows = padded_vocab_size(config) - config.model.vocab_size
    count = count_parameters(config.model) + rows * config.model.hidden_size
    one = estimate_memory(config, 1, 4)
    assert (one.parameters, one.gradients, one.optimizer) == (4 * count, 4 * count, 8 * count)
    assert one.total == sum(
        (one.parameters, one.gradients, one.optimizer, one.activations, one.logits, one.other)
    )
    config.parallel.distributed_optimizer = True
    four = estimate_memory(config, 4, 2)
    # bf16 weights have fp32 master weights besides Adam's two moments.
    assert (four.parameters, four.optimizer) == (2 * count, 12 * count / 4)
    config.parallel.tensor = 2
    assert estimate_memory(config, 4, 2).parameters == count
    hidden = 2 * 24 * config.model.hidden_size  # its gradient, of which every rank has a part
    assert estimate_memory(config, 4, 2).logits - hidden == (four.logits - hidden) / 2
    config.parallel.tensor, config.parallel.context = 1, 2
    assert estimate_memory(config, 4, 2).optimizer == four.optimizer
    # So that the logits make the peak.
    config.model.vocab_size, config.data.sequence_length = 2**16, 240
    assert estimate_memory(config, 4, 2).logits == 2 * 120 * (2**16 + config.model.hidden_size)


def test_a_pipeline_stage_holds_its_layers_and_a_table():
    model = replace(TINY, num_layers=4, pattern="full", loops=1)
    config = tiny_config(model=model)
    table = 64 * model.hidden_size
    layer = 2 * layer_parameters("full", model)
    assert stage_parameters(config) == [2 * layer + table + model.hidden_size + model.hidden_size]
    config.parallel.pipeline = 2
    # A tied head is a copy; the last stage also has the final norm and rho.
    assert stage_parameters(config) == [layer + table, layer + table + 2 * model.hidden_size]


def test_recomputation_keeps_the_layers_inputs():
    config = tiny_config()
    config.model.vocab_size, config.data.sequence_length = 16, 8192
    whole = estimate_memory(config, 1, 2)
    config.memory.recompute_layers = 1.0
    less = estimate_memory(config, 1, 2)
    passes = config.model.num_layers * config.model.loops
    stream = 8192 * config.model.hidden_size * 2
    assert less.activations in (passes * stream + 2 * stream, passes * stream * 0.5 + 2 * stream)
    assert less.total - less.other < whole.total / 3


@pytest.mark.parametrize("pattern, rows, length, recompute, peak", MEASURED_PEAKS)
def test_measured_peaks(pattern, rows, length, recompute, peak):
    """docs/performance.md, one H200."""
    estimate = estimate_memory(measured_run(pattern, rows, length, recompute), 1, 2).total
    assert estimate == pytest.approx(peak, rel=0.01)


def test_bytes_kept_by_the_1_3b_layer_add_up():
    """Tensor by tensor, bf16, 16 heads of 96 keys and 192 values."""
    model = ModelConfig(vocab_size=128256)
    keys, values, d, ffn, heads = 1536, 3072, 2048, 5632, 16
    norms = 2 * (2 * d * 2 + 4)
    conv_input = (2 * keys + values) * 2
    recurrence = (2 * keys + values) * 2 + heads * (64 * 2 + 2 * 4 + 2 * 2)
    gated_norm = 3 * values * 2 + heads * 4
    expected = norms + conv_input + recurrence + gated_norm + 2 * ffn * 2
    assert layer_bytes("gdn", model, Share(tokens=8192)) == expected
    # Outputs of both norms, of the gated one, and of the convolution.
    again = 2 * d * 2 + values * 2 + (2 * keys + values) * 2
    assert layer_bytes("gdn", model, Share(tokens=8192, cheap=True)) == expected - again


@pytest.mark.parametrize("name", MIXER_NAMES)
def test_ranks_keep_less(name):
    model = replace(TINY, pattern=name)
    whole = layer_bytes(name, model, Share(tokens=24))
    half = layer_bytes(name, model, Share(tokens=24, tensor=2))
    shared = layer_bytes(name, model, Share(tokens=24, tensor=2, sequence=True))
    assert whole / 2 < half < whole and shared < half
    assert layer_bytes(name, model, Share(tokens=24, context=2)) > whole


def _kept_by_attention(rank, world, cases):
    from megatron_lt2.parallel.start import start_ranks
    from tests.kept import as_on_a_gpu, kept_bytes

    start_ranks(tiny_config().parallel, 1)
    with pytest.MonkeyPatch.context() as patch:
        as_on_a_gpu(patch)
        return [kept_bytes(model, Share(tokens=48, packed=False), "torch") for model in cases]


def test_attention_keeps_what_is_declared():
    """The linear mixers: tests/slow/test_kept.py. Grouped queries take another kernel on a GPU."""
    full = replace(TINY, num_layers=1, pattern="full", num_kv_heads=None)
    cases = [full, replace(full, head_dim=6), replace(full, attention=GATE_OFF)]
    cases.append(replace(full, norm_mode="sandwich"))
    measured = run_ranks(1, _kept_by_attention, cases)[0]
    for model, kept in zip(cases, measured, strict=True):
        declared = layer_bytes("full", model, Share(tokens=48, packed=False))
        assert kept == pytest.approx(declared, rel=0.01)
