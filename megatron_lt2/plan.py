"""Choose a parallel layout: python -m megatron_lt2.plan --config FILE --gpus N [--memory 80GB].

Exit codes: 0 a layout fits; 1 none does (what would is said); 2 an argument or a setting is wrong.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megatron_lt2.config.errors import ConfigError

if TYPE_CHECKING:
    from megatron_lt2.config.schema import RunConfig
    from megatron_lt2.layouts import Layout
    from megatron_lt2.model.speed import Machine

DESCRIPTION = """List the ways to spread a run over GPUs, with estimates, and choose one.

Every combination of tensor, sequence, pipeline, context and data parallelism, micro-batch size and
recomputation that the trainer would accept is estimated: peak memory of a rank, bytes that it sends
in a step, time of a step. The fastest that fits is chosen, and the options that set it are printed,
ready for `python -m megatron_lt2.train`.

Settings follow as for the trainer, e.g. --model.vocab_size 128256 --data.sequence_length 32768.
--parallel.*, --training.micro_batch_size and --memory.* given here are kept: only layouts with that
value are listed.

Nothing runs, no GPU is needed. Memory is worked out from what each layer keeps (docs/scaling.md);
times come from constants fitted to one H200 and say little beyond which layout is faster."""

EXAMPLE = """example:
  python -m megatron_lt2.plan --config launchers/configs/lt2_1b3.yaml --gpus 64 --memory 80GB \\
    --interconnect nvlink,ib400 --data.sequence_length 32768"""

UNITS = {"GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20, "TB": 1e12}

LINKS = {
    "nvlink3": 300,
    "nvlink": 450,
    "nvlink5": 900,
    "pcie4": 32,
    "pcie5": 64,
    "ib200": 25,
    "ib400": 50,
    "ib800": 100,
    "eth100": 12.5,
    "eth400": 50,
}
"""GB/s that a GPU can send, by name; nvlink is that of Hopper."""

REACHED = {"nvlink": 0.8, "other": 0.9}
"""Share of it that collectives reach."""

PINS = {
    "--parallel.tensor": "tensor",
    "--parallel.sequence": "sequence",
    "--parallel.pipeline": "pipeline",
    "--parallel.context": "context",
    "--parallel.context_exchange": "context_exchange",
    "--training.micro_batch_size": "micro_batch_size",
    "--memory.recompute_cheap": "recompute",
    "--memory.recompute_layers": "recompute",
}


def build_parser() -> argparse.ArgumentParser:
    """Options of this tool; all others are settings."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.plan",
        usage="%(prog)s --config FILE --gpus N [options] [--dotted.name value ...]",
        description=DESCRIPTION,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings of the run")
    parser.add_argument("--gpus", metavar="N", help="GPUs in all")
    parser.add_argument("--memory", default="80GB", help="of a GPU, e.g. 80GB, 141GB (%(default)s)")
    parser.add_argument(
        "--gpus-per-node", metavar="N", default="8", help="GPUs of a node (%(default)s)"
    )
    parser.add_argument(
        "--interconnect",
        metavar="INSIDE,ACROSS",
        default="nvlink,ib400",
        help="link of a GPU inside its node and across nodes (%(default)s): "
        + ", ".join(LINKS)
        + ", or a number of GB/s",
    )
    parser.add_argument(
        "--tflops", metavar="N", default="790", help="bf16 matrix ceiling of a GPU (%(default)s)"
    )
    parser.add_argument("--top", metavar="N", default="12", help="layouts to list (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument(
        "--scaling-table",
        action="store_true",
        help="print the tables of docs/scaling.md, for 8 to 1,024 GPUs; takes no other option",
    )
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, estimate, print; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    known, settings = build_parser().parse_known_args(arguments)
    from megatron_lt2.config.load import fail

    try:
        if known.scaling_table:
            return _scaling_table()
        return _plan(known, settings)
    except ConfigError as error:
        return fail(error)


def _scaling_table() -> int:
    from megatron_lt2.parallel import platform

    platform.install()
    from megatron_lt2.scaling import scaling_tables

    print(scaling_tables(), end="")
    return 0


