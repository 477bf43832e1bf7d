"""Associative recall with one and two hops: does a looped model recall what one pass cannot?

A row holds CHAINS chains a -> b -> c of symbols of three kinds, drawn anew for every row. It lists
their links in random order, then asks, in random order:

    a2 b2   b1 c1   a1 b1   ...    1 a1   2 a2   1 b1   ...     1 a -> b    1 b -> c    2 a -> c

The answers are not shown; the loss is cross entropy at the questions only. One hop is multi-query
associative recall. Two hops need the first answer before the second look-up, so a single layer run
once cannot do both: it can do no better than guess among the c of the row, which leaves it at
ln(CHAINS) / 3 on average. The same layer run several times can.

Trains through the package's own model, optimizer and step, on one CPU core. Loops add no
parameters: the loop residual is off. Prints a table, and with --output appends JSON lines.
"""

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_lt2.parallel import platform

platform.install()

import torch  # noqa: E402

from megatron_lt2.config.schema import (  # noqa: E402
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    RunConfig,
    TrainingConfig,
    WindowConfig,
)
from megatron_lt2.mixers.registry import MIXER_NAMES, RECURRENT  # noqa: E402
from megatron_lt2.model.counting import count_parameters  # noqa: E402
from megatron_lt2.parallel.start import start_ranks  # noqa: E402
from megatron_lt2.training.setup import build_parts  # noqa: E402
from megatron_lt2.training.steps import DataFeed, evaluate, train_step  # noqa: E402

PADDING, ONE_HOP, TWO_HOPS = 0, 1, 2
FIRST_SYMBOL = 3
EVAL_BATCHES = 8


