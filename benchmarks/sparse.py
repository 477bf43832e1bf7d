"""Times sparse attention without its projections, forward and backward, by length, on one GPU.

    python benchmarks/sparse.py                        # 8k, 16k and 32k tokens
    python benchmarks/sparse.py --quick                # fewer rounds, for a look
    python benchmarks/sparse.py --cases "dsa attention" --tune

One JSON line a case and length: milliseconds (medians) of the forward and the backward pass,
nanoseconds a token (and picoseconds a key that is read, where their number is bounded), and peak
bytes beyond the inputs. Cases, with the sizes of the 1.3B models:

    window            the last 2,048 tokens, 16 heads of 128 channels
    nsa               three branches, 16 heads of 128 channels over one key head
    dsa               everything: selection, attention to the 2,048 chosen keys, indexer's loss
    dsa attention     attention to keys that were chosen before
    dsa selection     scores and top keys alone
    dsa loss          the indexer's loss, which is made with its gradients, alone
    dsa dense         attention of the same heads to all keys
    dsa dense stage   the same with the indexer's loss

Before that each mixer is compared with its plain form at 300 tokens, see megatron_lt2/selftest.py.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

from megatron_lt2.parallel import platform

platform.install()

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from megatron_lt2.config.schema import ModelConfig  # noqa: E402
from megatron_lt2.kernels import dsa, gathered_triton  # noqa: E402
from megatron_lt2.kernels.nsa import nsa  # noqa: E402
from megatron_lt2.kernels.window import window_attention  # noqa: E402
from megatron_lt2.mixers.window import mean_keys  # noqa: E402
from megatron_lt2.ops.reach import reach_of_documents  # noqa: E402
from megatron_lt2.selftest import compare  # noqa: E402

Case = tuple[Callable[[], Sequence[Tensor]], Sequence[Tensor]]
"""A forward pass and its leaves."""


def random(*shape: int, gradient: bool = True) -> Tensor:
    """bf16 numbers on the GPU."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).requires_grad_(gradient)


