# SPDX-License-Identifier: Apache-2.0
"""Loss curves of one run or several: ``python -m examples.pretrain.plot_loss runs/a runs/b --output losses.png``.

Validation losses are points joined by a line; behind them, fainter, stands the training loss, averaged over the
steps before.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .logs import read_lines

# Distinguishable with every common colour blindness (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":")
SMOOTHED_SHARE = 0.02
SHOWN_FROM_SHARE = 0.1


@dataclass(frozen=True)
class Curves:
    """The losses of one run: arrays of steps and of losses in nats per token."""

    name: str
    train_steps: np.ndarray
    train_losses: np.ndarray
    validation_steps: np.ndarray
    validation_losses: np.ndarray

    def smoothed(self) -> np.ndarray:
        """Training loss averaged over the last 2 % of the run's steps."""
        return moving_average(self.train_losses, max(1, round(SMOOTHED_SHARE * len(self.train_losses))))


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and those before it, ``window`` of them where there are so many."""
    totals = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(totals))
    starts = np.maximum(ends - window, 0)
    return (totals[ends] - totals[starts]) / (ends - starts)


def read_curves(folder: Path) -> Curves:
    """The curves of the run in ``folder``.

    Raises:
        FileNotFoundError: where there is no log, or nothing in it yet.
    """
    records = read_lines(folder / "log.jsonl")
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r]).reshape(-1, 2)
    validation = np.array([(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]).reshape(-1, 2)
    if not len(train) or not len(validation):
        raise FileNotFoundError(f"no losses in {folder / 'log.jsonl'}")
    return Curves(folder.name, *train.T, *validation.T)


def plot_loss(runs: Sequence[Path], output: Path) -> None:
    """Draw the runs in the folders ``runs`` into the image ``output``, whose suffix chooses the format.

    Raises:
        FileNotFoundError: where a folder holds no log.
    """
    curves = sorted((read_curves(folder) for folder in runs), key=lambda c: c.validation_losses[-1])
    figure = Figure(figsize=(5.0, 3.2), layout="constrained")
    axes = figure.add_subplot()
    for index, run in enumerate(curves):
        draw(axes, run, COLOURS[index % len(COLOURS)], LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)])
    frame(axes, curves)
    figure.savefig(output, dpi=300)


def draw(axes: Axes, run: Curves, colour: str, style: str) -> None:
    """One run: training loss behind, validation losses in front."""
    label = f"{run.name}  {run.validation_losses[-1]:.3f}"
    trained = run.validation_steps > 0
    axes.plot(run.train_steps, run.smoothed(), color=colour, alpha=0.45, linewidth=0.9)
    axes.plot(
        run.validation_steps[trained],
        run.validation_losses[trained],
        style,
        color=colour,
        marker="o",
        markersize=3.5,
        linewidth=1.3,
        label=label,
        zorder=3,
    )


def frame(axes: Axes, curves: Sequence[Curves]) -> None:
    """Labels, legend, and a range that leaves out the plunge of the first steps, where all runs look alike."""
    lowest = min(min(c.validation_losses.min(), c.smoothed().min()) for c in curves)
    highest = max(c.smoothed()[int(SHOWN_FROM_SHARE * len(c.train_losses))] for c in curves)
    margin = 0.06 * (highest - lowest) or 0.1
    axes.set_ylim(lowest - margin, highest + margin)
    axes.set_xlim(0, max(c.train_steps[-1] for c in curves) * 1.02)
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.plot([], [], color="0.5", alpha=0.6, linewidth=0.9, label="training loss, moving average")
    legend = axes.legend(fontsize=8, title="final validation loss", title_fontsize=8, alignment="left", framealpha=1.0)
    legend.get_frame().set_edgecolor("none")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.pretrain.plot_loss", description="Draw loss curves.")
    parser.add_argument("runs", nargs="+", type=Path, help="folders of runs")
    parser.add_argument("--output", type=Path, help="image to write (default: losses.png beside the first run)")
    chosen = parser.parse_args(arguments)
    output = chosen.output or chosen.runs[0].resolve().parent / "losses.png"
    try:
        plot_loss(chosen.runs, output)
    except FileNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main())
