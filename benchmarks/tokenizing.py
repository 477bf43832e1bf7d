"""Throughput and memory of data_prep/tokenize.py, beside a plain pool and beside encoding alone.

The text is what lies on any machine: the standard library and installed packages of this Python,
manual pages and package documentation, one document a file, in an order by hash.
"""

import os
import sys

_here = os.path.dirname(os.path.realpath(__file__))
_root = os.path.dirname(_here)
sys.path[:] = [
    _root,
    *(p for p in sys.path if os.path.realpath(p or ".") not in (_here, _root)),
]

import argparse  # noqa: E402
import gzip  # noqa: E402
import hashlib  # noqa: E402
import json  # noqa: E402
import statistics  # noqa: E402
import struct  # noqa: E402
import subprocess  # noqa: E402
import sysconfig  # noqa: E402
import time  # noqa: E402
from collections.abc import Callable  # noqa: E402
from multiprocessing import get_context  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

ROOTS = ("/usr/share/man", "/usr/share/doc", "/usr/lib/python3")
SUFFIXES = (".py", ".txt", ".rst", ".md", ".html", ".c", ".h", ".pl", ".pm")


def _is_text(path: Path) -> bool:
    name = path.name.removesuffix(".gz")
    if "/man/" in str(path) or "/doc/" in str(path):
        return not name.endswith((".png", ".svg", ".pdf", ".js", ".css", ".ps"))
    return name.endswith(SUFFIXES)


def make_corpus(file: Path, megabytes: float) -> dict[str, float]:
    """Write about so much text as JSON lines; what there was of it."""
    roots = [*ROOTS, sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")]
    found: dict[str, Path] = {}
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if _is_text(path) and not path.is_symlink():
                    found[hashlib.sha256(str(path).encode()).hexdigest()] = path
    size, documents, seen = 0, 0, set()
    with open(file, "w", encoding="utf-8") as out:
        for _, path in sorted(found.items()):
            try:
                data = path.read_bytes()
                text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
            except (OSError, ValueError, EOFError):
                continue
            digest = hashlib.md5(text.encode()).digest()
            if not text.strip() or digest in seen or len(text) > 4_000_000:
                continue
            seen.add(digest)
            out.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
            documents, size = documents + 1, size + len(text.encode())
            if size >= megabytes * 1e6:
                break
    return {"documents": documents, "megabytes": size / 1e6}


_backend = None


def _start(path: str) -> None:
    global _backend
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import tokenizers

    _backend = tokenizers.Tokenizer.from_file(path)


def _encode(line: bytes) -> list[int]:
    assert _backend is not None
    return _backend.encode(json.loads(line)["text"], add_special_tokens=False).ids


def run_pool(corpus: Path, tokenizer: Path, output: Path, workers: int) -> float:
    """Seconds of a plain pool, one document at a time, in the manner of most such scripts."""
    import numpy as np

    started, lengths = time.perf_counter(), []
    with (
        get_context("spawn").Pool(workers, _start, (str(tokenizer),)) as pool,
        open(corpus, "rb") as lines,
        open(f"{output}.bin", "wb") as out,
    ):
        for ids in pool.imap(_encode, lines, chunksize=32):
            ids.append(0)
            out.write(np.array(ids, dtype=np.uint16).tobytes())
            lengths.append(len(ids))
        pool.close()
        pool.join()  # so that their processor time counts
    with open(f"{output}.idx", "wb") as out:
        out.write(struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(lengths) + 1))
        sizes = np.array(lengths, dtype=np.int32)
        out.write(sizes.tobytes())
        out.write((np.cumsum(np.concatenate(([0], sizes[:-1])), dtype=np.int64) * 2).tobytes())
        out.write(np.arange(len(lengths) + 1, dtype=np.int64).tobytes())
    return time.perf_counter() - started


CEILING = """
import json, sys, time
import tokenizers
backend = tokenizers.Tokenizer.from_file(sys.argv[2])
texts = [json.loads(line)["text"] for line in open(sys.argv[1], encoding="utf-8")]
started = time.perf_counter()
for first in range(0, len(texts), 512):
    backend.encode_batch_fast(texts[first : first + 512], add_special_tokens=False)
print(time.perf_counter() - started)
"""


def run_ceiling(corpus: Path, tokenizer: Path, workers: int) -> float:
    """Seconds of encoding text that is in memory, by the library's own threads; ids are dropped."""
    environment = {**os.environ, "RAYON_NUM_THREADS": str(workers), "TOKENIZERS_PARALLELISM": "1"}
    command = [sys.executable, "-c", CEILING, str(corpus), str(tokenizer)]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return float(done.stdout)


def ours(corpus: Path, tokenizer: Path, output: Path, workers: int, *more: str) -> list[str]:
    """The command line of this project's tool."""
    tool = Path(_root, "data_prep", "tokenize.py")
    words = [sys.executable, tool, "--input", corpus, "--tokenizer", tokenizer, "--output", output]
    return [*map(str, words), "--workers", str(workers), "--overwrite", *more]


