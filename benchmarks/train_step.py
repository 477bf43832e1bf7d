"""Times whole optimizer steps of this project on the 1.3B shape, on random tokens, one GPU.

The same code as `python -m megatron_lt2.train` uses: bf16 weights, fp32 gradients and master
weights, distributed optimizer, packed documents unless --no-packing. Prints one JSON line a run.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence

from megatron_lt2.parallel import platform

platform.install()

import torch  # noqa: E402

from megatron_lt2.config.schema import (  # noqa: E402
    DataConfig,
    ModelConfig,
    RunConfig,
    TrainingConfig,
)
from megatron_lt2.model.counting import training_flops_per_token  # noqa: E402
from megatron_lt2.parallel.start import start_ranks  # noqa: E402
from megatron_lt2.training.setup import build_parts  # noqa: E402
from megatron_lt2.training.steps import DataFeed, train_step  # noqa: E402

PATTERNS = {"full": "full", "gdn": "gdn", "hybrid": "4*gdn+full"}


def make_config(args: argparse.Namespace, kind: str, rows: int, length: int) -> RunConfig:
    """The run of one measurement."""
    config = RunConfig(
        model=ModelConfig(
            pattern=PATTERNS[kind],
            num_layers=args.layers,
            hidden_size=args.width,
            num_heads=args.heads,
            vocab_size=args.vocab,
            loops=args.loops,
            tie_embeddings=False,
        ),
        data=DataConfig(path="none", sequence_length=length, isolate_documents=args.packing),
        training=TrainingConfig(
            steps=1000, global_batch_size=rows, micro_batch_size=rows, eval_batches=0
        ),
    )
    if args.recompute:
        config.megatron.transformer = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return config


def random_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Endless random micro-batches; end-of-document tokens are as rare as chance makes them."""
    shape = (config.training.micro_batch_size, config.data.sequence_length)
    vocabulary = config.model.vocab_size or 1
    while True:
        tokens = torch.randint(1, vocabulary, shape)
        yield {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(shape)}


def run(args: argparse.Namespace, kind: str, rows: int, length: int) -> dict[str, object]:
    """Train `args.steps` steps on random tokens."""
    config = make_config(args, kind, rows, length)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    parts = build_parts(config)
    feed = DataFeed(random_batches(config), config, eod=0)
    times = []
    for _ in range(args.steps):
        torch.cuda.synchronize()
        started = time.perf_counter()
        result = train_step(config, parts, feed, 1)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    if args.profile:
        with torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
        ) as profile:
            train_step(config, parts, feed, 1)
            torch.cuda.synchronize()
        table = profile.key_averages().table(
            sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70
        )
        print(table, flush=True)
    median = sorted(times[2:])[len(times[2:]) // 2]
    speed = rows * length / median
    flops = training_flops_per_token(config.model, length)
    return {
        "who": "megatron_lt2",
        "kind": kind,
        "rows": rows,
        "length": length,
        "tokens_per_s": round(speed),
        "step_s": round(median, 3),
        "mfu": round(speed * flops / (args.peak * 1e12), 3),
        "gflop_per_token": round(flops / 1e9, 2),
        "peak_gb": round(torch.cuda.max_memory_allocated() / 1e9, 1),
        "first_step_s": round(times[0], 1),
        "loss": round(float(result.loss_sum / result.tokens), 3),
        "packed": args.packing,
        "recompute": args.recompute,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", default="hybrid:2:4096", help="KIND:SEQUENCES:LENGTH,...")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s for MFU")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--recompute", action="store_true", help="recompute whole layers")
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes")
    args = parser.parse_args(argv)
    start_ranks(RunConfig().parallel, 1234)
    for item in args.runs.split(","):
        kind, rows, length = item.split(":")
        print(json.dumps(run(args, kind, int(rows), int(length))), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
