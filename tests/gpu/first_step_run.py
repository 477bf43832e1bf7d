"""The first step of a run, timed from the start of the process: FILE [--dotted.name value ...].

What `python -m megatron_lt2.train` does, with random tokens instead of data: kernels ahead of the
first step, self-test, model, one step of two micro-batches. Prints one JSON line. `compiled` names
the kernels that the step itself had to compile.
"""

import json
import sys
import time

import psutil

from megatron_lt2.caches import use_cache_folders


def main(argv: list[str]) -> int:
    """Run and report."""
    started = psutil.Process().create_time()
    cache = use_cache_folders()
    from megatron_lt2.parallel import platform

    platform.install()
    import torch
    from triton import knobs

    from megatron_lt2.config.load import load_config
    from megatron_lt2.parallel.start import start_ranks, stop_ranks
    from megatron_lt2.selftest import check_kernels
    from megatron_lt2.training import rehearsal
    from megatron_lt2.training.setup import build_parts
    from megatron_lt2.training.steps import DataFeed, train_step
    from megatron_lt2.warmup import before_training

    config = load_config(["--config", *argv])
    config.data.path = "none"
    imported = time.time()
    before_training(config, 0)
    warmed = time.time()
    compiled: list[str] = []

    def listen(*, src: object, cache_hit: bool, **unused: object) -> None:
        if not cache_hit:
            compiled.append(str(getattr(src, "name", src)))

    knobs.compilation.listener = listen
    start_ranks(config.parallel, 1)
    parts = build_parts(config)
    built = time.time()
    check_kernels(config, parts.dtype, platform.device())
    tested = time.time()
    feed = DataFeed(rehearsal.batches(config, 5), config, eod=rehearsal.EOD)
    times = []
    for _ in range(3):
        begun = time.time()
        result = train_step(config, parts, feed, 2)
        torch.cuda.synchronize()
        times.append(round(time.time() - begun, 3))
        if len(times) == 1:
            first = time.time()
    report = {
        "first_step_done_s": round(first - started, 1),
        "imports_s": round(imported - started, 1),
        "warmup_s": round(warmed - imported, 1),
        "build_s": round(built - warmed, 1),
        "selftest_s": round(tested - built, 1),
        "steps_s": times,
        "compiled": compiled,
        "loss": round(float(result.loss_sum / result.tokens), 3),
        "cache": str(cache),
    }
    print(json.dumps(report), flush=True)
    stop_ranks()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
