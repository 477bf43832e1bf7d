"""How fast conversion is, and how much memory it takes.

    python benchmarks/convert.py --folder DIR --gigabytes 2

Writes a Llama of random weights into DIR, converts it there and back, and copies the bytes with
fsync for comparison. Each is done in a process of its own, in turns, `--repeats` times; the best
time of each counts, since what else the machine does can only add to it. All of them read from the
page cache where the machine has the memory for it, and all end when the bytes are on the disk.
Memory is the largest resident size of the process above what it has after its imports and a first
small conversion; the bound is 3 x the largest tensor + 200 MB.

Prints a Markdown table; exit code 1 if a conversion is slower than 60 % of the copy or takes more
memory than the bound.
"""

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Not this file's folder, where Python looks first: names in it are those of other modules.
sys.path[:] = [str(ROOT), *(p for p in sys.path if Path(p).resolve() != ROOT / "benchmarks")]

SLOWEST = 0.6
MEMORY_MB = 200
BLOCK = 16 * 1024**2


def main() -> int:
    """Run one measurement in this process (--child), or all of them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path, help="where to work; default: a temporary folder")
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--shards", type=int, default=2, help="files of the source")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        return measure(Path(work), args.gigabytes, args.shards, args.repeats)


def measure(work: Path, gigabytes: float, shards: int, repeats: int) -> int:
    """All measurements; prints the table."""
    source = work / "hf"
    largest = make_model(source, gigabytes, shards)
    total = sum(path.stat().st_size for path in source.iterdir())
    run_child("import", source, work / "run")
    jobs = {
        "copy": (source, work / "copied"),
        "import": (source, work / "imported"),
        "export": (work / "run", work / "exported"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    busy: dict[str, list[float]] = {name: [] for name in jobs}
    memory: dict[str, float] = dict.fromkeys(jobs, 0.0)
    order = list(jobs)
    for number in range(repeats + 1):
        for name in order:
            origin, target = jobs[name]
            # Each finds as many pages of memory free as its own last output held.
            shutil.rmtree(target, ignore_errors=True)
            os.sync()
            took, cpu, extra = run_child(name, origin, target)
            if number:  # the first round fills the cache
                seconds[name].append(took)
                busy[name].append(cpu)
                memory[name] = max(memory[name], extra)
        order = [*order[1:], order[0]]
    times = {name: min(values) for name, values in seconds.items()}
    bound = 3 * largest / 1e6 + MEMORY_MB
    print(
        f"{total / 1e9:.2f} GB, largest tensor {largest / 1e6:.0f} MB; {os.cpu_count()} CPU cores, "
        f"load {os.getloadavg()[0]:.0f}, Python {sys.version.split()[0]}\n"
    )
    print("| | seconds (all) | CPU seconds | GB/s | of the copy's speed | memory, MB (bound) |")
    print("|---|---|---|---|---|---|")
    good = True
    for name, took in times.items():
        share = times["copy"] / took
        every = ", ".join(f"{value:.1f}" for value in seconds[name])
        print(
            f"| {name} | {took:.1f} ({every}) | {min(busy[name]):.1f} | "
            f"{total / 1e9 / took:.2f} | {share:.0%} | "
            f"{memory[name]:.0f} ({bound:.0f}) |"
        )
        good = good and share >= SLOWEST and memory[name] < bound
    return 0 if good else 1


def run_child(name: str, source: Path, target: Path) -> list[float]:
    """Seconds, CPU seconds and megabytes of one job in a process of its own."""
    command = [sys.executable, __file__, "--child", name, str(source), str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def child(name: str, source: str, target: str) -> int:
    """Do one job, print its seconds, CPU seconds and megabytes."""
    job = {"copy": copy, "import": to_run, "export": to_hf}[name]
    # For the copy too: a virtual machine gives freed pages back to its host after a few seconds,
    # and what starts later pays for having them again.
    import_everything()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started, busy = time.perf_counter(), time.process_time()
    job(Path(source), Path(target))
    took, busy = time.perf_counter() - started, time.process_time() - busy
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([took, busy, (after - before) * 1024 / 1e6]))
    return 0


def import_everything() -> None:
    """Convert a tiny model both ways: what that imports is then not counted again."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        make_model(work / "hf", 0, 1, width=64, inner=64, vocab=64)
        to_run(work / "hf", work / "run")
        to_hf(work / "run", work / "exported")


def copy(source: Path, target: Path) -> None:
    """A copy whose bytes are on the disk when it ends."""
    target.mkdir()
    for path in source.iterdir():
        with open(path, "rb") as stream, open(target / path.name, "wb") as out:
            shutil.copyfileobj(stream, out, BLOCK)
            out.flush()
            os.fsync(out.fileno())


def to_run(source: Path, target: Path) -> None:
    """Import."""
    from checkpoints_tools.importing import import_model

    import_model(source, target, progress=False)


def to_hf(source: Path, target: Path) -> None:
    """Export."""
    from checkpoints_tools.exporting import export_checkpoint

    export_checkpoint(source, target, progress=False)


def make_model(
    folder: Path,
    gigabytes: float,
    shards: int,
    *,
    width: int = 2048,
    inner: int = 5632,
    vocab: int = 49152,
) -> int:
    """A Llama of about that size in bf16; returns the bytes of its largest tensor."""
    import torch

    from checkpoints_tools.mappings.registry import FAMILIES
    from checkpoints_tools.safetensors_files import Spec
    from checkpoints_tools.safetensors_writer import SafetensorsWriter

    layer = 2 * (4 * width * width + 3 * width * inner)
    layers = max(1, round((gigabytes * 1e9 - 2 * vocab * width) / layer))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "head_dim": width // 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    family = FAMILIES["llama"]
    specs = {}
    for mapping in family.table(family.run_config(config).model):
        for name, shape in zip(mapping.targets, mapping.target_shapes(), strict=True):
            specs[name] = Spec("bfloat16", shape)
    total = sum(spec.nbytes for spec in specs.values())
    folder.mkdir()
    writer = SafetensorsWriter(folder, specs, max_bytes=-(-total // shards) + 1)
    for name, spec in specs.items():
        writer.add(name, torch.randn(spec.shape, dtype=torch.bfloat16))
    writer.close()
    (folder / "config.json").write_text(json.dumps(config))
    # In training, gate and up are one tensor.
    return max(2 * vocab * width, 2 * 2 * inner * width)


if __name__ == "__main__":
    sys.exit(main())
