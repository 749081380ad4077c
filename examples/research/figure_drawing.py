# SPDX-License-Identifier: Apache-2.0
"""The paper's figures drawn from the numbers of ``figure_data``.

They have one panel a run, or one curve a run.
"""

import functools
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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

STEPS_MAP = matplotlib.colormaps["viridis"]  # in order for the color-blind, too
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


class Style(NamedTuple):
    """How the curves of a run look."""

    label: str
    color: str
    line: str


def draw(folder: Path, runs: Sequence[Run]) -> list[str]:
    """All figures as PNG; returns their names."""
    names = []
    for kind, paint in (("spectra", draw_spectra), ("energy", draw_energies)):
        for orientation in ("rows", "columns"):
            names.append(f"{kind}_{orientation}")
            draw_run = functools.partial(paint, orientation=orientation)
            save(panelled(runs, draw_run), folder / names[-1])
    curves = (draw_gradient_norms, draw_alignments, draw_losses)
    for name, paint in zip(LINES, curves, strict=True):
        figure = Figure(figsize=(6.0, 3.4), layout="constrained")
        axes = figure.add_subplot()
        paint(axes, runs)
        over_steps(axes)
        frame(axes)
        save(figure, folder / name)
    return [*names, *LINES]


def panelled(runs: Sequence[Run], paint: Callable[[Axes, Run], None]) -> Figure:
    """A panel for every run, two beside each other, named if there are several."""
    across = min(len(runs), 2)
    down = math.ceil(len(runs) / across)
    width, height = 4.6, 2.8
    if len(runs) == 1:
        width, height = 6.0, 3.4
    figure = Figure(figsize=(width * across, height * down), layout="constrained")
    panels = zip(runs, styles(runs), strict=True)
    for place, (run, style) in enumerate(panels, 1):
        axes = figure.add_subplot(down, across, place)
        paint(axes, run)
        if len(runs) > 1:
            axes.set_title(style.label, fontsize=9)
    return figure


def styles(runs: Sequence[Run]) -> list[Style]:
    """Label, color and line style of every run.

    They are its optimizer's, with the run's own name where several have one optimizer.
    """
    optimizers = [run["optimizer"] for run in runs]
    found = []
    for place, run in enumerate(runs):
        optimizer = run["optimizer"]
        label, color = NAMES[optimizer]
        if optimizers.count(optimizer) > 1:
            label = f"{label}, {run['name']}"
        before = optimizers[:place].count(optimizer)
        found.append(Style(label, color, LINE_STYLES[before % len(LINE_STYLES)]))
    return found


def shown_checkpoints(run: Run) -> list[dict[str, Any]]:
    """The checkpoints whose spectra and energies are drawn."""
    return [found for found in run["checkpoints"] if found["step"] in run["shown"]]


def draw_spectra(axes: Axes, run: Run, orientation: str) -> None:
    """Eigenvalues by rank: mean and quartiles over matrices, a color for every step."""
    chosen = shown_checkpoints(run)
    for place, checkpoint in enumerate(chosen):
        color = STEPS_MAP(STEPS_MAP_END * place / max(len(chosen) - 1, 1))
        spectra = checkpoint[orientation]
        label = f"step {checkpoint['step']:,}"
        draw_spectrum(axes, spectra["before"], "-", color, label)
        draw_spectrum(axes, spectra["after"], ":", color, None)
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


def draw_spectrum(
    axes: Axes, spectrum: dict[str, list], line: str, color: Any, label: str | None
) -> None:
    """One curve with its quartiles as a band."""
    values = {key: np.array(part, float) for key, part in spectrum.items()}
    ranks = np.arange(1, len(values["mean"]) + 1)
    axes.fill_between(
        ranks, values["low"], values["high"], color=color, alpha=0.1, linewidth=0
    )
    axes.plot(ranks, values["mean"], line, color=color, linewidth=1.2, label=label)


