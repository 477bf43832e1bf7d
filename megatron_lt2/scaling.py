"""The tables of docs/scaling.md: predictions for 8 to 1,024 GPUs, from the estimates of layouts.py.

`python -m megatron_lt2.plan --scaling-table` prints them.
"""

from megatron_lt2.config.schema import MemoryConfig, ModelConfig, RunConfig
from megatron_lt2.layouts import Layout, best_layout
from megatron_lt2.model.activations import Share, layer_bytes, state_map_bytes
from megatron_lt2.model.cost import chunk_bytes, estimate_memory
from megatron_lt2.model.counting import count_parameters
from megatron_lt2.model.speed import Machine, estimate_step
from megatron_lt2.model.traffic import transfers

MODELS = {
    "1.3B": ModelConfig(vocab_size=128256),
    "7B": ModelConfig(vocab_size=128256, num_layers=32, hidden_size=4096, num_heads=32),
}
LENGTHS = {"4k": 2**12, "32k": 2**15, "256k": 2**18, "1M": 2**20}
GPUS = (8, 64, 256, 1024)
TOKENS_A_STEP = 2**22
RECOMPUTED = {"cheap": ", c", "full": ", r"}
"""How the table marks layouts that recompute."""
MEMORY = 80e9

NONE, CHEAP = MemoryConfig(), MemoryConfig(recompute_cheap=True)
HALF = MemoryConfig(recompute_cheap=True, recompute_layers=0.55)

MEASURED_PEAKS = (
    ("4*gdn+full", 3, 4096, NONE, 117.0e9),
    ("4*gdn+full", 4, 4096, NONE, 145.4e9),
    ("4*gdn+full", 4, 4096, CHEAP, 113.9e9),
    ("4*gdn+full", 1, 16384, HALF, 71.8e9),
    ("gdn", 3, 4096, NONE, 119.9e9),
    ("gdn", 1, 16384, CHEAP, 112.7e9),
)
"""docs/performance.md: pattern, rows, tokens, what is recomputed, bytes."""

MEASURED_MS = {"matrix products": 528, "recurrences": 127, "attention": 26, "optimizer": 15}
"""docs/performance.md, of one profiled step."""


def scaling_tables() -> str:
    """What docs/scaling.md holds between its markers."""
    parts = [_table(name, model) for name, model in MODELS.items()]
    return "\n\n".join([*parts, memory_table(), numbers_table()]) + "\n"


def scaling_run(model: ModelConfig, length: int) -> RunConfig:
    """The run of a row, on any number of GPUs."""
    base = RunConfig(model=model)
    base.data.sequence_length = length
    base.training.global_batch_size = TOKENS_A_STEP // length
    return base


def _table(name: str, model: ModelConfig) -> str:
    lines = [
        f"## {name}: {model.num_layers} layers, width {model.hidden_size}, {model.loops} loops, "
        f"{count_parameters(model) / 1e9:.2f} billion parameters",
        "",
        "| tokens | GPUs | layout | GB | s a step | tokens/s a GPU | MFU | most time | share |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [row(model, label, gpus) for label in LENGTHS for gpus in GPUS]
    return "\n".join(lines)


def row(model: ModelConfig, label: str, gpus: int) -> str:
    """One line of a table."""
    layout = best_layout(scaling_run(model, LENGTHS[label]), gpus, Machine(), MEMORY)
    if layout is None:
        return f"| {label} | {gpus:,} | nothing fits | | | | | | |"
    time = layout.time
    return (
        f"| {label} | {gpus:,} | {_short(layout)} | {layout.memory.total / 1e9:.1f} | "
        f"{time.total:.2f} | {layout.tokens_per_s / gpus:,.0f} | "
        f"{layout.utilisation(Machine()):.2f} | {time.bound} | "
        f"{time.parts[time.bound] / time.total:.0%} |"
    )


def _short(layout: Layout) -> str:
    size = layout.sizes()
    ways = [("TP", size["tensor"]), ("PP", size["pipeline"]), ("CP", size["context"])]
    words = [f"{name} {count}" for name, count in ways if count > 1]
    if size["context"] > 1 and size["context_exchange"] == "heads":
        words[-1] += "h"
    if size["sequence"]:
        words[0] += "+"
    words += [f"DP {size['data']}", f"m {size['micro_batch_size']}"]
    return ", ".join(words) + RECOMPUTED.get(size["recompute"], "")


def measured_run(pattern: str, rows: int, length: int, memory: MemoryConfig) -> RunConfig:
    """A run whose peak docs/performance.md has: 21 layers, untied vocabulary, one GPU."""
    base = RunConfig(model=ModelConfig(vocab_size=128256, tie_embeddings=False, pattern=pattern))
    base.training.micro_batch_size = base.training.global_batch_size = rows
    base.data.sequence_length = length
    base.memory = memory
    return base


def memory_table() -> str:
    """Peaks that docs/performance.md has beside estimates."""
    lines = [
        "| one H200, 1.3B shape, sequences a step | recomputed | measured GB | estimate | off by |",
        "|---|---|---|---|---|",
    ]
    for pattern, rows, length, memory, peak in MEASURED_PEAKS:
        estimate = estimate_memory(measured_run(pattern, rows, length, memory), 1, 2).total
        again = "cheap" if memory.recompute_cheap else "nothing"
        again += f", {memory.recompute_layers:.0%} of layers" if memory.recompute_layers else ""
        lines.append(
            f"| `{pattern}`, {rows} x {length:,} | {again} | "
            f"{peak / 1e9:.1f} | {estimate / 1e9:.1f} | {estimate / peak - 1:+.1%} |"
        )
    return "\n".join(lines)


def numbers_table() -> str:
    """Figures behind the page's sentences."""
    small, vocabulary = MODELS["1.3B"], 128256
    shared = scaling_run(small, LENGTHS["4k"])
    shared.parallel.tensor = 2
    tensor = next(one for one in transfers(shared, 2) if one.kind == "tensor").bytes
    state = state_map_bytes("gdn", small, Share(tokens=1.0, context=2))
    run = measured_run(*MEASURED_PEAKS[0][:4])
    time = estimate_step(run, 1, Machine())
    speed = run.training.global_batch_size * run.data.sequence_length / time.total
    gdn, full = (layer_bytes(name, small, Share(tokens=8192.0)) for name in ("gdn", "full"))
    rows = {
        "kept by a Gated DeltaNet layer, a token and pass": f"{gdn / 1e3:.1f} kB",
        "kept by a full-attention layer, a token and pass": f"{full / 1e3:.1f} kB",
        "logits that exist at a time": f"{chunk_bytes(1e9, vocabulary, 2) / 1e6:.0f} MB",
        "state map of a Gated DeltaNet layer": f"{state / 1e6:.1f} MB",
        "sent by a rank at TP 2, a million tokens": f"{tensor / TOKENS_A_STEP * 1e6 / 1e9:.0f} GB",
        "tokens/s of the first run above (measured: 13,811 to 14,140)": f"{speed:,.0f}",
        **{
            f"its {name}, ms (measured: {known})": f"{time.parts[name] * 1e3:.0f}"
            for name, known in MEASURED_MS.items()
        },
    }
    lines = ["| 1.3B hybrid | estimate |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {value} |" for name, value in rows.items())])
