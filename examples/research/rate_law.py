# SPDX-License-Identifier: Apache-2.0
"""Fit a law for the learning rate of Hyperball, and test it where it was not fitted.

``python -m examples.research.rate_law --optimizer normpre_h`` reads the losses of
sweeps and fits ``lr = c S^-a B^b d^-w`` to the best learning rates: S steps, B tokens a
step, d width. Points that are held out take no part in the fit. The report shows what a
run loses there at the law's rate.
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

from examples.research import command, report

RESULTS = Path("docs/results/learning_rate")
HELD_OUT_BAR = 0.005  # nats above the best learning rate
FAR_STEPS, FAR_TOKENS, FAR_WIDTH = 10_000, 524_288, 768  # a run in earnest
BATCHES = (1_024, 4_096, 16_384, 65_536, FAR_TOKENS)  # lines of the picture
COLORS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#999999")


@dataclass(frozen=True)
class Options:
    """Fit a law for the learning rate."""

    optimizer: str = "normpre_h"  # Whose points are read.
    points: Path = RESULTS / "points.json"  # Losses of all sweeps.
    out: Path = RESULTS  # Folder for the report.


class Point(NamedTuple):
    """A setting, and the losses of its sweep.

    Attributes:
        steps: updates of the run.
        tokens: of a step.
        width: of the model.
        layers: of the model.
        held_out: whether the fit must not use it.
        source: the report that the losses are from.
        losses: validation losses of all seeds, by learning rate.
    """

    steps: int
    tokens: int
    width: int
    layers: int
    held_out: bool
    source: str
    losses: Mapping[float, Sequence[float]]


class Best(NamedTuple):
    """The lowest point of a parabola in the binary logarithm of the learning rate.

    Attributes:
        rate: the best learning rate.
        loss: validation loss there.
        curvature: nats that a factor of two costs.
        is_inside: whether learning rates on both sides of it were tried.
    """

    rate: float
    loss: float
    curvature: float
    is_inside: bool

    def above(self, rate: float) -> float:
        """Return the nats by which a learning rate is worse than the best."""
        return self.curvature * math.log2(rate / self.rate) ** 2


class Law(NamedTuple):
    """``lr = factor S^-steps B^tokens d^-width``."""

    factor: float
    steps: float
    tokens: float
    width: float

    def rate(self, steps: int, tokens: int, width: int) -> float:
        """Return the learning rate of a setting."""
        rate = self.factor * steps**-self.steps
        return rate * tokens**self.tokens * width**-self.width


# Measured by others under Hyperball (marin-community/marin #5951 and #6044), in all
# tokens T = S B: 0.286 T^-0.395 B^0.5 d^-0.15.
MARIN = Law(0.286, steps=0.395, tokens=0.5 - 0.395, width=0.15)
# Exponents of HyperP (arXiv 2603.28743), T^-0.32 B^0.5, without width. It publishes no
# factor, so it is drawn through this law at a point that was measured.
HYPERP_STEPS, HYPERP_TOKENS = 0.32, 0.5 - 0.32
KNOWN_POINT = (3_000, 4_096, 64)


def read_points(path: Path, optimizer: str) -> list[Point]:
    """Return the points of an optimizer, in the order of the file."""
    points = []
    for entry in json.loads(path.read_text()):
        if entry["optimizer"] != optimizer:
            continue
        fields: dict[str, Any] = {name: entry[name] for name in Point._fields}
        losses = {float(rate): found for rate, found in entry["losses"].items()}
        points.append(Point(**fields)._replace(losses=losses))
    return points


def best(losses: Mapping[float, Sequence[float]]) -> Best:
    """Return the best learning rate of a sweep.

    The parabola goes through the lowest mean and its neighbours. If the lowest is the
    first or last, it goes through the three nearest.

    Raises:
        ValueError: if there are fewer than three learning rates, or the parabola has no
            lowest point.
    """
    rates = sorted(losses)
    if len(rates) < 3:
        raise ValueError(f"a parabola needs three learning rates, not {rates}")
    means = [float(np.mean(losses[rate])) for rate in rates]
    lowest = int(np.argmin(means))
    middle = min(max(lowest, 1), len(rates) - 2)
    three = slice(middle - 1, middle + 2)
    x = np.log2(rates[three])
    curvature, slope, constant = np.polyfit(x, means[three], 2)
    if curvature <= 0:
        raise ValueError(f"losses {means} have no lowest point")
    at = -slope / (2 * curvature)
    loss = constant - slope**2 / (4 * curvature)
    is_inside = bool(x[0] < at < x[-1])
    return Best(float(2**at), float(loss), float(curvature), is_inside)


def fit(points: Sequence[Point], found: Sequence[Best]) -> Law:
    """Return the law of the points that are not held out, by least squares."""
    rows, targets = [], []
    for point, lowest in zip(points, found, strict=True):
        if not point.held_out:
            sizes = (point.steps, point.tokens, point.width)
            rows.append([1.0, *map(math.log, sizes)])
            targets.append(math.log(lowest.rate))
    solution, _, rank, _ = np.linalg.lstsq(np.array(rows), np.array(targets))
    if rank < 4:
        raise ValueError("the points do not vary steps, tokens and width independently")
    constant, steps, tokens, width = map(float, solution)
    return Law(math.exp(constant), -steps, tokens, -width)


class Row(NamedTuple):
    """A point beside the law: its best learning rate, and the law's."""

    point: Point
    best: Best
    rate: float

    @property
    def above(self) -> float:
        """Nats that the law's learning rate costs."""
        return self.best.above(self.rate)


