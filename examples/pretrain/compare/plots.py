# SPDX-License-Identifier: Apache-2.0
"""The figures of a report."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter

from .results import (
    NAMES,
    Content,
    Run,
    base_name,
    best_runs,
    curves,
    label,
    learning_rate_of,
    loss_of,
    mean_loss,
    optimizers,
    paired,
    step_of,
    swept_and_finished,
)

LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "os^Dv"
OTHER_COLOR = "#BBBBBB"
SHOWN_FROM_SHARE = 0.1  # all runs look alike in the first tenth of the steps


def style(optimizer: str, content: Content) -> dict[str, Any]:
    """Label, color, line and marker of an optimizer.

    Line and marker distinguish settings of one optimizer.
    """
    base = base_name(optimizer)
    settings = [name for name in optimizers(content) if base_name(name) == base]
    turn, line = divmod(settings.index(optimizer), len(LINE_STYLES))
    _, color = NAMES.get(base, ("", OTHER_COLOR))
    return {
        "label": label(optimizer),
        "color": color,
        "linestyle": LINE_STYLES[line],
        "marker": MARKERS[turn % len(MARKERS)],
        "markersize": 4,
    }


def paint_losses(axes: Axes, content: Content) -> bool:
    """Validation loss over steps at the best learning rates, and training loss.

    Returns:
        Whether there is something to see.
    """
    runs = best_runs(content)
    for name, arms in runs.items():
        validation = curves(arms, "validation")
        training = curves(arms, "train").mean(0)
        if not (validation.size and training.size):  # the log of an arm was damaged
            return False
        paint_curves(axes, validation, training, style(name, content))
    if len(runs) > 1:
        two_best = sorted(runs.values(), key=mean_loss)[:2]
        best, next_best = paired(*two_best)
        paint_steps_saved(axes, best, next_best, content["config"]["steps"])
    over_steps(axes)
    axes.set_ylabel("loss (nats per token)")
    return bool(runs)


def paint_curves(
    axes: Axes, validation: np.ndarray, training: np.ndarray, look: dict[str, Any]
) -> None:
    """Losses of one optimizer, from the first evaluation after a tenth of the steps.

    Args:
        axes: where to draw.
        validation: steps and losses, (seeds, points, 2); the line is their mean, the
            band their range.
        training: steps and mean losses, (points, 2), a thin line.
        look: from ``style``.
    """
    steps = validation[0, :, 0]
    shown = steps >= SHOWN_FROM_SHARE * training[-1, 0]
    begin = steps[shown].min()
    validation = validation[:, steps >= begin]
    training = training[training[:, 0] >= begin]
    axes.plot(*training.T, color=look["color"], alpha=0.4, linewidth=0.8)
    axes.plot(*validation.mean(0).T, **look)
    losses = validation[:, :, 1]
    axes.fill_between(
        validation[0, :, 0],
        losses.min(0),
        losses.max(0),
        color=look["color"],
        alpha=0.2,
        linewidth=0,
    )


def paint_steps_saved(
    axes: Axes, best: Sequence[Run], next_best: Sequence[Run], last: int
) -> None:
    """A line from where the best optimizer has the next best's loss to the end."""
    if not best:
        return
    loss = mean_loss(next_best)
    step = step_of(loss, best)
    if math.isnan(step):
        return
    axes.plot(
        [step, last],
        [loss, loss],
        "|-",
        color="0.3",
        linewidth=0.8,
        label=f"{1 - step / last:.0%} fewer steps than the next best",
    )


def paint_learning_rates(axes: Axes, content: Content) -> bool:
    """Best validation loss by learning rate at the first seed.

    Returns:
        Whether there is something to see: an optimizer with two learning rates.
    """
    found: list[np.ndarray] = []
    for name in optimizers(content):
        arms = swept_and_finished(content, name)
        if arms:
            points = np.array([(learning_rate_of(arm), loss_of(arm)) for arm in arms])
            axes.plot(*points.T, **style(name, content))
            found.append(points)
    if max(map(len, found), default=0) < 2:
        return False
    axes.set_ylim(*loss_limits([points[:, 1] for points in found]))
    axes.set(
        xscale="log",
        xlabel="peak learning rate",
        ylabel="validation loss (nats per token)",
    )
    rates = sorted({arm["learning_rate"] for arm in content["arms"]})
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    return True


def loss_limits(losses: Sequence[np.ndarray]) -> tuple[float, float]:
    """Ends of an axis that shows every optimizer's best, and not far above."""
    optima = [found.min() for found in losses]
    worst = max(found.max() for found in losses)
    span = max(max(optima) - min(optima), 0.05)
    bottom = min(optima) - 0.05 * span
    top = min(worst + 0.05 * span, max(optima) + 0.3 * span)
    return bottom, top


def over_steps(axes: Axes) -> None:
    """An axis of steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def frame(axes: Axes, legend: str = "beside") -> None:
    """Few lines, and a legend without a box.

    The legend is ``beside`` the axes, or ``below`` the figure if labels are long.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    _, labels = axes.get_legend_handles_labels()
    if labels and legend == "beside":
        axes.legend(
            fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    elif labels:
        legend_below(axes)


def legend_below(axes: Axes) -> None:
    """Add a legend below the figure, which grows by its rows."""
    handles, labels = axes.get_legend_handles_labels()
    figure = axes.figure
    assert isinstance(figure, Figure)
    # About 96 characters of this size fit into a line; a handle has the width of 6.
    longest = max(map(len, labels))
    columns = max(1, min(4, 96 // (longest + 6)))
    figure.legend(
        handles,
        labels,
        fontsize=8,
        frameon=False,
        loc="outside lower center",
        ncols=columns,
    )
    figure.set_figheight(3.6 + 0.18 * math.ceil(len(labels) / columns))


def save(figure: Figure, file: Path) -> None:
    """Write the figure as a PNG; the same figure gives the same bytes."""
    figure.savefig(file.with_suffix(".png"), dpi=150)
