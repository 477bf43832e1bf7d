"""Fit and plot of a grid of linearised students (launchers/linearize_study.sh).

    python benchmarks/linearize_study.py runs/study

Reads MIXER-SIZE-TOKENS.json of `benchmarks/linearize.py evaluate`, and for each mixer with enough
of them fits, by least squares in logarithms,

    KL = c N^-a D^-b        N parameters of the teacher, D tokens

Recovery is the share of the teacher's cloze accuracy. Writes study.md and study.png into the
folder.
"""

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

PARAMETERS = {"135m": 134.5e6, "360m": 361.8e6, "1b7": 1711.4e6}

Point = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", help="of the students' evaluations")
    folder = Path(parser.parse_args(argv).folder)
    points = read_points(folder)
    if not points:
        print(f"error: {folder}: no evaluation named MIXER-SIZE-TOKENS.json", file=sys.stderr)
        return 2
    text = report(points)
    (folder / "study.md").write_text(text)
    _plot(points, folder / "study.png")
    print(text, end="")
    return 0


def read_points(folder: Path) -> list[Point]:
    """One entry a student: mixer, size, parameters, tokens, kl, recovery."""
    points = []
    for path in sorted(folder.glob("*.json")):
        mixer, _, rest = path.stem.partition("-")
        size, _, budget = rest.partition("-")
        if size not in PARAMETERS or not budget:
            continue
        facts = json.loads(path.read_text())
        teacher = facts["teacher_cloze"]
        points.append(
            {
                **{"mixer": mixer, "size": size, "parameters": PARAMETERS[size]},
                **{"tokens": float(facts["tokens"]), "kl": float(facts["kl"])},
                "recovery": facts["cloze"] / teacher if teacher else math.nan,
            }
        )
    return points


def fit(points: Sequence[Point]) -> dict[str, float] | None:
    """c, a, b and the root mean square error in log KL; what does not vary has no exponent.

    None: fewer points than unknowns.
    """
    logs = {
        name: np.log([point[name] for point in points]) for name in ("parameters", "tokens", "kl")
    }
    columns, names = [np.ones(len(points))], ["c"]
    for name, exponent in (("parameters", "a"), ("tokens", "b")):
        if np.ptp(logs[name]) > 1e-6:
            columns.append(-logs[name])
            names.append(exponent)
    if len(points) < len(columns):
        return None
    matrix = np.stack(columns, 1)
    solved, *_ = np.linalg.lstsq(matrix, logs["kl"], rcond=None)
    error = float(np.sqrt(np.mean((matrix @ solved - logs["kl"]) ** 2)))
    found = dict(zip(names, map(float, solved), strict=True))
    return {**found, "c": math.exp(found["c"]), "error": error}


def report(points: Sequence[Point]) -> str:
    """Markdown: every student, then the fits."""
    lines = ["| mixer | teacher | tokens | KL | recovery |", "|---|---|---|---|---|"]
    for p in sorted(points, key=lambda p: (p["mixer"], p["parameters"], p["tokens"])):
        lines.append(
            f"| {p['mixer']} | {p['size']} | {p['tokens'] / 1e6:.1f}M | {p['kl']:.4f} | "
            f"{p['recovery']:.1%} |"
        )
    lines += ["", "| mixer | students | KL = c N^-a D^-b: a | b | error in log KL |"]
    lines.append("|---|---|---|---|---|")
    for mixer, own in _by_mixer(points).items():
        found = fit(own)
        if found is None:
            lines.append(f"| {mixer} | {len(own)} | too few | | |")
            continue
        a, b = (f"{found[name]:.3f}" if name in found else "not varied" for name in ("a", "b"))
        lines.append(f"| {mixer} | {len(own)} | {a} | {b} | {found['error']:.3f} |")
    return "\n".join(lines) + "\n"


def _by_mixer(points: Sequence[Point]) -> dict[str, list[Point]]:
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        groups[point["mixer"]].append(point)
    return dict(sorted(groups.items()))


def _plot(points: Sequence[Point], path: Path) -> None:
    """Recovery against tokens, a panel a size; against size, at the largest budget of each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [size for size in PARAMETERS if any(p["size"] == size for p in points)]
    figure, panels = pyplot.subplots(
        1, len(sizes) + 1, figsize=(3.2 * (len(sizes) + 1), 3.2), sharey=True, squeeze=False
    )
    for mixer, own in _by_mixer(points).items():
        for panel, size in zip(panels[0], sizes, strict=False):
            line = sorted((p["tokens"], p["recovery"]) for p in own if p["size"] == size)
            panel.plot(*zip(*line, strict=True), marker="o", label=mixer) if line else None
        best: dict[float, Point] = {}
        for p in sorted(own, key=lambda p: p["tokens"]):
            best[p["parameters"]] = p
        line = sorted((n, p["recovery"]) for n, p in best.items())
        panels[0][-1].plot(*zip(*line, strict=True), marker="o", label=mixer)
    for panel, title in zip(panels[0], [*sizes, "largest budget"], strict=True):
        panel.set_xscale("log")
        panel.set_title(title)
        panel.set_xlabel("parameters" if title == "largest budget" else "tokens")
    panels[0][0].set_ylabel("recovery (cloze)")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
