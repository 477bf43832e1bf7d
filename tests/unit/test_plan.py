"""Layout estimates against sums made by hand, and the tool that chooses among them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_lt2 import plan
from megatron_lt2.config.errors import ConfigError
from megatron_lt2.config.schema import ModelConfig, ParallelConfig, RunConfig
from megatron_lt2.parallel import platform

platform.install()

from megatron_lt2.config.checks import check_config  # noqa: E402
from megatron_lt2.config.load import load_config  # noqa: E402
from megatron_lt2.layouts import RECOMPUTE, best_layout, candidates, find_layouts  # noqa: E402
from megatron_lt2.model.cost import passes_in_flight  # noqa: E402
from megatron_lt2.model.speed import Machine, bandwidth, estimate_step  # noqa: E402
from megatron_lt2.model.traffic import transfers  # noqa: E402
from megatron_lt2.scaling import MODELS, row, scaling_tables  # noqa: E402

PAGE = Path(__file__).resolve().parents[2] / "docs/scaling.md"
D, HEADS, LOOPS, TOKENS, BATCH = 32, 4, 3, 48, 8


def run(pattern: str = "gdn", **sizes: object) -> RunConfig:
    """Two layers; heads of 6 keys and 12 values (gdn); bf16; 8 sequences of 48 tokens a step."""
    config = RunConfig(
        model=ModelConfig(
            num_layers=2,
            hidden_size=D,
            num_heads=HEADS,
            ffn_hidden_size=64,
            vocab_size=61,
            pattern=pattern,
            loops=LOOPS,
        ),
        parallel=ParallelConfig(**sizes),
    )
    config.data.sequence_length = TOKENS
    config.training.global_batch_size = BATCH
    return config


def sent(config: RunConfig, world: int) -> dict[str, tuple[float, float]]:
    return {one.kind: (one.bytes, one.messages) for one in transfers(config, world)}


def test_one_rank_sends_nothing() -> None:
    assert transfers(run(), 1) == []


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recompute", [False, True])
def test_tensor_traffic(sequence: bool, recompute: bool) -> None:
    config = run("full", tensor=2, sequence=sequence)
    if recompute:
        config.memory.recompute_layers = 1.0
    half = TOKENS * D * 2 / 2
    # Two all-reduces forward, each as much as a reduce-scatter and a gather, two back.
    each = 4 * half + 4 * half + (2 * half if sequence else 0) + (4 * half if recompute else 0)
    ends = (5 if sequence else 4) * half + 2 * 3 * TOKENS * 4 / 2
    norms = 2 * (2 * 2 * D + D + LOOPS * D) * 4 / 2 if sequence else 0
    assert sent(config, 2)["tensor"][0] == BATCH * (2 * LOOPS * each + ends) + norms


def test_shared_sections_are_gathered_by_tensor_ranks() -> None:
    plain, mamba = (run(name, tensor=2) for name in ("gdn", "mamba2"))
    mamba.model.mamba2.head_k_dim = 6
    more = sent(mamba, 2)["tensor"][0] - sent(plain, 2)["tensor"][0]
    # B and C in bf16, gathered forward and scattered back; a sum of squares a token, all-reduced.
    one_way = TOKENS * 12 * 2 / 2 + 2 * TOKENS * 4 / 2
    norm = 2 * 12 * 2 / 2  # gdn's, whose weight all heads share: its gradient is summed
    assert more == BATCH * 2 * LOOPS * (2 * one_way - norm)


def test_traffic_by_heads() -> None:
    """q, k, v, beta and decay of all tokens there, the output back; B and C to every rank."""
    passes, away = BATCH * 2 * LOOPS * 2, TOKENS / 4 * 2 * 3 / 4
    config = run("gdn", context=4, context_exchange="heads")
    each = HEADS * (6 + 6 + 12 + 2) + HEADS * 12
    assert sent(config, 4)["heads"] == (passes * away * each, passes * 2)
    mamba = run("mamba2", context=4, context_exchange="heads")
    mamba.model.mamba2.head_k_dim, mamba.model.mamba2.head_v_dim = 6, 16
    each = HEADS * (16 + 1) + 4 * 2 * 6 + HEADS * 16
    assert sent(mamba, 4)["heads"] == (passes * away * each, passes * 2)


@pytest.mark.parametrize(
    "pattern, numbers, rows",
    [
        ("gdn", 6 * 12 + 6 * 6, 4 * (6 + 6 + 12)),
        ("kda", 8 * 8 + 8 * 8, 4 * 24),
        ("gla", 4 * 8 + 4, 0),
        ("retnet", 8 * 16 + 1, 0),
        ("mlstm", 4 * 9 + 1 + 1, 0),
    ],
)
def test_state_and_halo_traffic(pattern: str, numbers: int, rows: int) -> None:
    """fp32 maps of all heads to every other rank; three bf16 inputs of the convolution to the next;
    each forward and backward."""
    config = run(pattern, context=4)
    passes = BATCH * 2 * LOOPS * 2
    found = sent(config, 4)
    assert found["state"] == (passes * HEADS * numbers * 4 * 3, passes)
    assert found.get("halo", (0, 0)) == (passes * 3 * rows * 2, passes if rows else 0)
    longer = replace(config, data=replace(config.data, sequence_length=4 * TOKENS))
    assert sent(longer, 4)["state"] == found["state"]


def test_many_large_state_maps_are_scanned() -> None:
    config = run(context=64)
    config.model.gdn.head_k_dim, config.model.gdn.head_v_dim = 256, 512
    config.data.sequence_length = 64 * TOKENS
    own = HEADS * 256 * (256 + 512) * 4
    assert own * 64 > 2**26
    passes = BATCH * 2 * LOOPS * 2
    assert sent(config, 64)["state"] == (passes * own * 7, passes * 7)


def test_attention_traffic_by_heads_and_by_keys() -> None:
    passes = BATCH * 2 * LOOPS * 2
    by_heads = sent(run("full", context=2), 2)["attention"]
    assert by_heads == (passes * (TOKENS / 2) * 4 * D * 2 / 2, passes * 2)
    by_keys = sent(run("full", context=8), 8)["attention"]  # of four heads
    assert by_keys == (passes * (TOKENS / 8) * 7 * 2 * D * 2, passes)
    window = run("window", context=8)
    window.model.window.size = 5
    assert sent(window, 8)["attention"] == (passes * 4 * 2 * D * 2, passes)


def test_pipeline_traffic_carries_the_loop_input() -> None:
    state = TOKENS * D * 2
    messages = BATCH * 2 * LOOPS
    assert sent(run(pipeline=2), 2)["pipeline"] == (messages * 2 * state, messages)
    without = run(pipeline=2)
    without.model.loop_residual = "none"
    assert sent(without, 2)["pipeline"] == (messages * state, messages)


def test_data_parallel_traffic_is_once_a_step() -> None:
    config = run()
    ffn, norms = 3 * D * 64, 2 * D
    mixer = D * 4 * (6 + 6 + 12 + 12 + 1 + 1) + D * 48 + 4 * 24 * 4 + 4 * 2 + 12
    count = 2 * (ffn + norms + mixer) + 64 * D + D + LOOPS * D
    for world in (2, 4):
        found = sent(config, world)
        assert found["gradients"] == (count * 4 * (world - 1) / world, 1)
        assert found["parameters"] == (count * 2 * (world - 1) / world, 1)
    config.parallel.distributed_optimizer = False
    assert sent(config, 2) == {"gradients": (count * 4, 1)}


@pytest.mark.parametrize(
    "pipeline, loops, stage, batches, passes",
    [(1, 3, 0, 8, 3), (2, 1, 0, 8, 2), (2, 1, 1, 8, 1), (2, 3, 0, 8, 7), (2, 3, 1, 8, 5)],
)
def test_passes_in_flight(pipeline, loops, stage, batches, passes) -> None:
    config = run(pipeline=pipeline)
    config.model.loops = loops
    assert passes_in_flight(config, stage, batches) == passes


def test_links_of_groups() -> None:
    machine = Machine(inside=100.0, across=10.0, gpus_per_node=8)
    assert bandwidth(machine, 8, 1) == (100.0, "inside")
    assert bandwidth(machine, 4, 4) == (20.0, "across")
    assert bandwidth(machine, 2, 8) == (10.0, "across")
    assert bandwidth(machine, 64, 1) == (80.0, "across")


def test_bubble_shrinks_with_loops_and_micro_batches() -> None:
    parts = estimate_step(run(pipeline=2), 2, Machine()).parts
    work = sum(v for k, v in parts.items() if k not in ("bubble", "pipeline", "optimizer"))
    assert parts["bubble"] == pytest.approx(work / (BATCH * LOOPS))


def test_layouts_are_accepted_and_sorted() -> None:
    base, machine = run(), Machine()
    memory = 1e9
    found, refused = find_layouts(base, 8, machine, memory)
    assert len(found) > 20 and refused.total() > 0
    for layout in found:
        check_config(layout.config, 8, need_data=False)
    fitting = [layout.time.total for layout in found if layout.fits(memory)]
    assert fitting == sorted(fitting) and len(fitting) == len(found)
    sizes = [tuple(layout.sizes().values()) for layout in found]
    assert len(set(sizes)) == len(sizes)
    assert base.parallel == ParallelConfig(), "the run given is left alone"
    best = best_layout(base, 8, machine, memory)
    assert best is not None and best.time.total == found[0].time.total


def test_what_does_not_fit_comes_last_by_memory() -> None:
    found, _ = find_layouts(run(), 8, Machine(), 1e9)
    needs = sorted(layout.memory.total for layout in found)
    memory = needs[len(needs) // 2] / 0.92
    found, _ = find_layouts(run(), 8, Machine(), memory)
    fits = [layout.fits(memory) for layout in found]
    assert fits == sorted(fits, reverse=True) and len(set(fits)) == 2
    rest = [layout.memory.total for layout in found if not layout.fits(memory)]
    assert rest == sorted(rest)


def test_pinned_choices_stay() -> None:
    base = run(tensor=2)
    found = list(candidates(base, 8, Machine(), {"tensor", "recompute"}))
    assert {(c.parallel.tensor, c.memory.recompute_layers) for c in found} == {(2, 0.0)}
    assert not any(c.memory.recompute_cheap for c in found)


# The tool itself.

TINY = [
    *("--model.num_layers", "2", "--model.hidden_size", "32", "--model.num_heads", "4"),
    *("--model.vocab_size", "61", "--model.loops", "3", "--data.sequence_length", "48"),
    *("--training.global_batch_size", "8", "--model.pattern", "gdn+full"),
]


def test_json_and_the_options_to_paste(capsys) -> None:
    assert plan.main(["--gpus", "4", "--json", *TINY]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["gpus"] == 4 and printed["memory_bytes"] == 80e9 and printed["advice"] is None
    assert printed["chosen"] == printed["layouts"][0]
    for layout in printed["layouts"]:
        ways = layout["tensor"] * layout["pipeline"] * layout["context"] * layout["data"]
        assert ways == 4
        assert layout["recompute"] in RECOMPUTE
        for name in ("memory_bytes", "seconds"):
            parts = dict(layout[name])
            assert parts.pop("total") == pytest.approx(sum(parts.values()))
        assert set(layout["sent_bytes"]) == set(layout["messages"])
    refused = printed["refused"]
    assert all(isinstance(v, int) for v in refused.values())
    pasted = load_config([*TINY, *printed["layouts"][-1]["overrides"]])
    check_config(pasted, 4, need_data=False)
    last = printed["layouts"][-1]
    assert pasted.parallel.tensor == last["tensor"] and pasted.parallel.context == last["context"]
    assert pasted.memory == RECOMPUTE[last["recompute"]]


@pytest.mark.parametrize("name", RECOMPUTE)
def test_what_is_made_again_is_printed_as_options_that_load(name: str) -> None:
    """Beside a base that has something else, so that every choice must be said."""
    other = "full" if name == "none" else "none"
    base = replace(run(), memory=replace(RECOMPUTE[other]))
    found, _ = find_layouts(base, 1, Machine(), 1e9)
    chosen = [layout for layout in found if layout.sizes()["recompute"] == name]
    assert chosen
    for layout in chosen:
        options = layout.overrides(base)
        assert "--memory.recompute_cheap" in options
        pasted = load_config([*TINY, *options])
        assert pasted.memory == RECOMPUTE[name]
        check_config(pasted, 1, need_data=False)


def test_cheap_parts_cost_less_memory_than_kept_ones_and_less_time_than_layers() -> None:
    found, _ = find_layouts(run(), 1, Machine(), 1e9)
    one = [x for x in found if x.config.training.micro_batch_size == 1]
    by_name = {layout.sizes()["recompute"]: layout for layout in one}
    none, cheap, full = (by_name[name] for name in ("none", "cheap", "full"))
    assert none.memory.total > cheap.memory.total > full.memory.total
    assert none.time.total <= cheap.time.total < full.time.total


@pytest.mark.parametrize("pattern", ["gdn", "full"])
def test_making_cheap_parts_again_takes_a_little_time(pattern: str) -> None:
    config = RunConfig(model=ModelConfig(vocab_size=128256, pattern=pattern))
    config.data.sequence_length = 4096
    config.training.micro_batch_size = config.training.global_batch_size = 2
    plain = estimate_step(config, 1, Machine())
    config.memory.recompute_cheap = True
    again = estimate_step(config, 1, Machine())
    assert 1.002 < again.total / plain.total < 1.04


@pytest.mark.parametrize(
    "pinned", [["--memory.recompute_cheap", "true"], ["--memory.recompute_layers", "0.5"]]
)
def test_what_is_made_again_can_be_given(pinned: list[str], capsys) -> None:
    assert plan.main(["--gpus", "2", "--json", *TINY, *pinned]) == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert {x["recompute"] for x in layouts} == {"cheap" if "true" in pinned else "50%"}
    assert not any("--memory.recompute_layers" in x["overrides"] for x in layouts)


def test_table_and_choice(capsys) -> None:
    assert plan.main(["--gpus", "2", "--top", "3", *TINY]) == 0
    out = capsys.readouterr().out
    assert "chosen; add to the training command:\n  --parallel.tensor " in out
    assert "more, see --top" in out


def test_a_given_layout_is_kept(capsys) -> None:
    assert plan.main(["--gpus", "4", "--json", *TINY, "--parallel.tensor", "2"]) == 0
    assert {x["tensor"] for x in json.loads(capsys.readouterr().out)["layouts"]} == {2}


def test_nothing_fits(capsys) -> None:
    large = [*TINY, "--model.hidden_size", "1024", "--model.vocab_size", "100000"]
    assert plan.main(["--gpus", "1", "--memory", "2GB", *large]) == 1
    out = capsys.readouterr().out
    assert "nothing fits into 2 GB" in out and "With 2 GPUs there is one that fits" in out
    assert plan.main(["--gpus", "8", "--memory", "1MB", *TINY]) == 1
    assert "More GPUs do not help" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([*TINY], "--gpus is missing"),
        (["--gpus", "0", *TINY], "--gpus is '0'; it must be a whole number of 1 or more"),
        (["--gpus", "four", *TINY], "--gpus is 'four'"),
        (["--gpus", "2", "--memory", "80", *TINY], "--memory is '80'; write a number and one of"),
        (["--gpus", "2", "--memory", "80XB", *TINY], "--memory is '80XB'"),
        (["--gpus", "2", "--memory", "0GB", *TINY], "--memory is '0GB'"),
        (["--gpus", "2", "--interconnect", "nvlink", *TINY], "--interconnect is 'nvlink'"),
        (["--gpus", "2", "--interconnect", "nvlink,wet", *TINY], "(known: nvlink3, nvlink"),
        (["--gpus", "2", "--gpus-per-node", "0", *TINY], "--gpus-per-node is '0'"),
        (["--gpus", "2", "--tflops", "-1", *TINY], "--tflops is '-1'"),
        (["--gpus", "2"], "model.vocab_size is not set"),
        (["--gpus", "2", "--memmory", "80GB", *TINY], "unknown option --memmory"),
        (["--gpus", "1024", *TINY], "no layout of 1024 GPUs: "),
        (["--gpus", "2", *TINY, "--model.num_heads", "5"], "is not divisible by model.num_heads 5"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], said: str, capsys) -> None:
    assert plan.main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1 and said in error[0]


def test_units() -> None:
    assert plan.parse_memory("80GB") == 80e9
    assert plan.parse_memory("143771 MiB") == 143771 * 2**20
    assert plan.parse_interconnect("nvlink,ib400") == (360e9, 45e9)
    assert plan.parse_interconnect("100, 12.5") == (100e9, 12.5e9)
    with pytest.raises(ConfigError):
        plan.parse_interconnect("0,1")


def test_help_teaches(capsys) -> None:
    with pytest.raises(SystemExit) as ended:
        plan.main(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "launchers/configs/lt2_1b3.yaml --gpus 64" in out and "nvlink" in out


# The page.


def page_tables() -> str:
    text = PAGE.read_text("utf-8")
    begin, end = "<!-- begin: python -m megatron_lt2.plan --scaling-table -->\n", "<!-- end -->"
    return text[text.index(begin) + len(begin) : text.index(end)]


@pytest.mark.parametrize("model, label, gpus", [("1.3B", "1M", 64), ("7B", "4k", 8)])
def test_rows_of_the_page(model: str, label: str, gpus: int) -> None:
    assert row(MODELS[model], label, gpus) in page_tables().splitlines()


def test_the_page_says_what_it_is() -> None:
    assert "Nothing on this page was measured on more than one GPU" in PAGE.read_text("utf-8")


@pytest.mark.slow
def test_the_page_is_what_the_command_prints() -> None:
    assert page_tables() == scaling_tables()
