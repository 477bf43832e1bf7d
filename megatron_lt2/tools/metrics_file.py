"""Reading a run's metrics.jsonl.

A run that was killed leaves steps after its last checkpoint in the file, and the next start writes
them again; it may also leave half a line. The last record of a step counts, half lines do not.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class LossCurves:
    """Losses of one run, in nats a token, by optimizer step."""

    train_steps: list[int]
    train_loss: list[float]
    train_tokens: list[int | None]
    """Tokens seen at each of train_steps."""
    eval_steps: list[int]
    eval_loss: list[float]
    unigram_nats: float | None
    """Unigram entropy of the validation tokens; None where the run did not report it."""

    @property
    def final_eval(self) -> float | None:
        """The last validation loss."""
        return self.eval_loss[-1] if self.eval_loss else None


def read_records(path: str | Path) -> list[dict[str, Any]]:
    """All whole records of the file, in order.

    Raises:
        ValueError: the file is missing, or a line that is not the last one is no JSON object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{path}: cannot read the metrics ({error.strerror})") from None
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            # A killed run's half line is followed by the next start's records, on the same line.
            record = _after_half_line(line)
            if record is None and number < len(lines):
                raise ValueError(f"{path}:{number}: not a JSON object") from None
        if isinstance(record, dict):
            records.append(record)
    return records


def _after_half_line(line: str) -> Any:
    start = line.rfind('{"kind"')
    if start <= 0:
        return None
    try:
        return json.loads(line[start:])
    except json.JSONDecodeError:
        return None


def loss_curves(records: Sequence[dict[str, Any]]) -> LossCurves:
    """Training and validation loss by step, later records of a step replacing earlier ones."""
    train = {r["step"]: r for r in records if r.get("kind") == "train" and "loss" in r}
    evaluated = {
        r["step"]: r
        for r in records
        if r.get("kind") == "eval" and "loss" in r and r.get("split", "valid") != "test"
    }
    unigram = [r["valid_unigram_nats"] for r in records if r.get("valid_unigram_nats") is not None]
    return LossCurves(
        train_steps=sorted(train),
        train_loss=[float(train[step]["loss"]) for step in sorted(train)],
        train_tokens=[train[step].get("tokens") for step in sorted(train)],
        eval_steps=sorted(evaluated),
        eval_loss=[float(evaluated[step]["loss"]) for step in sorted(evaluated)],
        unigram_nats=float(unigram[-1]) if unigram else None,
    )


def summary(curves: LossCurves) -> str:
    """The closing lines: validation loss, unigram entropy and the difference.

    Raises:
        ValueError: the run has no validation loss.
    """
    if curves.final_eval is None:
        raise ValueError("the run has no validation loss yet")
    lines = [
        f"validation loss   {curves.final_eval:.4f} nat/token, after step {curves.eval_steps[-1]}"
    ]
    if curves.unigram_nats is not None:
        gain = curves.unigram_nats - curves.final_eval
        where = "below" if gain >= 0 else "ABOVE"
        lines.append(
            f"unigram entropy   {curves.unigram_nats:.4f} nat/token, same validation tokens"
        )
        lines.append(f"difference        {abs(gain):.4f} nat/token {where} the unigram entropy")
    return "\n".join(lines)
