# SPDX-License-Identifier: Apache-2.0
"""Loss curves of one run or several: ``python -m examples.pretrain.plot_loss runs/a runs/b --output losses.png``."""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from .logs import read_lines

# Distinguishable with every common colour blindness (Okabe and Ito).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", ":", "-.")
SMOOTHED_SHARE = 0.02
SHOWN_FROM_SHARE = 0.1  # where the plunge of the first steps ends, in which all runs look alike
LEGEND_WIDTH = 96  # characters of 8 pt side by side under a figure of 6 inches


class Curves(NamedTuple):
    """Steps and losses (nats per token) of one run, as arrays."""

    name: str
    train_steps: np.ndarray
    train_losses: np.ndarray
    validation_steps: np.ndarray
    validation_losses: np.ndarray


def moving_average(values: np.ndarray, window: int) -> np.ndarray:
    """Mean of each value and the ``window - 1`` before it, or as many as there are."""
    totals = np.cumsum(np.concatenate([[0.0], values]))
    ends = np.arange(1, len(totals))
    starts = np.maximum(ends - window, 0)
    return (totals[ends] - totals[starts]) / (ends - starts)


def read_curves(folder: Path) -> Curves:
    """The losses of the run in ``folder``.

    Raises:
        FileNotFoundError: if there is no log, or no training or validation loss in it yet.
    """
    records = read_lines(folder / "log.jsonl")
    train = np.array([(r["step"], r["loss"]) for r in records if "loss" in r]).reshape(-1, 2)
    validation = np.array([(r["step"], r["validation_loss"]) for r in records if "validation_loss" in r]).reshape(-1, 2)
    if not len(train) or not len(validation):
        raise FileNotFoundError(f"no losses in {folder / 'log.jsonl'}")
    return Curves(folder.name, *train.T, *validation.T)


def plot_loss(runs: Sequence[Path], output: Path) -> None:
    """Draw the runs in the folders ``runs`` into the image ``output``; its suffix chooses the format.

    Raises:
        FileNotFoundError: if a folder holds no log.
    """
    figure = Figure(figsize=(6.0, 3.6), layout="constrained")
    axes = figure.add_subplot()
    for index, run in enumerate(sorted(map(read_curves, runs), key=lambda run: run.validation_losses[-1])):
        smoothed = moving_average(run.train_losses, max(1, round(SMOOTHED_SHARE * len(run.train_losses))))
        style = {
            "color": COLOURS[index % len(COLOURS)],
            "linestyle": LINE_STYLES[index // len(COLOURS) % len(LINE_STYLES)],
            "label": f"{run.name}  {run.validation_losses[-1]:.3f}",
        }
        draw_losses(axes, (run.train_steps, smoothed), (run.validation_steps, run.validation_losses), style)
    axes.plot([], [], color="0.5", alpha=0.6, linewidth=0.9, label="thin: training loss, moving average")
    axes.set_xlim(left=0)
    frame(axes, legend="below")
    save(figure, output)


def draw_losses(axes: Axes, train: Sequence[np.ndarray], validation: Sequence[np.ndarray], style: dict) -> int:
    """Training loss thin, validation loss as joined points; both are pairs of steps and losses.

    The first tenth of the steps is left out, and training losses before the first validation loss that is shown, so
    that the early ones do not set the range. Returns how many validation losses are shown, counted from the last.
    """
    tenth, last = SHOWN_FROM_SHARE * train[0][-1], len(validation[0]) - 1
    first = min(np.searchsorted(validation[0], tenth), last)
    begin = np.searchsorted(train[0], validation[0][first] if first < last else tenth)
    axes.plot(*(x[begin:] for x in train), color=style["color"], alpha=0.4, linewidth=0.8)
    axes.plot(
        *(x[first:] for x in validation), **{"marker": "o", "markersize": 3, "linewidth": 1.3, "zorder": 3} | style
    )
    over_steps(axes)
    axes.set_ylabel("loss (nats per token)")
    return last - first + 1


def over_steps(axes: Axes) -> None:
    """An axis of steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def frame(axes: Axes, legend: str = "beside") -> None:
    """Few lines, and a legend without a box: ``beside`` the axes, or ``below`` the figure if labels are long."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if labels and legend == "beside":
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    elif labels:
        figure, columns = axes.figure, max(1, min(4, LEGEND_WIDTH // (max(map(len, labels)) + 6)))
        assert isinstance(figure, Figure)
        figure.legend(handles, labels, fontsize=8, frameon=False, loc="outside lower center", ncols=columns)
        figure.set_figheight(3.6 + 0.18 * math.ceil(len(labels) / columns))


def save(figure: Figure, file: Path) -> None:
    """Write the figure as ``file``, a PNG if it has no suffix; the same figure gives the same bytes."""
    figure.savefig(file if file.suffix else file.with_suffix(".png"), dpi=150)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
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