def draw_energies(axes: Axes, run: Run, orientation: str) -> None:
    """Two bars a checkpoint, of the modes that are changed.

    On the left what global preconditioning changes, on the right what local
    preconditioning does.
    """
    chosen = shown_checkpoints(run)
    rank = str(run["ranks"][0])
    energies = [checkpoint[orientation]["energies"][rank] for checkpoint in chosen]
    places = np.arange(len(chosen))
    below = np.zeros(len(chosen))
    for part, (label, color, hatch) in ENERGIES.items():
        heights = 100 * np.array([shares[part] for shares in energies], float)
        style = {
            "width": 0.36,
            "color": color,
            "hatch": hatch,
            "edgecolor": "white",
            "linewidth": 0,
        }
        named = label.format(rank=rank)
        axes.bar(places - 0.2, heights, bottom=below, label=named, **style)
        if part == "top":
            axes.bar(places + 0.2, heights, **style)
        below += heights
    axes.set_xticks(places, [f"{checkpoint['step']:,}" for checkpoint in chosen])
    axes.set_ylim(0, 100)
    axes.set_xlabel("step (left bar: global, right bar: local preconditioning)")
    axes.set_ylabel(f"share of energy in %, {orientation} active")
    frame(axes)


def draw_gradient_norms(axes: Axes, runs: Sequence[Run]) -> None:
    """Global gradient norm before clipping: steps light, the moving average dark."""
    for run, style in zip(runs, styles(runs), strict=True):
        curve = arrays(run["gradient_norm"])
        axes.plot(
            curve["steps"], curve["raw"], color=style.color, alpha=0.25, linewidth=0.5
        )
        axes.plot(
            curve["steps"],
            curve["smoothed"],
            style.line,
            color=style.color,
            linewidth=1.4,
            label=style.label,
            zorder=3,
        )
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FuncFormatter(sparse_norm))
    axes.yaxis.set_minor_formatter(FuncFormatter(sparse_norm))
    axes.set_ylabel("gradient norm before clipping")


def arrays(curve: dict[str, list]) -> dict[str, np.ndarray]:
    """Values of a curve; None becomes NaN."""
    return {key: np.array(values, float) for key, values in curve.items()}


def sparse_norm(norm: float, _: Any) -> str:
    """The label of a tick on a logarithmic axis; nothing where labels would touch."""
    if f"{norm:e}"[0] in "1235":
        return f"{norm:g}"
    return ""


def draw_alignments(axes: Axes, runs: Sequence[Run]) -> None:
    """Mean cosine between gradient and direction, at the checkpoints."""
    for run, style in zip(runs, styles(runs), strict=True):
        steps = [checkpoint["step"] for checkpoint in run["checkpoints"]]
        values = [checkpoint["alignment"] for checkpoint in run["checkpoints"]]
        axes.plot(
            steps,
            np.array(values, float),
            style.line,
            color=style.color,
            marker="o",
            markersize=3,
            linewidth=1.2,
            label=style.label,
        )
    axes.axhline(0, color="0.6", linewidth=0.8)
    axes.set_ylabel("descent alignment (cosine)")


def draw_losses(axes: Axes, runs: Sequence[Run]) -> None:
    """Moving average of the training loss light, validation losses as points.

    The first tenth of the steps is cut off.
    """
    for run, style in zip(runs, styles(runs), strict=True):
        curve = arrays(run["losses"])
        first = SHOWN_FROM_SHARE * run["steps"]
        shown = curve["train_steps"] >= first
        smoothed = moving_average(curve["train"], SMOOTHED_STEPS)
        axes.plot(
            curve["train_steps"][shown],
            smoothed[shown],
            color=style.color,
            alpha=0.4,
            linewidth=0.8,
        )
        shown = curve["validation_steps"] >= first
        axes.plot(
            curve["validation_steps"][shown],
            curve["validation"][shown],
            style.line,
            color=style.color,
            marker="o",
            markersize=3.5,
            linewidth=1.2,
            label=style.label,
            zorder=3,
        )
    axes.set_ylabel("loss (nats per token)")
