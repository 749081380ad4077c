# SPDX-License-Identifier: Apache-2.0
"""When the tangent stage pays: ``python -m examples.analysis.radial FILE.json ... --out FOLDER``.

Each ``FILE.json`` is the data of ``python -m examples.pretrain ablate radial`` at one width and number of steps. The
figure shows what every treatment of the radial part loses or gains over leaving it alone, and how long rows get.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from examples.analysis.ablation_report import CLEAR, Cell, cells, shade
from examples.analysis.comparison_report import frame, save

OPTIMIZER, ALONE = "normpre_g", "no tangent"


class Point(NamedTuple):
    """One treatment at one width and length."""

    width: int
    steps: int
    row: str
    cell: Cell
    over_alone: float
    error: float
    row_norm: float
    beyond_1: float


def points(contents: Sequence[dict[str, Any]]) -> list[Point]:
    """Of every file and row whose seeds came to their end, by width, steps and row.

    Raises:
        ValueError: where a file is no radial ablation, or lacks the row without tangent.
    """
    found = []
    for content in contents:
        here = cells(content, OPTIMIZER)
        if content["name"] != "radial" or ALONE not in here or not len(here[ALONE].losses):
            raise ValueError(f"{content['settings']}: no data of `ablate radial` with the row {ALONE!r}")
        for row, cell in here.items():
            arms = [a for a in content["arms"] if a["row"] == row and a["status"] == "finished"]
            if arms:
                last = [arm["row_norm"][-1] for arm in arms]
                error = (cell.error**2 + here[ALONE].error ** 2) ** 0.5
                norm, beyond = (sum(values) / len(last) for values in zip(*(entry[1:] for entry in last), strict=True))
                size = content["config"]["model.width"], content["config"]["steps"]
                found.append(Point(*size, row, cell, cell.mean - here[ALONE].mean, error, norm, beyond))
    return sorted(found, key=lambda p: p[:2])


def table(found: Sequence[Point]) -> str:
    """A line for every point."""
    lines = [
        "| width | steps | radial part | seeds | validation loss | - no tangent | row norm at the end | rows > 1 |",
        "|---" * 8 + "|",
    ]
    for p in found:
        over = "" if p.row == ALONE else f"{p.over_alone:+.4f}"
        if over and abs(p.over_alone) <= CLEAR * p.error:
            over += " (within the noise)"
        lines.append(
            f"| {p.width} | {p.steps:,} | {p.row} | {len(p.cell.losses)} | {p.cell.mean:.4f} | {over} | "
            f"{p.row_norm:.2f} | {p.beyond_1:.0%} |"
        )
    return "\n".join(lines) + "\n"


def draw(found: Sequence[Point]) -> Figure:
    """Loss over the row without tangent, by width and by steps; row norms at the end by width."""
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    usual = max({p.steps for p in found}, key=lambda steps: len({p.width for p in found if p.steps == steps}))
    narrow = max({p.width for p in found}, key=lambda width: len({p.steps for p in found if p.width == width}))
    by_width = [p for p in found if p.steps == usual]
    by_steps = [p for p in found if p.width == narrow]
    left, middle, right = figure.subplots(1, 3)
    _lines(left, by_width, "width", "over_alone")
    left.set(xlabel=f"width ({usual:,} steps)", ylabel="loss less that without tangent (nats)")
    _lines(middle, by_steps, "steps", "over_alone")
    middle.set(xlabel=f"steps (width {narrow})", ylabel="loss less that without tangent (nats)")
    _lines(right, by_width, "width", "row_norm")
    right.set(xlabel=f"width ({usual:,} steps)", ylabel="mean row norm at the end")
    for axes in (left, middle):
        axes.axhline(0, color="0.6", linewidth=0.8, linestyle="--")
    for axes in (left, middle):
        axes.get_legend().remove()  # pyright: ignore[reportOptionalMemberAccess]
    return figure


def _lines(axes: Axes, found: Sequence[Point], across: str, up: str) -> None:
    rows = list(dict.fromkeys(p.row for p in found))
    for i, row in enumerate(rows):
        mine = [p for p in found if p.row == row]
        x, y = [getattr(p, across) for p in mine], [getattr(p, up) for p in mine]
        error = [0.0 if p.error != p.error else p.error for p in mine] if up == "over_alone" else None
        colour = shade(i / max(len(rows) - 1, 1))
        axes.errorbar(x, y, error, color=colour, marker="o", markersize=4, linewidth=1.2, capsize=2, label=row)
    ticks = sorted({getattr(p, across) for p in found})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    frame(axes)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.analysis.radial", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="data of radial ablations")
    parser.add_argument("--out", type=Path, default=Path("docs/results/radial"), help="folder for table and figure")
    chosen = parser.parse_args(arguments)
    try:
        contents = [json.loads(file.read_text()) for file in chosen.files]
        found = points(contents)
    except (KeyError, TypeError) as error:
        print(f"error: one of the files is no ablation's data: {error!r}", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.out.mkdir(parents=True, exist_ok=True)
    save(draw(found), chosen.out / "radial")
    commands = "".join(f"- `{content['command']}`, {content['date']}\n" for content in contents)
    text = (
        "# The radial part of the momentum, by width and steps\n\n"
        "NormPre-G at one learning rate; validation loss in nats per token. The factor of the radial part is "
        "1 - (norm / radius)^2 of every row; bounded stops it at zero.\n\n"
        f"{table(found)}\n![The radial part](radial.png)\n\n{commands}"
    )
    (chosen.out / "README.md").write_text(text)
    print(table(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