def _plan(known: argparse.Namespace, settings: list[str]) -> int:
    if known.gpus is None:
        raise ConfigError("--gpus is missing; say how many GPUs the run has, e.g. --gpus 8")
    gpus, top = _whole("--gpus", known.gpus), _whole("--top", known.top)
    memory = parse_memory(known.memory)
    inside, across = parse_interconnect(known.interconnect)
    per_node = _whole("--gpus-per-node", known.gpus_per_node)
    ceiling = _positive("--tflops", known.tflops)

    from megatron_lt2.config.load import load_config
    from megatron_lt2.parallel import platform

    given = [*(["--config", known.config] if known.config else []), *settings]
    own = [word for action in build_parser()._actions for word in action.option_strings]
    base = load_config(
        given,
        prog="python -m megatron_lt2.plan",
        description=DESCRIPTION,
        other_options=own,
    )
    if base.model.vocab_size is None:
        raise ConfigError("model.vocab_size is not set; pass --model.vocab_size N")
    platform.install()
    from megatron_lt2.layouts import find_layouts
    from megatron_lt2.model.speed import Machine

    machine = Machine(matrix=ceiling * 1e12, inside=inside, across=across, gpus_per_node=per_node)
    pinned = {name for option, name in PINS.items() if _is_given(option, settings)}
    layouts, refused = find_layouts(base, gpus, machine, memory, pinned)
    best = layouts[0] if layouts and layouts[0].fits(memory) else None
    advice = None if best else _advice(base, gpus, machine, memory, pinned, layouts, refused)
    if known.json:
        described = _described(base, gpus, machine, memory, layouts, refused)
        print(json.dumps(described | {"advice": advice}, indent=1))
    else:
        _print(base, gpus, machine, memory, layouts, refused, top)
        print(advice or _to_paste(layouts[0], base))
    return 0 if best else 1


def _is_given(option: str, settings: list[str]) -> bool:
    return any(word == option or word.startswith(option + "=") for word in settings)


def _whole(option: str, text: str) -> int:
    """A number of 1 or more.

    Raises:
        ConfigError: it is not.
    """
    if not re.fullmatch(r"\d+", text) or int(text) < 1:
        raise ConfigError(f"{option} is {text!r}; it must be a whole number of 1 or more")
    return int(text)


def _positive(option: str, text: str) -> float:
    if not re.fullmatch(r"\d+(\.\d+)?", text) or float(text) <= 0:
        raise ConfigError(f"{option} is {text!r}; it must be a number greater than 0")
    return float(text)


