# SPDX-License-Identifier: Apache-2.0
"""The picture of README: validation loss over steps with ten million parameters.

``python -m examples.research.front_picture`` draws it from the data of the report
``docs/results/decision/ten_million``. Every line is the mean of the seeds at the best
learning rate that was tried.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "results" / "decision" / "ten_million" / "comparison.json"
PICTURE = DOCS / "pictures" / "ten_million.svg"
FIRST_STEP = 100  # before, all losses fall steeply


class Line(NamedTuple):
    """A line of the picture: which arms, and what stands beside it."""

    optimizer: str  # How the names of its arms begin.
    learning_rate: float
    text: str
    color: str


LINES = (
    Line("adamw", 2e-3, "AdamW", "#8a8a8a"),
    Line("muon", 2e-2, "Muon with fixed norms (Hyperball)", "#1f5fa8"),
    Line("normpre_h", 2e-2, "normpre_h", "#b5541c"),
)


def curve(arms: Sequence[dict[str, Any]], line: Line) -> np.ndarray:
    """The mean validation loss over the seeds.

    Args:
        arms: those of the report.
        line: which of them.

    Returns:
        (evaluations, 2): step and loss.

    Raises:
        ValueError: if the report has no such arm.

    Example:
        >>> arm = {"optimizer": "adamw", "learning_rate": 1.0, "validation": [[5, 2.0]]}
        >>> curve([arm], Line("adamw", 1.0, "", "")).tolist()
        [[5.0, 2.0]]
    """
    curves = []
    for arm in arms:
        is_optimizer = arm["optimizer"].startswith(line.optimizer)
        if is_optimizer and arm["learning_rate"] == line.learning_rate:
            curves.append(arm["validation"])
    if not curves:
        raise ValueError(f"the report has no {line.optimizer} at {line.learning_rate}")
    return np.mean(curves, axis=0)


def step_of(points: np.ndarray, loss: float) -> float:
    """The first step at which a curve has a loss, linearly between evaluations.

    Example:
        >>> step_of(np.array([[10, 3.0], [20, 2.0]]), 2.5)
        15.0
    """
    steps, losses = points.T
    # np.interp wants increasing losses.
    return float(np.interp(-loss, -losses, steps))


def draw(arms: Sequence[dict[str, Any]]) -> Figure:
    """The picture, with the steps that ``normpre_h`` saves."""
    figure = Figure(figsize=(7, 3.8), layout="constrained")
    axes = figure.subplots()
    curves = [curve(arms, line) for line in LINES]
    for points, line in zip(curves, LINES, strict=True):
        shown = points[points[:, 0] >= FIRST_STEP]
        axes.plot(*shown.T, color=line.color, linewidth=2)
    _, of_muon, of_ours = curves
    last_step, target = of_muon[-1]
    reached = step_of(of_ours, target)
    axes.annotate(
        "",
        xy=(reached, target),
        xytext=(last_step, target),
        arrowprops={"arrowstyle": "-|>", "color": "black", "shrinkA": 0, "shrinkB": 0},
    )
    places = ((600, 4.0), (575, 3.27), (300, 3.2))
    for line, place in zip(LINES, places, strict=True):
        axes.text(*place, line.text, color=line.color)
    axes.text(
        last_step,
        target - 0.14,
        f"the same loss\n{last_step - reached:.0f} steps earlier",
        ha="right",
        va="top",
    )
    axes.set_ylim(2.2, 5.2)
    axes.set_xlabel("step")
    axes.set_ylabel("validation loss, nats per token")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    """The command line."""
    arms = json.loads(DATA.read_text())["arms"]
    with plt.rc_context({"svg.hashsalt": "normpre_optax"}):
        draw(arms).savefig(PICTURE, facecolor="white", metadata={"Date": None})
    print(PICTURE)


if __name__ == "__main__":
    main()
