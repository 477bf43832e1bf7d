"""Draw a run's loss, or print its closing numbers.

    python -m megatron_lt2.tools.plot_loss --metrics RUN/metrics.jsonl --output loss.png

Training loss (each record faint, a running mean on top), validation loss, and the unigram entropy
of the validation tokens: what a model reaches that knows how frequent each token is, no more.
`--summary` prints the closing numbers instead of drawing.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lt2.tools.metrics_file import LossCurves, loss_curves, read_records, summary

TRAIN, VALID, UNIGRAM, INK = "#4C78A8", "#E4572E", "#6B6B6B", "#2B2B2B"


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the figure, or print the summary."""
    parser = argparse.ArgumentParser(
        prog="python -m megatron_lt2.tools.plot_loss", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--metrics", required=True, help="metrics.jsonl of a run")
    parser.add_argument("--output", help="image to write (png, svg or pdf)")
    parser.add_argument("--title", help="title of the figure; default: the run folder's name")
    parser.add_argument(
        "--summary", action="store_true", help="print validation loss, unigram entropy, difference"
    )
    args = parser.parse_args(argv)
    if not args.output and not args.summary:
        parser.error("needs --output FILE or --summary")
    try:
        curves = loss_curves(read_records(args.metrics))
        if args.output:
            title = args.title or Path(args.metrics).resolve().parent.name
            draw(curves, Path(args.output), title)
            print(f"wrote {args.output}")
        if args.summary:
            print(summary(curves))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """Mean of the `window` (odd) values around each one; fewer at both ends, kept symmetric."""
    half = window // 2
    means = []
    for index in range(len(values)):
        reach = min(half, index, len(values) - 1 - index)
        near = values[index - reach : index + reach + 1]
        means.append(sum(near) / len(near))
    return means


def draw(curves: LossCurves, output: Path, title: str) -> None:
    """Write the figure to `output`, under a temporary name first.

    Raises:
        ValueError: there is nothing to draw, or matplotlib is missing.
    """
    if not curves.train_steps:
        raise ValueError("the run has no training loss yet")
    try:
        import matplotlib
    except ImportError:
        raise ValueError("drawing needs matplotlib: pip install 'megatron-lt2[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8.0, 4.6), dpi=160, layout="constrained")
    _draw_curves(axes, curves)
    _draw_unigram(axes, curves)
    _decorate(axes, curves, title)
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.stem}.partial{output.suffix}")
    figure.savefig(partial)
    pyplot.close(figure)
    os.replace(partial, output)


def _draw_curves(axes: Any, curves: LossCurves) -> None:
    window = 2 * (len(curves.train_steps) // 40) + 1
    axes.plot(curves.train_steps, curves.train_loss, color=TRAIN, alpha=0.3, linewidth=0.9)
    axes.plot(
        curves.train_steps,
        running_mean(curves.train_loss, window),
        color=TRAIN,
        linewidth=1.8,
        label="training",
    )
    if curves.final_eval is not None:
        axes.plot(
            curves.eval_steps,
            curves.eval_loss,
            color=VALID,
            linewidth=1.4,
            marker="o",
            markersize=4,
            label="validation",
        )
        axes.annotate(
            f"{curves.final_eval:.2f}",
            (curves.eval_steps[-1], curves.final_eval),
            xytext=(7, 0),
            textcoords="offset points",
            color=VALID,
            va="center",
            weight="bold",
        )


def _draw_unigram(axes: Any, curves: LossCurves) -> None:
    if curves.unigram_nats is None:
        return
    axes.axhline(curves.unigram_nats, color=UNIGRAM, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate(
        f"unigram entropy {curves.unigram_nats:.2f}",
        (1.0, curves.unigram_nats),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 4),
        textcoords="offset points",
        color=UNIGRAM,
        ha="right",
    )


def _decorate(axes: Any, curves: LossCurves, title: str) -> None:
    axes.set_title(title, loc="left", color=INK, weight="bold")
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nat/token)")
    axes.set_xlim(0, max([*curves.train_steps, *curves.eval_steps]) * 1.08)
    axes.grid(axis="y", color="#DDDDDD", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    tokens = curves.train_tokens[-1]
    if tokens and curves.train_steps[-1]:
        per_step = tokens / curves.train_steps[-1]
        unit, name = (1e6, "millions") if tokens < 2e9 else (1e9, "billions")
        seen = axes.secondary_xaxis(
            "top",
            functions=(lambda x: x * per_step / unit, lambda x: x * unit / per_step),
        )
        seen.set_xlabel(f"tokens ({name})", color=UNIGRAM)
        seen.tick_params(colors=UNIGRAM)
        seen.spines["top"].set_visible(False)
    axes.legend(frameon=False, loc="upper right")


if __name__ == "__main__":
    sys.exit(main())
