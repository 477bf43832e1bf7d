"""Associative recall with one and two hops: does a looped model recall what one pass cannot?

A row holds PAIRS symbols on a ring, drawn anew each time. It lists each symbol x with its successor
f(x), in random order, then asks for f(x) and f(f(x)) of every symbol, in random order:

    a b   c a   b c   ...   1 a   2 c   ...        1 a -> f(a) = b        2 c -> f(f(c)) = b

The answers are not shown; the loss is cross entropy at the questions only. One hop is multi-query
associative recall. Two hops need the first answer before the second look-up, which the same layer
can make in its next loop. A layer that is run once can look up f(x), and x's predecessor if it
stores pairs both ways, and guess among the PAIRS - 3 symbols that remain.

Trains through the package's own model, optimizer and step, on one CPU core. Loops add no
parameters: the loop residual is off. The embedding starts with unit variance, so that later loops
still see it. Prints a table; with --output appends JSON lines.
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
        vocab_size=FIRST_SYMBOL + args.symbols,
        pattern=mixer,
        loops=loops,
        loop_residual="none",
        tie_embeddings=False,
        window=WindowConfig(size=args.window),
    )
    if mixer in RECURRENT:
        channels = {"head_k_dim": args.width // args.heads, "head_v_dim": args.width // args.heads}
        model = replace(model, **{mixer: replace(getattr(model, mixer), **channels)})
    return RunConfig(
        model=model,
        data=DataConfig(path="none", sequence_length=6 * args.pairs, isolate_documents=False),
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
    """Endless micro-batches of fresh random rings."""
    random = torch.Generator().manual_seed(seed)
    rows, pairs = args.rows, args.pairs

    def shuffled(count: int) -> torch.Tensor:
        return torch.rand(rows, count, generator=random).argsort(1)

    while True:
        ring = shuffled(args.symbols)[:, :pairs] + FIRST_SYMBOL
        after, second = ring.roll(-1, dims=1), ring.roll(-2, dims=1)
        order, questions = shuffled(pairs), shuffled(2 * pairs)
        asked, hops = questions % pairs, questions // pairs + ONE_HOP
        facts = torch.stack([ring.gather(1, order), after.gather(1, order)], dim=2)
        questions = torch.stack([hops, ring.gather(1, asked)], dim=2)
        answers = torch.where(hops == ONE_HOP, after.gather(1, asked), second.gather(1, asked))
        tokens = torch.cat([facts.flatten(1), questions.flatten(1)], dim=1)
        labels = torch.full_like(tokens, PADDING)
        labels[:, 2 * pairs + 1 :: 2] = answers
        yield {"tokens": tokens, "labels": labels, "loss_mask": (labels != PADDING).float()}


def accuracy(args: argparse.Namespace, model: Any, seed: int) -> dict[str, float]:
    """Share of right answers on fresh rows, by hops."""
    source = batches(args, seed)
    right: dict[int, list[float]] = {ONE_HOP: [], TWO_HOPS: []}
    positions = torch.arange(6 * args.pairs).expand(args.rows, -1)
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
    with torch.no_grad():
        parts.model.embedding.word_embeddings.weight.mul_(args.width**0.5)
    parts.optimizer.reload_model_params()
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
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--window", type=int, default=16, help="tokens of the window mixer")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--symbols", type=int, default=10, help="symbols to choose from")
    parser.add_argument("--rows", type=int, default=32, help="rows a step")
    parser.add_argument("--lr", type=float, default=3e-3)
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