def compare(points: Sequence[Point], found: Sequence[Best], law: Law) -> list[Row]:
    """Return every point beside the law."""
    rows = []
    for point, lowest in zip(points, found, strict=True):
        rate = law.rate(point.steps, point.tokens, point.width)
        rows.append(Row(point, lowest, rate))
    return rows


def hyperp(law: Law) -> Law:
    """Return the law with HyperP's exponents, through a point that was measured."""
    steps, tokens, width = KNOWN_POINT
    one = Law(1.0, HYPERP_STEPS, HYPERP_TOKENS, law.width)
    factor = law.rate(*KNOWN_POINT) / one.rate(steps, tokens, width)
    return one._replace(factor=factor)


def far_end(law: Law) -> dict[str, float]:
    """Return learning rates of a run in earnest, by whose law."""
    far = (FAR_STEPS, FAR_TOKENS, FAR_WIDTH)
    return {
        "this law": law.rate(*far),
        "Marin": MARIN.rate(*far),
        "HyperP's exponents": hyperp(law).rate(*far),
    }


def describe(law: Law) -> str:
    """Return the formula of a law."""
    return (
        f"`{law.factor:.3g} S^{-law.steps:.3f} B^{law.tokens:.3f} d^{-law.width:.3f}`"
    )


def table_of(rows: Sequence[Row]) -> str:
    """Return a line for every point, held-out ones last."""
    titles = (
        "steps",
        "tokens a step",
        "width",
        "layers",
        "seeds",
        "best rate",
        "law",
        "law / best",
        "nats above the best",
        "report",
    )
    lines = []
    for row in sorted(rows, key=lambda row: row.point.held_out):
        point = row.point
        steps = f"{point.steps:,}"
        if point.held_out:
            steps += ", held out"
        rate = f"{row.best.rate:.3g}"
        if not row.best.is_inside:
            rate += " (outside of the sweep)"
        cells = (
            steps,
            f"{point.tokens:,}",
            str(point.width),
            str(point.layers),
            str(max(map(len, point.losses.values()))),
            rate,
            f"{row.rate:.3g}",
            f"{row.rate / row.best.rate:.2f}",
            f"{row.above:.4f}",
            point.source,
        )
        lines.append(cells)
    return report.markdown_table(titles, lines)


def page(command_line: str, optimizer: str, law: Law, rows: Sequence[Row]) -> str:
    """Return the report."""
    held_out = [row.above for row in rows if row.point.held_out]
    ratios = [row.rate / row.best.rate for row in rows if not row.point.held_out]
    residual = float(np.std(np.log(ratios)))
    parts = [
        f"# The learning rate of {optimizer}\n",
        f"`{command_line}`. Fitted to {len(ratios)} settings: {describe(law)}, with S"
        f" steps, B tokens a step and width d; the residual is {100 * residual:.0f} %."
        "\n",
    ]
    if held_out:
        worst = max(held_out)
        parts.append(
            f"At {len(held_out)} held-out settings, the law's rate costs at most"
            f" {worst:.4f} nats (bar: {HELD_OUT_BAR}).\n"
        )
    parts.append(table_of(rows))
    parts.append(
        f"At {FAR_STEPS:,} steps of {FAR_TOKENS:,} tokens and width {FAR_WIDTH}:\n"
    )
    ends = far_end(law).items()
    lines = [(name, f"{rate:.4f}") for name, rate in ends]
    parts.append(report.markdown_table(("whose", "learning rate"), lines))
    return "\n".join(parts)


def draw(law: Law, rows: Sequence[Row]) -> Figure:
    """Return the picture: learning rate over steps, one line per batch, at width 64.

    Points of other widths are moved to it along the law. Points of other batches are
    in the table only.
    """
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    steps = np.geomspace(200, 24_000, 50)
    for tokens, color in zip(BATCHES, COLORS, strict=True):
        rates = [law.rate(int(s), tokens, 64) for s in steps]
        axes.plot(steps, rates, color=color, label=f"{tokens:,} tokens a step")
        for point, found, _ in rows:
            if point.tokens == tokens:
                to_64 = (point.width / 64) ** law.width
                marker = "o" if point.held_out else "s"
                fill = "none" if point.held_out else color
                axes.plot(
                    point.steps,
                    found.rate * to_64,
                    marker,
                    color=color,
                    markerfacecolor=fill,
                )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("steps")
    axes.set_ylabel("best learning rate, at width 64")
    axes.legend(frameon=False)
    axes.grid(alpha=0.3)
    return figure


def result_of(law: Law, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the numbers of the report."""
    settings = []
    for row in rows:
        entry = row.point._asdict() | {"best": row.best._asdict()}
        settings.append(entry | {"law": row.rate, "above": row.above})
    return {"law": law._asdict(), "far_end": far_end(law), "settings": settings}


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    program = "python -m examples.research.rate_law"
    options = tyro.cli(Options, prog=program, args=arguments)
    points = read_points(options.points, options.optimizer)
    found = [best(point.losses) for point in points]
    law = fit(points, found)
    rows = compare(points, found, law)
    line = report.command("rate_law", options)
    result = report.header(line, jax.devices()[0]) | result_of(law, rows)
    text = page(line, options.optimizer, law, rows)
    name = options.optimizer.split(",")[0]
    report.write(options.out, name, result, text, draw(law, rows))


if __name__ == "__main__":
    sys.exit(command.run(main))
