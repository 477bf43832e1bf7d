"""Times head and cross entropy, forward and backward, over chunks of several sizes, one GPU.

Beside them the usual form: logits of all tokens, their fp32 copy, softmax kept for the backward
pass. One JSON line a form: milliseconds (median), peak bytes beyond the inputs, and the share of
the machine's matrix ceiling that the head's declared work (no recomputation) reaches.

    python benchmarks/head_loss.py --tokens 16384 --chunks 512,1024,2048,4096
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence

from megatron_lt2.parallel import platform

platform.install()

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_lt2.config.schema import RunConfig  # noqa: E402
from megatron_lt2.kernels.linear_cross_entropy import chunk_tokens  # noqa: E402
from megatron_lt2.parallel.start import start_ranks  # noqa: E402
from megatron_lt2.parallel.vocab_loss import linear_cross_entropy  # noqa: E402


def measure(
    loss: Callable[[], Tensor], leaves: Sequence[Tensor], args: argparse.Namespace
) -> dict[str, float]:
    """Median time and peak memory of a forward and backward pass."""
    times = []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(args.rounds + 2):
        for leaf in leaves:
            leaf.grad = None
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss().backward()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    median = sorted(times[2:])[args.rounds // 2]
    work = 6 * args.tokens * args.vocab * args.width
    return {
        "ms": round(median * 1e3, 2),
        "peak_gb": round((torch.cuda.max_memory_allocated() - before) / 1e9, 2),
        "of_ceiling": round(work / median / (args.peak * 1e12), 3),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--vocab", type=int, default=128256)
    parser.add_argument("--chunks", default="512,1024,2048,4096,8192", help="tokens a chunk")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--peak", type=float, default=790.0, help="TFLOP/s of matrix products")
    args = parser.parse_args(argv)
    start_ranks(RunConfig().parallel, 1234)
    group = torch.distributed.group.WORLD
    hidden = torch.randn(args.tokens, 1, args.width, device="cuda", dtype=torch.bfloat16)
    weight = 0.02 * torch.randn(args.vocab, args.width, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(args.vocab, (1, args.tokens), device="cuda")
    weight.main_grad = torch.zeros(weight.shape, device="cuda")  # type: ignore[attr-defined]
    hidden.requires_grad_()
    weight.requires_grad_()

    def chunked(chunk: int) -> Callable[[], Tensor]:
        return lambda: linear_cross_entropy(
            hidden,
            weight,
            labels,
            group=group,
            sequence_parallel=False,
            real_vocab=args.vocab,
            backend="fla",
            chunk=chunk,
        ).mean()

    def usual() -> Tensor:
        return F.cross_entropy(F.linear(hidden[:, 0], weight).float(), labels[0])

    default = chunk_tokens(args.vocab, 2)
    for chunk in (int(item) for item in args.chunks.split(",")):
        found = measure(chunked(chunk), (hidden, weight), args)
        print(json.dumps({"chunk": chunk, "default": chunk == default, **found}), flush=True)
    found = measure(usual, (hidden, weight), args)
    print(json.dumps({"form": "all logits", **found}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
