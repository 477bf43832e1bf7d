"""Ours beside the peer: whole training steps of the 1.3B shape on one GPU, and their ratios.

    python benchmarks/train.py                  the table of docs/performance.md, some eight minutes
    python benchmarks/train.py --quick          4,096 tokens in bf16 only, under three minutes
    python benchmarks/train.py --cap-gb 80      ours with the memory of an H100

Runs benchmarks/peer_fla.py and benchmarks/train_step.py one after the other, which alone use the
GPU meanwhile, prints their JSON lines as they come and at the end a Markdown table. Ratios are to
the peer's best run of the same kind at 4,096 tokens, whatever its micro-batch, and to ours at that
length ("of 4k").
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent

PEER = "hybrid:2:4096,hybrid:4:4096,gdn:4:4096,hybrid:1:16384"
PEER_QUICK = "hybrid:4:4096"
OURS = (
    "hybrid:3:4096,hybrid:4:4096:cheap,hybrid:4:4096:fp8=current,hybrid:4:4096:fp8=delayed,"
    "gdn:3:4096,gdn:1:16384:cheap,gdn:1:32768:cheap:layers=0.6,"
    "hybrid:1:16384:cheap,hybrid:1:16384:cheap:layers=0.5,hybrid:1:32768:cheap:layers=0.6"
)
OURS_QUICK = "hybrid:3:4096,hybrid:4:4096:cheap"
OURS_CAPPED = "hybrid:1:4096,hybrid:2:4096:cheap"


def main(argv: Sequence[str] | None = None) -> int:
    """Run both and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a few runs only")
    parser.add_argument("--cap-gb", type=float, help="memory that ours may take; no peer")
    parser.add_argument("--peer", help="runs of the peer; empty: none")
    parser.add_argument("--ours", help="runs of ours, see train_step.py")
    parser.add_argument("--tuned", action="store_true", help="see peer_fla.py")
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args(argv)
    peer, ours = (PEER_QUICK, OURS_QUICK) if args.quick else (PEER, OURS)
    more: list[str] = []
    more_peer: list[str] = []
    if args.cap_gb:
        peer, ours, more = "", OURS_CAPPED, ["--cap-gb", str(args.cap_gb)]
    if args.tuned:
        more_peer = ["--tuned"]
    peer = peer if args.peer is None else args.peer
    ours = args.ours or ours
    steps = ["--steps", str(args.steps)]
    found = list(lines("peer_fla.py", "--runs", peer, *steps, *more_peer)) if peer else []
    found += lines("train_step.py", "--runs", ours, *steps, *more)
    print(table([line for line in found if "failed" not in line]))
    return 0


def lines(program: str, *arguments: str) -> Iterator[dict[str, Any]]:
    """The JSON lines of a benchmark, which are printed too.

    Raises:
        SystemExit: it failed.
    """
    command = [sys.executable, str(FOLDER / program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith("{"):
                yield json.loads(line)
    if process.returncode:
        raise SystemExit(f"{program} ended with code {process.returncode}")


def table(found: list[dict[str, Any]]) -> str:
    """Markdown, with the ratios."""

    def best(who: str, kind: str) -> float | None:
        speeds = [
            line["tokens_per_s"]
            for line in found
            if (line["who"], line["kind"], line["length"]) == (who, kind, 4096)
            and line.get("fp8", "none") == "none"
        ]
        return max(speeds, default=None)

    rows = [
        "| who | layers | sequences | precision | made again | tokens/s | MFU | peak GB | to peer"
        " | of 4k |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for line in found:
        speed, kind = line["tokens_per_s"], line["kind"]
        peer, own = best("peer", kind), best(line["who"], kind)
        again = "cheap" * line.get("cheap", False)
        if line.get("layers"):
            again += f" + {line['layers']:.0%} of layers"
        cells = [
            line["who"],
            kind,
            f"{line['rows']} x {line['length']:,}",
            "bf16" if line.get("fp8", "none") == "none" else f"FP8 {line['fp8']}",
            again or "nothing",
            f"{speed:,}",
            f"{line['mfu']:.3f}",
            f"{line['peak_gb']}",
            f"{speed / peer:.2f}" if peer else "",
            f"{speed / own:.2f}" if own else "",
        ]
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    raise SystemExit(main())
