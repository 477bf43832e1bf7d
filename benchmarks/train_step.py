"""Times whole optimizer steps of this project on the 1.3B shape, on random tokens, one GPU.

The same code as `python -m megatron_lt2.train` uses: bf16 weights, fp32 gradients and master
weights, distributed optimizer, packed documents unless --no-packing. Prints one JSON line a run.
"""

import argparse
import gc
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

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
from megatron_lt2.training.garbage import Collections  # noqa: E402
from megatron_lt2.training.setup import TrainingParts, build_parts  # noqa: E402
from megatron_lt2.training.steps import DataFeed, train_step  # noqa: E402
from megatron_lt2.warmup import use_tuned  # noqa: E402

PATTERNS = {"full": "full", "gdn": "gdn", "hybrid": "4*gdn+full"}


@dataclass(frozen=True)
class Case:
    """One measurement, written KIND:SEQUENCES:LENGTH and then, each after a colon, `cheap`,
    `layers=SHARE` (memory.recompute_cheap, memory.recompute_layers) and `fp8=RECIPE`."""

    kind: str
    rows: int
    length: int
    cheap: bool = False
    layers: float = 0.0
    fp8: str = "none"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """From the form above; raises ValueError."""
        kind, rows, length, *more = text.split(":")
        options: dict[str, Any] = {}
        for word in more:
            name, _, value = word.partition("=")
            readers: dict[str, Any] = {"cheap": lambda _: True, "layers": float, "fp8": str}
            options[name] = readers[name](value)
        return cls(kind, int(rows), int(length), **options)


def make_config(args: argparse.Namespace, case: Case) -> RunConfig:
    """The run of one measurement."""
    rows, length = case.rows, case.length
    config = RunConfig(
        model=ModelConfig(
            pattern=PATTERNS[case.kind],
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
    config.memory.recompute_cheap, config.memory.recompute_layers = case.cheap, case.layers
    config.precision.fp8 = case.fp8  # type: ignore[assignment]  # build_parts looks at it
    return config


def random_batches(config: RunConfig) -> Iterator[dict[str, torch.Tensor]]:
    """Endless random micro-batches; end-of-document tokens are as rare as chance makes them."""
    shape = (config.training.micro_batch_size, config.data.sequence_length)
    vocabulary = config.model.vocab_size or 1
    while True:
        tokens = torch.randint(1, vocabulary, shape)
        yield {"tokens": tokens, "labels": tokens.roll(-1, 1), "loss_mask": torch.ones(shape)}


def run(args: argparse.Namespace, case: Case) -> dict[str, object]:
    """Train `args.steps` steps on random tokens."""
    config = make_config(args, case)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    use_tuned(config, 0)  # as the trainer does
    parts = build_parts(config)
    feed = DataFeed(random_batches(config), config, eod=0)
    times = []
    with Collections() as collections:  # as the trainer does
        for _ in range(args.steps):
            torch.cuda.synchronize()
            started = time.perf_counter()
            result = train_step(config, parts, feed, 1)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - started)
            collections.after_step()
    gc.unfreeze()
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
    peak = torch.cuda.max_memory_allocated()
    release(parts)
    median = sorted(times[2:])[len(times[2:]) // 2]
    speed = case.rows * case.length / median
    flops = training_flops_per_token(config.model, case.length)
    return {
        "who": "megatron_lt2",
        **asdict(case),
        "tokens_per_s": round(speed),
        "step_s": round(median, 3),
        "mfu": round(speed * flops / (args.peak * 1e12), 3),
        "gflop_per_token": round(flops / 1e9, 2),
        "peak_gb": round(peak / 1e9, 1),
        "first_step_s": round(times[0], 1),
        "loss": round(float(result.loss_sum / result.tokens), 3),
        "packed": args.packing,
        "cap_gb": args.cap_gb,
    }


def release(parts: TrainingParts) -> None:
    """Give back what a run holds: hooks of megatron-core's DDP keep it from being collected."""
    tensors = list(parts.model.parameters())
    for buffer in parts.ddp.buffers:
        tensors += [x for x in (buffer.param_data, buffer.grad_data) if x is not None]
    for inner in getattr(parts.optimizer, "chained_optimizers", [parts.optimizer]):
        tensors += [x for group in inner.optimizer.param_groups for x in group["params"]]
        for state in inner.optimizer.state.values():
            tensors += [x for x in state.values() if torch.is_tensor(x)]
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
    for module in parts.model.modules():
        getattr(module, "_fp8_workspaces", {}).clear()


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """The model and the runs."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--runs", default="hybrid:2:4096", help=f"comma-separated. {Case.__doc__}")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=21)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--loops", type=int, default=4)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s for MFU")
    parser.add_argument("--packing", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--cap-gb", type=float, help="memory that the allocator may take")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = build_parser(__doc__)
    parser.add_argument("--profile", action="store_true", help="print where one step's time goes")
    args = parser.parse_args(argv)
    start_ranks(RunConfig().parallel, 1234)
    if args.cap_gb:
        whole = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(args.cap_gb * 1e9 / whole)
    for item in args.runs.split(","):
        try:
            print(json.dumps(run(args, Case.parse(item))), flush=True)
        except torch.OutOfMemoryError as error:
            print(json.dumps({"who": "megatron_lt2", "case": item, "failed": str(error)[:200]}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
