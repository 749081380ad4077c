# SPDX-License-Identifier: Apache-2.0
"""When the tangent stage pays: ``python -m examples.analysis.radial FILE.json ... --out FOLDER``.

Each ``FILE.json`` is the data of ``python -m examples.pretrain ablate radial`` under other settings: another width,
number of steps, learning rate or initial row length. The figure shows what every treatment of the radial part loses or
gains over leaving it alone, and how long rows get.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from examples.analysis.ablation_report import CLEAR, Cell, cells, finished_arms, read, shade
from examples.analysis.comparison_report import frame, save
from examples.pretrain.config import ModelConfig

OPTIMIZER, ALONE = "normpre_g", "no tangent"
HIDDEN_STD = ModelConfig().hidden_std


class Setting(NamedTuple):
    """What may differ from file to file."""

    width: int
    steps: int
    learning_rate: float
    hidden_std: float


class Point(NamedTuple):
    """One treatment under one setting; row norms are means over the hidden matrices' rows and the seeds."""

    setting: Setting
    row: str
    cell: Cell
    over_alone: float
    error: float
    start_norm: float
    row_norm: float
    beyond_1: float


# What the panels show across, and the field of ``Setting`` that stands behind it.
ACROSS: dict[str, tuple[str, Callable[[Point], float]]] = {
    "width": ("width", lambda p: p.setting.width),
    "steps": ("steps", lambda p: p.setting.steps),
    "learning_rate": ("learning rate", lambda p: p.setting.learning_rate),
    "hidden_std": ("mean row norm at the start", lambda p: p.start_norm),
}


def points(contents: Sequence[dict[str, Any]]) -> list[Point]:
    """Of every file and row whose seeds came to their end, by setting and row.

    Raises:
        ValueError: where a file is no radial ablation, lacks the row without tangent, or has another's setting.
    """
    found = []
    for content in contents:
        here = cells(content, OPTIMIZER)
        if content["name"] != "radial" or ALONE not in here or not len(here[ALONE].losses):
            raise ValueError(f"{content['settings']}: no data of `ablate radial` with the row {ALONE!r}")
        config = content["config"]
        setting = Setting(
            config["model.width"],
            config["steps"],
            config["learning_rate"],
            config.get("model.hidden_std", HIDDEN_STD),  # data that is older than the field
        )
        if any(point.setting == setting for point in found):
            raise ValueError(f"{content['settings']}: data of the same {setting} is among the files already")
        for row, cell in here.items():
            arms = finished_arms(content, row, OPTIMIZER)
            if arms:
                ends = [(arm["row_norm"][0][1], *arm["row_norm"][-1][1:]) for arm in arms]
                norms = [sum(values) / len(ends) for values in zip(*ends, strict=True)]
                error = 0.0 if row == ALONE else math.hypot(cell.error, here[ALONE].error)
                found.append(Point(setting, row, cell, cell.mean - here[ALONE].mean, error, *norms))
    return sorted(found, key=lambda p: p.setting)


def table(found: Sequence[Point]) -> str:
    """A line for every point."""
    lines = [
        "| width | steps | learning rate | row norm at the start | radial part | seeds | validation loss "
        "| - no tangent | row norm at the end | rows > 1 |",
        "|---" * 10 + "|",
    ]
    for p in found:
        over = "" if p.row == ALONE else f"{p.over_alone:+.4f}"
        if over and abs(p.over_alone) <= CLEAR * p.error:
            over += " (within the noise)"
        lines.append(
            f"| {p.setting.width} | {p.setting.steps:,} | {p.setting.learning_rate:g} | {p.start_norm:.2f} | {p.row} | "
            f"{len(p.cell.losses)} | {p.cell.mean:.4f} | {over} | {p.row_norm:.2f} | {p.beyond_1:.0%} |"
        )
    return "\n".join(lines) + "\n"


def usual(found: Sequence[Point]) -> Setting:
    """The commonest value of every field, the smaller of equally common ones."""
    settings = sorted({p.setting for p in found})
    return Setting(*(min(statistics.multimode(values)) for values in zip(*settings, strict=True)))


def draw(found: Sequence[Point]) -> Figure:
    """Loss over the row without tangent along every field that varies by itself; row norms at the end by width."""
    base = usual(found)
    panels = {
        field: [p for p in found if p.setting._replace(**{field: getattr(base, field)}) == base] for field in ACROSS
    }
    panels = {field: mine for field, mine in panels.items() if len({p.setting for p in mine}) > 1}
    figure = Figure(figsize=(1.0 + 3.4 * (len(panels) + 1), 3.2), layout="constrained")
    axes = list(np.atleast_1d(np.asarray(figure.subplots(1, len(panels) + 1))))
    rows = list(dict.fromkeys(p.row for p in found))
    for panel, (field, mine) in zip(axes, panels.items(), strict=False):
        label, across = ACROSS[field]
        _lines(panel, mine, rows, across, lambda p: (p.over_alone, p.error))
        panel.axhline(0, color="0.6", linewidth=0.8, linestyle="--")
        panel.set(xlabel=label, ylabel="loss less that without tangent (nats)")
        panel.get_legend().remove()
    field = next(iter(panels), "width")
    label, across = ACROSS[field]
    _lines(axes[-1], panels.get(field, found), rows, across, lambda p: (p.row_norm, 0.0))
    axes[-1].set(xlabel=label, ylabel="mean row norm at the end")
    return figure


def _lines(
    axes: Axes,
    found: Sequence[Point],
    rows: Sequence[str],
    across: Callable[[Point], float],
    up: Callable[[Point], tuple[float, float]],
) -> None:
    """A line for every row; ``up`` gives height and error, which is NaN for single seeds."""
    for i, row in enumerate(rows):
        mine = [p for p in found if p.row == row]
        y, error = [up(p)[0] for p in mine], [0.0 if math.isnan(up(p)[1]) else up(p)[1] for p in mine]
        colour = shade(i / max(len(rows) - 1, 1))
        x = [across(p) for p in mine]
        axes.errorbar(x, y, error, color=colour, marker="o", markersize=4, linewidth=1.2, capsize=2, label=row)
    ticks = sorted({float(f"{across(p):.3g}") for p in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,.6g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    frame(axes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.analysis.radial", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="data of radial ablations")
    parser.add_argument("--out", type=Path, default=Path("docs/results/radial"), help="folder for table and figure")
    chosen = parser.parse_args(arguments)
    try:
        contents, found = read(chosen.files, points)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.out.mkdir(parents=True, exist_ok=True)
    save(draw(found), chosen.out / "radial")
    commands = "".join(f"- `{content['command']}`, {content['date']}\n" for content in contents)
    text = (
        "# The radial part of the momentum, by width, length of training and length of rows\n\n"
        "NormPre-G; validation loss in nats per token. The factor of the radial part is "
        "1 - (norm / radius)^2 of every row; bounded stops it at zero.\n\n"
        f"{table(found)}\n![The radial part](radial.png)\n\n{commands}"
    )
    (chosen.out / "README.md").write_text(text)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