def run_ours(corpus: Path, tokenizer: Path, output: Path, workers: int, *more: str) -> float:
    """Seconds of the whole command, start and durable end included."""
    started = time.perf_counter()
    subprocess.run(
        ours(corpus, tokenizer, output, workers, *more), check=True, stdout=subprocess.DEVNULL
    )
    return time.perf_counter() - started


def _processor_seconds() -> float:
    """Of this process and of those that it waited for."""
    return sum(os.times()[:4])


def compare(
    folder: Path, tokenizer: Path, megabytes: float, workers: int, rounds: int, fast: bool
) -> None:
    """All ways in turn; medians of MB/s and of MB for a second of processor time.

    On a machine that does other work too, wall time says little; processor time and the ratios
    within one round say more.
    """
    corpus = folder / "corpus.jsonl"
    facts = make_corpus(corpus, megabytes)
    print(json.dumps(facts), flush=True)
    ways: dict[str, Callable[[], float]] = {
        "ours": lambda: run_ours(corpus, tokenizer, folder / "ours", workers),
        "pool": lambda: run_pool(corpus, tokenizer, folder / "pool", workers),
        "ceiling": lambda: run_ceiling(corpus, tokenizer, workers),
    }
    if fast:
        more = ("--encoder", "fastokens")
        ways["fast"] = lambda: run_ours(corpus, tokenizer, folder / "fast", workers, *more)
    wall: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name in list(ways) if number % 2 == 0 else list(ways)[::-1]:
            before = _processor_seconds()
            wall[name].append(facts["megabytes"] / ways[name]())
            processor[name].append(facts["megabytes"] / (_processor_seconds() - before))
        line: dict[str, Any] = {"round": number, "load": round(os.getloadavg()[0], 1)}
        line["mb_per_s"] = {name: round(values[-1], 2) for name, values in wall.items()}
        line["mb_per_cpu_s"] = {name: round(values[-1], 2) for name, values in processor.items()}
        print(json.dumps(line), flush=True)
    result: dict[str, Any] = {}
    for title, speeds in (("mb_per_s", wall), ("mb_per_cpu_s", processor)):
        row = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
        for other in ("pool", "ceiling"):
            ratios = [a / b for a, b in zip(speeds["ours"], speeds[other], strict=True)]
            row[f"ours/{other}"] = round(statistics.median(ratios), 2)
        result[title] = row
    data = {name: (folder / f"{name}.bin").read_bytes() for name in ways if name != "ceiling"}
    print(json.dumps({**result, "same_bytes": len(set(data.values())) == 1}))


PEAK = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024)
"""


def peak(command: list[str]) -> float:
    """Largest resident size in MB of any one process of a command."""
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *command], check=True, capture_output=True, text=True
    )
    return int(done.stdout) / 1e6


def memory(folder: Path, tokenizer: Path, workers: int) -> None:
    """Peak of the largest process for many documents, many files, and a long document."""
    for count in (100_000, 1_000_000):
        source = folder / f"{count}.jsonl"
        with open(source, "w") as out:
            out.writelines(f'{{"text": "document number {i}"}}\n' for i in range(count))
        started = time.perf_counter()
        used = peak(ours(source, tokenizer, folder / "many", workers))
        seconds = round(time.perf_counter() - started, 1)
        print(json.dumps({"documents": count, "peak_mb": round(used), "seconds": seconds}))
    text = " ".join(f"word{i % 9973} and more" for i in range(100_000_000 // 18))[:100_000_000]
    source = folder / "long.jsonl"
    source.write_text(json.dumps({"text": text}) + "\n" + json.dumps({"text": "short"}) + "\n")
    started = time.perf_counter()
    used = peak(ours(source, tokenizer, folder / "long", workers))
    seconds = round(time.perf_counter() - started, 1)
    print(json.dumps({"one_document_mb": 100, "peak_mb": round(used), "seconds": seconds}))


def main() -> None:
    """Run what is asked for."""
    parser = argparse.ArgumentParser(prog="tokenizing.py", description=__doc__)
    parser.add_argument("--folder", required=True, help="where everything is written")
    parser.add_argument("--tokenizer", required=True, help="a tokenizer.json")
    parser.add_argument("--megabytes", type=float, default=110)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fast", action="store_true", help="also with --encoder fastokens")
    parser.add_argument("--memory", action="store_true", help="measure memory instead of speed")
    options = parser.parse_args()
    folder, tokenizer = Path(options.folder), Path(options.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    if options.memory:
        memory(folder, tokenizer, options.workers)
    else:
        compare(folder, tokenizer, options.megabytes, options.workers, options.rounds, options.fast)


if __name__ == "__main__":
    main()