def borders_of(length: int, documents: int) -> Tensor:
    """Of documents of nearly one length."""
    cuts = [length * i // documents for i in range(documents + 1)]
    return torch.tensor(cuts, dtype=torch.int32, device="cuda")


def window_case(model: ModelConfig, length: int, documents: int) -> Case:
    """Sliding-window attention."""
    heads, channels = model.num_heads, model.attention_head_dim
    q, k, v = (random(1, length, heads, channels) for _ in range(3))
    borders = borders_of(length, documents)
    longest = int(borders.diff().max())

    def run() -> Sequence[Tensor]:
        given: dict[str, Any] = {"cu_seqlens": borders, "max_length": longest}
        return [window_attention(q, k, v, model.window.size, backend="fla", **given)]

    return run, (q, k, v)


def nsa_case(model: ModelConfig, length: int, documents: int) -> Case:
    """Native sparse attention."""
    s = model.mixer_settings("nsa")
    q = random(1, length, s.num_heads, s.head_dim)
    k, v = (random(1, length, s.num_kv_heads, s.head_dim) for _ in range(2))
    gates = tuple(random(1, length, s.num_heads) for _ in range(3))
    borders = borders_of(length, documents)
    reach = reach_of_documents(length, borders, 0, q.device)
    longest = int(borders.diff().max())

    def run() -> Sequence[Tensor]:
        out = nsa(
            *(q, k, v, (gates[0].sigmoid(), gates[1].sigmoid(), gates[2].sigmoid()), reach),
            block=s.block_size,
            count=s.selected_blocks,
            window=s.window,
            backend="fla",
            cu_seqlens=borders,
            max_length=longest,
        )
        return [out]

    return run, (q, k, v, *gates)


def dsa_case(name: str, model: ModelConfig, length: int, documents: int) -> Case:
    """DeepSeek sparse attention or a part of it; the indexer is random, so are its choices."""
    s = model.mixer_settings("dsa")
    channels = s.latent_dim + s.rope_dim
    q, k = random(1, length, s.num_heads, channels), random(1, length, 1, channels)
    index = (
        random(1, length, s.index_heads, s.index_dim),
        random(1, length, s.index_heads),
        random(1, length, s.index_dim),
    )
    reach = reach_of_documents(length, borders_of(length, documents), 0, q.device)

    def select() -> Tensor:
        qi, wi, ki = (x.detach() for x in index)
        return dsa.select_keys(qi, wi, ki, reach, s.top_k, backend="fla")

    def attention(chosen: Tensor | None) -> tuple[dsa.Attention, Tensor, Tensor]:
        v = k[..., : s.latent_dim]
        given = dsa.Attention(q, k, v, reach, chosen, channels**-0.5, True)
        out, lse = dsa.sparse_attention(given, backend="fla")
        assert lse is not None
        return given, out, lse

    if name == "dsa selection":
        return lambda: [select()], ()
    if name in ("dsa", "dsa dense stage"):

        def everything() -> Sequence[Tensor]:
            given, out, lse = attention(select() if name == "dsa" else None)
            return [out, dsa.indexer_loss(index, given, lse)]

        return everything, (q, k, *index)
    chosen = None if name == "dsa dense" else select()
    if name == "dsa loss":
        with torch.no_grad():
            given, _, lse = attention(chosen)
        return lambda: [dsa.indexer_loss(index, given, lse)], index
    return lambda: [attention(chosen)[1]], (q, k)


CASES: dict[str, Callable[[str, ModelConfig, int, int], Case]] = {
    "window": lambda _, *given: window_case(*given),
    "nsa": lambda _, *given: nsa_case(*given),
    **dict.fromkeys(
        (
            *("dsa", "dsa attention", "dsa selection", "dsa loss"),
            *("dsa dense", "dsa dense stage"),
        ),
        dsa_case,
    ),
}


BOUNDED: dict[str, Callable[[ModelConfig], int]] = {
    "window": lambda model: model.window.size,
    "dsa attention": lambda model: model.dsa.top_k,
}
"""The most keys that a query reads. The first ones of a document read fewer: at 8k tokens 1,792 of
2,048 in the mean, at 32k 1,984."""


def measure(case: Case, rounds: int) -> dict[str, float]:
    """Medians of both passes, and peak memory beyond what there was."""
    run, leaves = case
    before = torch.cuda.memory_allocated()
    forward, backward = [], []
    directions: list[Tensor] = []
    for number in range(rounds + 1):
        for leaf in leaves:
            leaf.grad = None
        if number == 1:  # the first one compiles
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        started = time.perf_counter()
        out = run()
        torch.cuda.synchronize()
        between = time.perf_counter()
        if leaves:
            directions = directions or [torch.ones_like(x) for x in out]
            torch.autograd.backward(list(out), directions)
            torch.cuda.synchronize()
        ended = time.perf_counter()
        del out
        forward.append(between - started)
        backward.append(ended - between)
    return {
        "forward_ms": round(1e3 * statistics.median(forward[1:]), 3),
        "backward_ms": round(1e3 * statistics.median(backward[1:]), 3),
        "peak_bytes": torch.cuda.max_memory_allocated() - before,
    }


def check(model: ModelConfig) -> bool:
    """One line a mixer: does its kernel agree with the plain form?"""
    agree = True
    for name in ("window", "nsa", "dsa"):
        result = compare(
            name,
            model,
            device=torch.device("cuda"),
            dtype=torch.bfloat16,
            backend="fla",
            tokens=300,
            packed=True,
        )
        errors = {"output": result.output, result.worst: result.gradient}
        print(json.dumps({"check": name, "agrees": result.agrees, **errors}), flush=True)
        agree = agree and result.agrees
    return agree


def tune(case: Case, rounds: int) -> None:
    """Times of other tiles of the gathered attention; one line each."""
    for kind, settings in (
        ("FORWARD", gathered_triton.FORWARD),
        ("BACKWARD", gathered_triton.BACKWARD),
    ):
        kept, keys = dict(settings), gathered_triton.KEYS
        for block, warps, stages in (
            *((16, 4, 2), (16, 8, 2), (32, 4, 2), (32, 4, 3), (32, 8, 1), (32, 8, 2)),
            *((32, 8, 3), (64, 4, 2), (64, 8, 2)),
        ):
            settings.update(num_warps=warps, num_stages=stages)
            gathered_triton.KEYS = block
            tried = {"tune": kind.lower(), "keys": block, "warps": warps, "stages": stages}
            try:
                found = measure(case, rounds)
            except Exception as error:  # too much shared memory, mostly
                found = {"error": f"{type(error).__name__}: {error}"[:120]}  # type: ignore[dict-item]
            print(json.dumps({**tried, **found}), flush=True)
        settings.update(kept)
        gathered_triton.KEYS = keys


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line and run; 1 if a kernel does not agree with its plain form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", default="8192,16384,32768")
    parser.add_argument("--cases", default=",".join(CASES), help="comma-separated")
    parser.add_argument("--documents", type=int, default=1, help="in a row (default 1)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="two rounds")
    parser.add_argument("--tune", action="store_true", help="tiles of the gathered attention")
    args = parser.parse_args(argv)
    names = args.cases.split(",")
    for name in names:
        if name not in CASES:
            parser.error(f"--cases: unknown {name!r}; known are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        parser.error("this needs a GPU")
    torch.manual_seed(1)
    model, rounds = ModelConfig(), 2 if args.quick else args.rounds
    agree = check(model)
    lengths = [int(item) for item in args.lengths.split(",")]
    if args.tune:
        tune(dsa_case("dsa attention", model, lengths[0], args.documents), rounds)
        return 0 if agree else 1
    for name in names:
        for length in lengths:
            line: dict[str, Any] = {"case": name, "tokens": length, "documents": args.documents}
            try:
                found = measure(CASES[name](name, model, length, args.documents), rounds)
            except torch.cuda.OutOfMemoryError:
                print(json.dumps({**line, "error": "out of memory"}), flush=True)
                continue
            total = found["forward_ms"] + found["backward_ms"]
            found["ns_per_token"] = round(1e6 * total / length, 1)
            if name in BOUNDED:
                keys = mean_keys(length // args.documents, BOUNDED[name](model))
                found["keys_per_token"] = round(keys, 1)
                found["ps_per_key"] = round(1e9 * total / length / keys, 3)
            print(json.dumps({**line, **found}), flush=True)
            torch.cuda.empty_cache()
    return 0 if agree else 1


if __name__ == "__main__":
    raise SystemExit(main())
