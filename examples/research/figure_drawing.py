# SPDX-License-Identifier: Apache-2.0
"""The paper's figures drawn from the numbers of ``figure_data``: one panel a run, or
one curve a run.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from examples.pretrain.compare.plots import (
    LINE_STYLES,
    SHOWN_FROM_SHARE,
    frame,
    over_steps,
    save,
)
from examples.pretrain.compare.results import NAMES
from examples.research.figure_data import SMOOTHED_STEPS, moving_average

Run = dict[str, Any]

STEPS_MAP = matplotlib.colormaps[
    "viridis"
]  # sequential, and in order for the color-blind, too
STEPS_MAP_END = 0.9  # its last tenth is too light on white
LOWEST_EIGENVALUE = 1e-4
# Component -> legend, color (distinguishable with every common color blindness),
# hatching (and without color).
ENERGIES = {
    "top": ("{rank} largest above one", "#0072B2", ""),
    "remain": ("others above one", "#E69F00", "//"),
    "sub": ("below one", "#BBBBBB", ""),
}
LINES = ("gradient_norm", "alignment", "losses")


def draw(folder: Path, runs: Sequence[Run]) -> list[str]:
    """All figures as PNG; returns their names."""
    panels: dict[str, Callable[[Axes, Run], None]] = {}
    for orientation in ("rows", "columns"):
        panels[f"spectra_{orientation}"] = lambda axes, run, o=orientation: (
            draw_spectra(axes, run, o)
        )
    for orientation in ("rows", "columns"):
        panels[f"energy_{orientation}"] = lambda axes, run, o=orientation: (
            draw_energies(axes, run, o)
        )
    for name, paint in panels.items():
        save(panelled(runs, paint), folder / name)
    for name, paint in zip(
        LINES, (draw_gradient_norms, draw_alignments, draw_losses), strict=True
    ):
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        paint(axes, runs)
        over_steps(axes)
        frame(axes)
        save(figure, folder / name)
    return [*panels, *LINES]


def panelled(runs: Sequence[Run], paint: Callable[[Axes, Run], None]) -> Figure:
    """A panel for every run, two beside each other, with its name above it where there
    is more than one.
    """
    across = min(len(runs), 2)
    down = math.ceil(len(runs) / across)
    width, height = (6.0, 3.4) if len(runs) == 1 else (4.6, 2.8)
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    for place, (run, (label, _, _)) in enumerate(
        zip(runs, styles(runs), strict=True), 1
    ):
        axes = figure.add_subplot(down, across, place)
        paint(axes, run)
        if len(runs) > 1:
            axes.set_title(label, fontsize=9)
    return figure


def styles(runs: Sequence[Run]) -> list[tuple[str, str, str]]:
    """Label, color and line style of every run: its optimizer's, and its own name where
    several have one optimizer.
    """
    found, seen = [], []
    for run in runs:
        label, color = NAMES[run["optimizer"]]
        alike = [other for other in runs if other["optimizer"] == run["optimizer"]]
        style = LINE_STYLES[seen.count(run["optimizer"]) % len(LINE_STYLES)]
        found.append(
            (f"{label}, {run['name']}" if len(alike) > 1 else label, color, style)
        )
        seen.append(run["optimizer"])
    return found


def draw_spectra(axes: Axes, run: Run, orientation: str) -> None:
    """Eigenvalues by rank: mean and quartiles over matrices, a color for every step."""
    chosen = [
        checkpoint
        for checkpoint in run["checkpoints"]
        if checkpoint["step"] in run["shown"]
    ]
    for place, checkpoint in enumerate(chosen):
        color = STEPS_MAP(STEPS_MAP_END * place / max(len(chosen) - 1, 1))
        for which, line in (("before", "-"), ("after", ":")):
            values = {
                key: np.array(part, float)
                for key, part in checkpoint[orientation][which].items()
            }
            ranks = np.arange(1, len(values["mean"]) + 1)
            axes.fill_between(
                ranks,
                values["low"],
                values["high"],
                color=color,
                alpha=0.1,
                linewidth=0,
            )
            label = f"step {checkpoint['step']:,}" if which == "before" else None
            axes.plot(
                ranks, values["mean"], line, color=color, linewidth=1.2, label=label
            )
    axes.axhline(1, color="0.4", linewidth=0.8, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=max(axes.get_ylim()[0], LOWEST_EIGENVALUE))
    axes.set_xlabel("rank")
    axes.set_ylabel(f"eigenvalue, {orientation} active")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda rank, _: f"{rank:g}"))
    for line, label in (("-", "before normalization"), (":", "after normalization")):
        axes.plot([], [], line, color="0.2", linewidth=1.2, label=label)
    frame(axes)


def draw_energies(axes: Axes, run: Run, orientation: str) -> None:
    """Two bars a checkpoint: what global preconditioning changes, by modes, and what
    local preconditioning does.
    """
    chosen = [
        checkpoint
        for checkpoint in run["checkpoints"]
        if checkpoint["step"] in run["shown"]
    ]
    places, rank = np.arange(len(chosen)), str(run["ranks"][0])
    heights = {
        part: (
            100
            * np.array([c[orientation]["energies"][rank][part] for c in chosen], float)
        )
        for part in ENERGIES
    }
    below = np.zeros(len(chosen))
    for part, (label, color, hatch) in ENERGIES.items():
        style = {
            "width": 0.36,
            "color": color,
            "hatch": hatch,
            "edgecolor": "white",
            "linewidth": 0,
        }
        axes.bar(
            places - 0.2,
            heights[part],
            bottom=below,
            label=label.format(rank=rank),
            **style,
        )
        if part == "top":
            axes.bar(places + 0.2, heights[part], **style)
        below += heights[part]
    axes.set_xticks(places, [f"{checkpoint['step']:,}" for checkpoint in chosen])
    axes.set_ylim(0, 100)
    axes.set_xlabel("step (left bar: global, right bar: local preconditioning)")
    axes.set_ylabel(f"share of energy in %, {orientation} active")
    frame(axes)


def draw_gradient_norms(axes: Axes, runs: Sequence[Run]) -> None:
    """Global gradient norm before clipping: steps light, the moving average dark."""
    for run, (label, color, style) in zip(runs, styles(runs), strict=True):
        curve = {
            key: np.array(values, float) for key, values in run["gradient_norm"].items()
        }
        axes.plot(curve["steps"], curve["raw"], color=color, alpha=0.25, linewidth=0.5)
        axes.plot(
            curve["steps"],
            curve["smoothed"],
            style,
            color=color,
            linewidth=1.4,
            label=label,
            zorder=3,
        )
    axes.set_yscale("log")
    for formatted in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        formatted(
            FuncFormatter(
                lambda norm, _: f"{norm:g}" if f"{norm:e}"[0] in "1235" else ""
            )
        )
    axes.set_ylabel("gradient norm before clipping")


def draw_alignments(axes: Axes, runs: Sequence[Run]) -> None:
    """Mean cosine between gradient and direction, at the checkpoints."""
    for run, (label, color, style) in zip(runs, styles(runs), strict=True):
        steps = [checkpoint["step"] for checkpoint in run["checkpoints"]]
        values = np.array(
            [checkpoint["alignment"] for checkpoint in run["checkpoints"]], float
        )
        axes.plot(
            steps,
            values,
            style,
            color=color,
            marker="o",
            markersize=3,
            linewidth=1.2,
            label=label,
        )
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_ylabel("descent alignment (cosine)")


def draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    """Moving average of the training loss light, validation losses as points; the first
    tenth is cut off.
    """
    for run, (label, color, style) in zip(runs, styles(runs), strict=True):
        curve = {key: np.array(values, float) for key, values in run["losses"].items()}
        first = SHOWN_FROM_SHARE * run["steps"]
        train, validation = (
            curve["train_steps"] >= first,
            curve["validation_steps"] >= first,
        )
        smoothed = moving_average(curve["train"], SMOOTHED_STEPS)[train]
        axes.plot(
            curve["train_steps"][train], smoothed, color=color, alpha=0.4, linewidth=0.8
        )
        steps, losses = (
            curve["validation_steps"][validation],
            curve["validation"][validation],
        )
        axes.plot(
            steps,
            losses,
            style,
            color=color,
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            label=label,
            zorder=3,
        )
    axes.set_ylabel("loss (nats per token)")