def parse_memory(text: str) -> float:
    """Bytes from "80GB" or "143771MiB".

    Raises:
        ConfigError: no number, or no known unit.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", text.strip())
    if match is None or match[2].upper() not in UNITS or float(match[1]) <= 0:
        raise ConfigError(
            f"--memory is {text!r}; write a number and one of GB, GiB, MB, MiB, TB, e.g. 80GB"
        )
    return float(match[1]) * UNITS[match[2].upper()]


def parse_interconnect(text: str) -> tuple[float, float]:
    """Bytes a second that collectives reach inside and across nodes, from "nvlink,ib400".

    Raises:
        ConfigError: not two names or numbers.
    """
    names = [part.strip().lower() for part in text.split(",")]
    speeds = []
    for name in names:
        if name in LINKS:
            reached = REACHED["nvlink" if name.startswith("nvlink") else "other"]
            speeds.append(LINKS[name] * reached * 1e9)
        elif re.fullmatch(r"\d+(\.\d+)?", name) and float(name) > 0:
            speeds.append(float(name) * 1e9)
    if len(names) != 2 or len(speeds) != 2:
        raise ConfigError(
            f"--interconnect is {text!r}; name the link inside a node and the one across nodes, "
            f"e.g. nvlink,ib400 (known: {', '.join(LINKS)}, or a number of GB/s)"
        )
    return speeds[0], speeds[1]


def _sent(layout: "Layout") -> dict[str, float]:
    """Bytes that a rank sends in a step, by kind."""
    return {one.kind: one.bytes for one in layout.transfers()}


def _print(
    base: "RunConfig",
    gpus: int,
    machine: "Machine",
    memory: float,
    layouts: "list[Layout]",
    refused: Counter[str],
    top: int,
) -> None:
    from megatron_lt2.model.counting import count_parameters

    fitting = sum(layout.fits(memory) for layout in layouts)
    batch, length = base.training.global_batch_size, base.data.sequence_length
    print(
        f"{count_parameters(base.model) / 1e9:.2f} billion parameters, {base.model.loops} loops, "
        f"{batch} x {length} tokens a step, {gpus} GPUs of {memory / 1e9:.0f} GB"
    )
    print(
        f"{len(layouts)} layouts are accepted, {fitting} fit; {refused.total()} are refused. "
        "Estimates (CP 4h: linear mixers exchange heads):\n"
    )
    print(
        f"{'TP':>3} {'SP':>3} {'PP':>3} {'CP':>4} {'DP':>4} {'micro':>5} {'recomp':>6} "
        f"{'GB':>7} {'step s':>8} {'tokens/s':>10} {'MFU':>5}  {'sent GB':>8}  most time"
    )
    for layout in layouts[:top]:
        size = layout.sizes()
        verdict = layout.time.bound if layout.fits(memory) else "does not fit"
        print(
            f"{size['tensor']:>3} {'on' if size['sequence'] else '-':>3} {size['pipeline']:>3} "
            f"{_context(size):>4} {size['data']:>4} {size['micro_batch_size']:>5} "
            f"{size['recompute']:>6} {layout.memory.total / 1e9:>7.1f} {layout.time.total:>8.3f} "
            f"{layout.tokens_per_s:>10,.0f} {layout.utilisation(machine):>5.2f}  "
            f"{sum(_sent(layout).values()) / 1e9:>8.2f}  {verdict}"
        )
    if len(layouts) > top:
        print(f"... and {len(layouts) - top} more, see --top")
    if layouts:
        first = layouts[0]
        parts = vars(first.memory)
        print("\nthe first one, memory of a rank, GB: " + _listed(parts))
        print("  sent by a rank in a step, GB: " + (_listed(_sent(first)) or "nothing"))
        print("  seconds of a step: " + _listed(first.time.parts, 1.0))
    print()


def _context(size: dict[str, Any]) -> str:
    by_heads = size["context"] > 1 and size["context_exchange"] == "heads"
    return f"{size['context']}{'h' if by_heads else ''}"


def _listed(values: dict[str, float], unit: float = 1e9) -> str:
    return ", ".join(f"{name} {value / unit:.3g}" for name, value in values.items() if value)


def _to_paste(layout: "Layout", base: "RunConfig") -> str:
    return "chosen; add to the training command:\n  " + " ".join(layout.overrides(base))


def _advice(
    base: "RunConfig",
    gpus: int,
    machine: "Machine",
    memory: float,
    pinned: set[str],
    layouts: "list[Layout]",
    refused: Counter[str],
) -> str:
    """What to change when nothing fits."""
    from megatron_lt2.layouts import USABLE, fewest_gpus

    if not layouts:
        if refused:
            raise ConfigError(f"no layout of {gpus} GPUs: {refused.most_common(1)[0][0]}")
        ways = math.prod(getattr(base.parallel, name) for name in ("tensor", "pipeline", "context"))
        if gpus % ways:
            raise ConfigError(
                f"no layout of {gpus} GPUs: the given parallel.tensor {base.parallel.tensor} x "
                f"parallel.pipeline {base.parallel.pipeline} x parallel.context "
                f"{base.parallel.context} does not divide them; choose divisors or leave them out"
            )
        raise ConfigError(
            f"no layout of {gpus} GPUs: training.global_batch_size "
            f"{base.training.global_batch_size} cannot be spread over them; choose a multiple of "
            f"the data-parallel ranks, e.g. --training.global_batch_size {gpus}"
        )
    least = layouts[0]
    text = (
        f"nothing fits into {memory / 1e9:.0f} GB (of which {USABLE:.0%} are planned with); the "
        f"smallest layout needs {least.memory.total / 1e9:.1f} GB"
    )
    more = fewest_gpus(base, gpus, machine, memory, pinned)
    if more is not None:
        return f"{text}. With {more} GPUs there is one that fits"
    needed = least.memory.total / USABLE / 1e9
    return (
        f"{text}. More GPUs do not help at training.global_batch_size "
        f"{base.training.global_batch_size} and data.sequence_length "
        f"{base.data.sequence_length}: take GPUs of {needed:.0f} GB, fewer pinned settings, or a "
        "smaller model"
    )


def _described(
    base: "RunConfig",
    gpus: int,
    machine: "Machine",
    memory: float,
    layouts: "list[Layout]",
    refused: Counter[str],
) -> dict[str, Any]:
    from megatron_lt2.model.counting import count_parameters

    rows = [
        layout.sizes()
        | {
            "fits": layout.fits(memory),
            "memory_bytes": {"total": layout.memory.total, **vars(layout.memory)},
            "sent_bytes": _sent(layout),
            "messages": {one.kind: one.messages for one in layout.transfers()},
            "seconds": {"total": layout.time.total, **layout.time.parts},
            "tokens_per_s": layout.tokens_per_s,
            "mfu": layout.utilisation(machine),
            "bound": layout.time.bound,
            "overrides": layout.overrides(base),
        }
        for layout in layouts
    ]
    return {
        "gpus": gpus,
        "memory_bytes": memory,
        "parameters": count_parameters(base.model),
        "machine": vars(machine),
        "chosen": rows[0] if rows and rows[0]["fits"] else None,
        "layouts": rows,
        "refused": dict(refused.most_common()),
    }


if __name__ == "__main__":
    sys.exit(main())