def make_config(args: argparse.Namespace, mixer: str, loops: int, seed: int) -> RunConfig:
    """The run of one measurement."""
    model = ModelConfig(
        num_layers=args.layers,
        hidden_size=args.width,
        num_heads=args.heads,
        ffn_hidden_size=2 * args.width,
        vocab_size=FIRST_SYMBOL + 3 * args.symbols,
        pattern=mixer,
        loops=loops,
        loop_residual="none",
        window=WindowConfig(size=args.window),
    )
    if mixer in RECURRENT:
        channels = {"head_k_dim": args.width // args.heads, "head_v_dim": args.width // args.heads}
        model = replace(model, **{mixer: replace(getattr(model, mixer), **channels)})
    return RunConfig(
        model=model,
        data=DataConfig(path="none", sequence_length=10 * args.chains, isolate_documents=False),
        training=TrainingConfig(
            steps=args.steps,
            global_batch_size=args.rows,
            micro_batch_size=args.rows,
            eval_batches=0,
            seed=seed,
        ),
        optimizer=OptimizerConfig(
            lr=args.lr, schedule="cosine", warmup_steps=args.steps // 20, weight_decay=0.01
        ),
        parallel=ParallelConfig(distributed_optimizer=False),
    )


def batches(args: argparse.Namespace, seed: int) -> Iterator[dict[str, torch.Tensor]]:
    """Endless micro-batches of fresh random chains."""
    random = torch.Generator().manual_seed(seed)
    rows, chains = args.rows, args.chains

    def shuffled(count: int) -> torch.Tensor:
        return torch.rand(rows, count, generator=random).argsort(1)

    def picked(items: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        return items.gather(1, order[..., None].expand(-1, -1, items.shape[-1]))

    one, two = (torch.full((rows, chains), hops) for hops in (ONE_HOP, TWO_HOPS))
    while True:
        a, b, c = (
            shuffled(args.symbols)[:, :chains] + FIRST_SYMBOL + kind * args.symbols
            for kind in range(3)
        )
        links = torch.cat([torch.stack([a, b], 2), torch.stack([b, c], 2)], dim=1)
        links = picked(links, shuffled(2 * chains))
        asked = torch.cat(
            [
                torch.stack([hops, start, end], dim=2)
                for hops, start, end in ((one, a, b), (one, b, c), (two, a, c))
            ],
            dim=1,
        )
        asked = picked(asked, shuffled(3 * chains))
        tokens = torch.cat([links.flatten(1), asked[..., :2].flatten(1)], dim=1)
        labels = torch.full_like(tokens, PADDING)
        labels[:, 4 * chains + 1 :: 2] = asked[..., 2]
        yield {"tokens": tokens, "labels": labels, "loss_mask": (labels != PADDING).float()}


def accuracy(args: argparse.Namespace, model: Any, seed: int) -> dict[str, float]:
    """Share of right answers on fresh rows, by hops."""
    source = batches(args, seed)
    right: dict[int, list[float]] = {ONE_HOP: [], TWO_HOPS: []}
    positions = torch.arange(10 * args.chains).expand(args.rows, -1)
    for _ in range(EVAL_BATCHES):
        batch = next(source)
        with torch.no_grad():
            guess = model(batch["tokens"], positions).argmax(-1)
        asked = batch["loss_mask"].bool()
        hops = batch["tokens"].roll(1, 1)
        for kind, found in right.items():
            chosen = asked & (hops == kind)
            found += (guess == batch["labels"])[chosen].float().tolist()
    return {
        "one_hop": statistics.fmean(right[ONE_HOP]),
        "two_hops": statistics.fmean(right[TWO_HOPS]),
    }


def run(args: argparse.Namespace, mixer: str, loops: int, seed: int) -> dict[str, Any]:
    """Train once; losses are means over the answers, in nats, on rows never trained on."""
    config = make_config(args, mixer, loops, seed)
    parts = build_parts(config)
    feed = DataFeed(batches(args, seed), config, eod=PADDING)

    def test_loss() -> float:
        return evaluate(
            config, parts, DataFeed(batches(args, 10**6), config, PADDING), EVAL_BATCHES
        )

    first, started = test_loss(), time.perf_counter()
    for step in range(args.steps):
        train_step(config, parts, feed, 1)
        if args.every and (step + 1) % args.every == 0:
            print(f"  {mixer} T={loops} seed {seed} step {step + 1}: {test_loss():.3f}", flush=True)
    taken = time.perf_counter() - started
    model = parts.model.eval()
    return {
        "mixer": mixer,
        "loops": loops,
        "seed": seed,
        "steps": args.steps,
        "parameters": count_parameters(config.model),
        "rows": args.rows,
        "loss_before": round(first, 4),
        "loss": round(test_loss(), 4),
        **{name: round(value, 4) for name, value in accuracy(args, model, 10**6).items()},
        "seconds": round(taken, 1),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, train every mixer, loop count and seed, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mixers", default="gdn,kda,mamba2,window", help="NAME,... or 'all'")
    parser.add_argument("--loops", default="1,4", help="T,...")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--width", type=int, default=48)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--window", type=int, default=12, help="tokens of the window mixer")
    parser.add_argument("--chains", type=int, default=3)
    parser.add_argument("--symbols", type=int, default=6, help="symbols of each kind")
    parser.add_argument("--rows", type=int, default=24, help="rows a step")
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--every", type=int, default=0, help="print the loss every N steps")
    parser.add_argument("--output", type=Path, help="append one JSON line a run to this file")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    start_ranks(ParallelConfig(), 1234)
    mixers = MIXER_NAMES if args.mixers == "all" else args.mixers.split(",")
    print("| mixer | T | seed | parameters | loss before | loss | 1 hop | 2 hops | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mixer in mixers:
        for loops in map(int, args.loops.split(",")):
            for seed in map(int, args.seeds.split(",")):
                result = run(args, mixer, loops, seed)
                print(
                    f"| {mixer} | {loops} | {seed} | {result['parameters']:,} | "
                    f"{result['loss_before']:.2f} | {result['loss']:.3f} | "
                    f"{result['one_hop']:.2f} | {result['two_hops']:.2f} | "
                    f"{result['seconds']:.0f} |",
                    flush=True,
                )
                if args.output:
                    with args.output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(result) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
