"""The plots of docs/theory.md, from the same measurements as the tests.

python -m tests.theory.plots [FOLDER]
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

from tests.ranks import run_ranks

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "images"
FLOOR = 1e-17
LOOPS, WINDOW, LAYERS = (1, 2, 4), 16, 4
COLOURS = {1: "#9ecae1", 2: "#4292c6", 4: "#08306b"}


def _rank(rank: int, world: int) -> dict[str, Any]:
    from tests.theory.transitions import singular_values

    return {
        f"{mixer}, {keys} keys": singular_values(mixer, 4, keys)["singular"]
        for mixer in ("gdn", "kda")
        for keys in ("orthogonal", "equal")
    }


def _reach(rank: int, world: int) -> dict[Any, Any]:
    from tests.theory.reach import changes, farthest

    length = WINDOW + farthest(WINDOW, LAYERS, max(LOOPS)) + 1
    return {
        (loops, residual): changes(
            WINDOW,
            LAYERS,
            loops,
            place=WINDOW,
            length=length,
            rows=8,
            width=64,
            initial=True,
            residual=residual,
        )["size"]
        for loops in LOOPS
        for residual in (True, False)
    }


def _figure(width: float) -> tuple[Any, Any, Any]:
    import matplotlib

    matplotlib.use("svg")
    # The same file each time: ids from a fixed salt, no date, text as text.
    matplotlib.rcParams.update({"svg.hashsalt": "lt2", "svg.fonttype": "none", "font.size": 9})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(width, 3.0), layout="constrained")
    axes.spines[["top", "right"]].set_visible(False)
    return plt, figure, axes


def _save(plt: Any, figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
    print(f"{path}: {path.stat().st_size:,} bytes")


def plot_rank(path: Path) -> None:
    """Singular values of four loops' change of state, smallest head of the layer."""
    plt, figure, axes = _figure(6.0)
    markers = {"orthogonal": "o", "equal": "x"}
    for name, singular in run_ranks(1, _rank)[0].items():
        mixer, keys = name.split(", ")
        axes.semilogy(
            np.arange(1, 9),
            np.maximum(singular.min(0), FLOOR),
            marker=markers[keys.split()[0]],
            color="#08306b" if mixer == "gdn" else "#d94801",
            linestyle="-" if "equal" in keys else ":",
            label=name,
        )
    axes.set(xlabel="singular value number", ylabel="relative to the largest", ylim=(FLOOR / 2, 3))
    axes.legend(frameon=False, loc="upper right")
    _save(plt, figure, path)


def plot_reach(path: Path) -> None:
    """Size of the change against the distance from the changed token."""
    plt, figure, axes = _figure(7.0)
    for (loops, residual), size in run_ranks(1, _reach)[0].items():
        change = size[WINDOW:]
        distance = np.arange(len(change)) / WINDOW
        changed = change > 0
        axes.semilogy(
            distance[changed],
            change[changed] / np.linalg.norm(change),
            color=COLOURS[loops],
            linestyle="-" if residual else ":",
            linewidth=1.3,
            label=f"T = {loops}" + ("" if residual else ", residual dropped"),
        )
    axes.axvline(1.5, color="#888888", linewidth=0.8)
    axes.text(1.6, 1e-17, "1.5 w", color="#555555")
    axes.set(xlabel="distance in windows", ylabel="share of the change", ylim=(3e-18, 3))
    figure.legend(frameon=False, loc="outside lower center", ncols=3)
    _save(plt, figure, path)


def main() -> int:
    """Write both plots."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    plot_rank(folder / "theory_rank.svg")
    plot_reach(folder / "theory_reach.svg")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
