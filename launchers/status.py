#!/usr/bin/env python3
"""How a run stands: state, progress, time left, restarts, last errors.

    python launchers/status.py RUN [--json]

Reads what a run writes into its folder, wherever that is mounted; needs no environment. Exit codes:
0 the run is going or finished, 1 it stopped before its end, 2 there is no such run.
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SILENT_S = 300.0
"""Without a heartbeat for longer a run counts as gone: it may have been killed."""
LAST_WORDS = {0: "finished or requeued", 2: "a setting or the data was wrong", 75: "saved early"}
LAST_WORDS |= {74: "could not save", 76: "diverged", 77: "hung"}
ERROR = re.compile(
    r"^(?:\d+: )?(?:error:|WARNING:|warning: step|rank \d+ (?:failed|hangs)|\w*Error\b)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the state of one run; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    args = parser.parse_args(argv)
    if not (args.run / "metrics.jsonl").is_file() and not (args.run / "heartbeat.json").is_file():
        print(
            f"error: {args.run}: no run folder (no metrics.jsonl, no heartbeat.json)",
            file=sys.stderr,
        )
        return 2
    facts = describe(args.run, time.time())
    print(json.dumps(facts, indent=2) if args.json else as_text(facts))
    return 0 if facts["state"] not in ("stopped", "silent") else 1


def describe(run: Path, now: float) -> dict[str, Any]:
    """What is known of a run at time `now` (seconds since 1970)."""
    records = list(json_lines(run / "metrics.jsonl"))
    trains = [r for r in records if r.get("kind") == "train"]
    beat = next(iter(json_lines(run / "heartbeat.json")), {})
    events = list(json_lines(run / "events.jsonl"))
    newest = trains[-1] if trains else {}
    step = max(int(newest.get("step", 0)), int(beat.get("step", 0)))
    ends = [r for r in records if r.get("kind") == "end"]
    starts = [r for r in records if r.get("kind") == "start" and "message" in r]
    left = newest.get("eta_s")
    if left is not None:
        left = max(0.0, left - (step - newest["step"]) * newest["step_s"])
    evaluations = [r for r in records if r.get("kind") == "eval"]
    return {
        "run": str(run),
        "state": _state(run, now, beat, ends, starts),
        "phase": beat.get("phase"),
        "step": step,
        "steps": _total(run, newest),
        "tokens": newest.get("tokens"),
        "loss": newest.get("loss"),
        "validation_loss": evaluations[-1]["loss"] if evaluations else None,
        "tokens_per_s": newest.get("tokens_per_s"),
        "eta_s": left,
        "heartbeat_age_s": round(now - beat["time"], 1) if beat else None,
        "checkpoint": _read(run / "checkpoints" / "latest"),
        "starts": len(starts),
        "skipped_steps": sum(r.get("kind") == "skipped" for r in records),
        "failed_checkpoints": sum(r.get("kind") == "checkpoint_failed" for r in records),
        "job": beat.get("job"),
        "restart": beat.get("restart"),
        "last_codes": [e["code"] for e in events if e.get("event") == "end"][-5:],
        "errors": last_errors(run),
    }


def json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line; a line that is being written is passed over."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            yield value


def last_errors(run: Path, most: int = 5) -> list[str]:
    """The last lines that tell of trouble in the logs of the newest start, with their file."""
    folders = sorted((run / "logs").glob("job-*"), key=lambda folder: folder.stat().st_mtime)
    found = []
    for path in sorted(folders[-1].glob("rank-*.log")) if folders else []:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        found += [f"{path.name}: {line[:200]}" for line in lines if ERROR.match(line)]
    return found[-most:]


def as_text(facts: dict[str, Any]) -> str:
    """One fact a line."""
    total = facts["steps"]
    share = f" of {total:,} ({100 * facts['step'] / total:.1f}%)" if total else ""
    lines = [f"{facts['run']}: {facts['state']}", f"step        {facts['step']:,}{share}"]
    if facts["loss"] is not None:
        lines.append(
            f"loss        {facts['loss']:.4f}, {facts['tokens']:,} tokens, "
            f"{facts['tokens_per_s']:,.0f} tok/s"
        )
    if facts["validation_loss"] is not None:
        lines.append(f"validation  {facts['validation_loss']:.4f}")
    if facts["state"] == "running" and facts["eta_s"] is not None:
        lines.append(f"left        {_duration(facts['eta_s'])}")
    if facts["heartbeat_age_s"] is not None:
        lines.append(
            f"heartbeat   {_duration(facts['heartbeat_age_s'])} ago, phase {facts['phase']}"
        )
    lines.append(f"checkpoint  {facts['checkpoint'] or 'none'}")
    job = f", job {facts['job']} restart {facts['restart']}" if facts["job"] else ""
    lines.append(f"starts      {facts['starts']}{job}")
    if facts["last_codes"]:
        codes = ", ".join(f"{c} ({LAST_WORDS.get(c, 'failed')})" for c in facts["last_codes"])
        lines.append(f"exit codes  {codes}")
    for name in ("skipped_steps", "failed_checkpoints"):
        if facts[name]:
            lines.append(f"{name.replace('_', ' ')}  {facts[name]}")
    return "\n".join(lines + [f"  {error}" for error in facts["errors"]])


def _state(
    run: Path,
    now: float,
    beat: dict[str, Any],
    ends: list[dict[str, Any]],
    starts: list[dict[str, Any]],
) -> str:
    last_start = starts[-1]["time"] if starts else 0.0
    if ends and ends[-1]["time"] >= last_start:
        if (run / "finished").exists() and ends[-1].get("exit_code") == 0:
            return "finished"
        return "stopped"
    if beat and now - beat["time"] > SILENT_S:
        return "silent"
    return "running"


def _total(run: Path, newest: dict[str, Any]) -> int | None:
    """training.steps, from the resolved config; read without a YAML library."""
    text = _read(run / "config.yaml") or ""
    section = re.search(r"^training:\n((?:[ \t]+.*\n?)+)", text, re.MULTILINE)
    steps = re.search(r"^\s+steps:\s*(\d+)", section.group(1), re.MULTILINE) if section else None
    return int(steps.group(1)) if steps else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return None


def _duration(seconds: float) -> str:
    minutes, s = divmod(int(seconds), 60)
    hours, m = divmod(minutes, 60)
    days, h = divmod(hours, 24)
    if days:
        return f"{days}d{h:02d}h"
    return f"{hours}h{m:02d}m" if hours else f"{m}m{s:02d}s"


if __name__ == "__main__":
    sys.exit(main())
