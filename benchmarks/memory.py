"""Where the memory of a training step goes: measured on one GPU beside the estimate.

    python benchmarks/memory.py --runs hybrid:3:4096,hybrid:4:4096:cheap

Runs are written as for train_step.py. Prints one JSON line a run and a table: what lies there
between steps (weights, gradients, moments, master weights), what the forward pass keeps, and the
peak of a whole step. The estimate is that of `python -m megatron_lt2.plan`.
"""

import argparse
import gc
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
import train_step

from megatron_lt2.model.cost import estimate_memory


def measure(args: argparse.Namespace, case: train_step.Case) -> dict[str, Any]:
    """Bytes of one run, in GB."""
    config = train_step.make_config(args, case)
    gc.collect()
    torch.cuda.empty_cache()
    train_step.use_tuned(config, 0)
    parts = train_step.build_parts(config)
    feed = train_step.DataFeed(train_step.random_batches(config), config, eod=0)
    for _ in range(2):  # the optimizer makes its state in the first
        train_step.train_step(config, parts, feed, 1)
    torch.cuda.synchronize()
    between = torch.cuda.memory_allocated()
    batch = next(feed)
    losses = parts.ddp(
        batch.tokens,
        batch.positions,
        labels=batch.labels,
        packed_seq_params=batch.packing,
        parts=True,
    )
    kept = torch.cuda.memory_allocated() - between
    del losses, batch
    torch.cuda.reset_peak_memory_stats()
    train_step.train_step(config, parts, feed, 1)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    train_step.release(parts)
    estimate = estimate_memory(config, 1, 2)
    fixed = estimate.parameters + estimate.gradients + estimate.optimizer
    found = {
        "between_steps": between,
        "kept_by_forward": kept,
        "peak": peak,
        "estimate_between_steps": fixed,
        "estimate_kept": estimate.activations,
        "estimate_logits": estimate.logits,
        "estimate_other": estimate.other,
        "estimate_peak": estimate.total,
    }
    return {**asdict(case), **{name: round(value / 1e9, 2) for name, value in found.items()}}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown; the estimate in brackets."""
    lines = [
        "| layers | sequences | made again | between steps | kept by the forward pass | peak | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        again = "cheap" if row["cheap"] else "nothing"
        again += f" + {row['layers']:.0%} of layers" if row["layers"] else ""
        off = row["estimate_peak"] / row["peak"] - 1
        lines.append(
            f"| {row['kind']} | {row['rows']} x {row['length']:,} | {again} | "
            f"{row['between_steps']} ({row['estimate_between_steps']}) | "
            f"{row['kept_by_forward']} ({row['estimate_kept']}) | "
            f"{row['peak']} ({row['estimate_peak']}) | {off:+.1%} |"
        )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = train_step.build_parser(__doc__)
    args = parser.parse_args(argv)
    train_step.start_ranks(train_step.RunConfig().parallel, 1234)
    rows = []
    for item in args.runs.split(","):
        rows.append(measure(args, train_step.Case.parse(item)))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
