# SPDX-License-Identifier: Apache-2.0
"""Table, figure and page of an ablation, from the data that
``examples.research.ablate`` writes.
"""

import itertools
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.pretrain.compare.plots import frame, save
from examples.pretrain.compare.results import NAMES
from examples.pretrain.compare.tables import setting
from examples.research.report import markdown_table, panels

# Two means count as different where they are this many standard errors of their
# difference apart.
CLEAR = 2.0


class Cell(NamedTuple):
    """Best validation losses of one variant's seeds."""

    losses: np.ndarray
    lost: int

    @property
    def mean(self) -> float:
        """NaN where no seed came to its end."""
        return float(self.losses.mean()) if len(self.losses) else math.nan

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for fewer than two seeds."""
        return (
            float(self.losses.std(ddof=1) / math.sqrt(len(self.losses)))
            if len(self.losses) > 1
            else math.nan
        )


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write the ablation's data, figure (PNG) and page into ``folder``; returns the
    table.
    """
    name = content["name"]
    (folder / f"{name}.json").write_text(json.dumps(content) + "\n")
    save(draw(content), folder / name)
    shown = table(content)
    (folder / f"{name}.md").write_text(page(content, shown))
    return shown


def cells(content: dict[str, Any], optimizer: str) -> dict[str, Cell]:
    """Cells of an optimizer's column, by row."""
    found: dict[str, Cell] = {}
    for row in content["rows"]:
        arms = [
            arm
            for arm in content["arms"]
            if (arm["row"], arm["optimizer"]) == (row, optimizer)
        ]
        losses = [
            arm["best_validation_loss"] for arm in arms if arm["status"] == "finished"
        ]
        found[row] = Cell(np.array(losses), len(arms) - len(losses))
    return found


def table(content: dict[str, Any]) -> str:
    """Losses by row, each with its difference to the published row, in our runs and in
    the paper.
    """
    axis, paper, names, published = (
        content["axis"],
        content["paper"],
        content.get("paper_rows"),
        content["published"],
    )
    head, rows = (
        [axis or "setting"],
        {row: [f"**{row}**" if row == published else row] for row in content["rows"]},
    )
    for place, optimizer in enumerate(content["optimizers"]):
        head += [NAMES[optimizer][0], "- published"]
        head += [f"paper's {axis}"] * bool(names) + ["paper", "- published"] * bool(
            paper
        )
        head += ["optimizer, ms"] * bool(content["cost"])
        ours = cells(content, optimizer)
        for row, entries in rows.items():
            entries += [
                _loss(ours[row]),
                _difference(ours[row].mean, ours[published].mean),
            ]
            if paper:
                entries += (
                    [names.get(row, row if row in paper else "")] if names else []
                )
                theirs = paper[row][place] if row in paper else math.nan
                entries += [
                    _number(theirs),
                    _difference(theirs, paper[published][place]),
                ]
            if content["cost"]:
                entries.append(f"{content['cost'][f'{row}/{optimizer}']:.2f}")
    return markdown_table(head, rows.values())


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _difference(value: float, other: float) -> str:
    return (
        ""
        if math.isnan(value - other) or value == other
        else f"{round(value - other, 4) + 0.0:+.4f}"
    )


def _loss(cell: Cell) -> str:
    shown = _number(cell.mean)
    shown += f" ± {cell.losses.std(ddof=1):.4f}" if len(cell.losses) > 1 else ""
    return shown + (f" ({cell.lost} lost)" if cell.lost else "")


def verdicts(content: dict[str, Any]) -> list[str]:
    """For every pair of rows that the paper has: the same order in our runs or not, and
    how clearly.
    """
    found = []
    for place, optimizer in enumerate(content["optimizers"]):
        ours, paper, told = cells(content, optimizer), content["paper"], []
        rows = [
            row
            for row in content["rows"]
            if row in paper and not math.isnan(ours[row].mean)
        ]
        for a, b in itertools.combinations(rows, 2):
            difference, theirs = (
                ours[a].mean - ours[b].mean,
                paper[a][place] - paper[b][place],
            )
            error = math.hypot(ours[a].error, ours[b].error)
            clear = "clear" if abs(difference) > CLEAR * error else "within the noise"
            clear = "one seed each" if math.isnan(error) else clear
            order = (
                "as in the paper"
                if (difference > 0) == (theirs > 0)
                else "other than in the paper"
            )
            told.append(
                f"{a} - {b} {difference:+.4f} ({clear}), the paper {theirs:+.4f}:"
                f" {order}"
            )
        same = sum(text.endswith("as in the paper") for text in told)
        if told:
            pairs = (
                f"{NAMES[optimizer][0]}: {same} of {len(told)} pairs in the paper's"
                " order. "
            )
            found.append(f"{pairs}{'; '.join(told)}.")
    return found


def page(content: dict[str, Any], shown: str) -> str:
    """The ablation as Markdown."""
    seeds, rate = (
        len({arm["seed"] for arm in content["arms"]}),
        content["config"]["learning_rate"],
    )
    parts = [
        f"# {content['title']}: {content['settings']}\n",
        setting(content),
        f"Best validation loss in nats per token, mean over {seeds} seed(s) and sample"
        f" standard deviation, at learning rate {rate:g}; bold: as published."
        + (
            " The paper's is GPT-2 Small on OpenWebText, one seed."
            if content["paper"]
            else ""
        )
        + "\n",
        shown,
        "".join(f"- {verdict}\n" for verdict in verdicts(content)),
        f"![{content['title']}]({content['name']}.png)\n",
    ]
    return "\n".join(part for part in parts if part)


def draw(content: dict[str, Any]) -> Figure:
    """Losses by row; the paper's beside them; loss over the optimizer's time, or row
    norms, where they matter.
    """
    paint = [draw_losses]
    paint += [draw_paper] if content["paper"] else []
    paint += [draw_frontier] if content["cost"] else []
    paint += [draw_row_norms] if content["name"] == "tangent" else []
    figure, axes = panels(len(paint), 1.0 + 3.6 * len(paint), 3.2)
    for one, draw_one in zip(axes, paint, strict=True):
        draw_one(one, content)
        one.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, content: dict[str, Any]) -> None:
    """Every seed a dot, their mean a line."""
    for optimizer in content["optimizers"]:
        ours = cells(content, optimizer)
        _line(
            axes, content, optimizer, {row: ours[row].mean for row in content["rows"]}
        )
        for place, row in zip(_places(content), content["rows"], strict=True):
            axes.plot(
                [place] * len(ours[row].losses),
                ours[row].losses,
                ".",
                color=NAMES[optimizer][1],
                alpha=0.5,
            )
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("our runs", fontsize=9)
    _rows_below(axes, content, {})


def draw_paper(axes: Axes, content: dict[str, Any]) -> None:
    """The paper's losses."""
    for place, optimizer in enumerate(content["optimizers"]):
        _line(
            axes,
            content,
            optimizer,
            {row: losses[place] for row, losses in content["paper"].items()},
        )
    axes.set_title("the paper, GPT-2 Small", fontsize=9)
    _rows_below(axes, content, content.get("paper_rows", {}))


def draw_frontier(axes: Axes, content: dict[str, Any]) -> None:
    """Loss over what the optimizer costs."""
    for optimizer in content["optimizers"]:
        _, color = NAMES[optimizer]
        costs = {row: content["cost"][f"{row}/{optimizer}"] for row in content["rows"]}
        here = cells(content, optimizer)
        for place, (row, cost) in enumerate(
            sorted(costs.items(), key=lambda item: item[1])
        ):
            cell = here[row]
            height = (4, -10)[place % 2]  # names of neighbors above and below
            axes.errorbar(
                cost,
                cell.mean,
                cell.error,
                color=color,
                marker="o",
                markersize=4,
                capsize=2,
            )
            axes.annotate(
                row,
                (cost, cell.mean),
                xytext=(4, height),
                textcoords="offset points",
                fontsize=7,
            )
    axes.set_xlabel("optimizer, ms a step")
    axes.set_ylabel("validation loss (nats per token)")
    axes.margins(x=0.15)
    frame(axes)


def draw_row_norms(axes: Axes, content: dict[str, Any]) -> None:
    """Mean norm of hidden rows along training, of the first optimizer, seed 0."""
    optimizer = content["optimizers"][0]
    # In order for the color-blind, too.
    shades = colormaps["cividis"](np.linspace(0, 0.9, len(content["rows"])))
    for row, shade in zip(content["rows"], shades, strict=True):
        for arm in content["arms"]:
            if (arm["row"], arm["optimizer"], arm["seed"], arm["status"]) == (
                row,
                optimizer,
                0,
                "finished",
            ):
                steps, norms, _ = zip(*arm["row_norm"], strict=True)
                axes.plot(
                    steps,
                    norms,
                    color=shade,
                    marker="o",
                    markersize=2.5,
                    linewidth=1.2,
                    label=row,
                )
    axes.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
    axes.set(xlabel="step", ylabel="mean row norm of hidden matrices")
    axes.set_title(NAMES[optimizer][0], fontsize=9)
    frame(axes)


def _line(
    axes: Axes, content: dict[str, Any], optimizer: str, losses: Mapping[str, float]
) -> None:
    label, color = NAMES[optimizer]
    places = [
        place
        for place, row in zip(_places(content), content["rows"], strict=True)
        if row in losses
    ]
    y = [losses[row] for row in content["rows"] if row in losses]
    width = 1.0 if content["axis"] else 0.0
    axes.plot(
        places, y, color=color, marker="_", markersize=14, linewidth=width, label=label
    )


def _places(content: dict[str, Any]) -> list[float]:
    return (
        [float(row) for row in content["rows"]]
        if content["axis"]
        else [*range(len(content["rows"]))]
    )


def _rows_below(axes: Axes, content: dict[str, Any], names: Mapping[str, str]) -> None:
    """``names`` stand for the rows' own where they are given."""
    places, rows = _places(content), [names.get(row, row) for row in content["rows"]]
    if content["axis"]:
        axes.set_xlabel(content["axis"])
        if content["axis"] == "rank":
            axes.set_xscale("log", base=2)
        axes.set_xticks(places, rows)
        axes.minorticks_off()
    else:
        axes.set_xticks(places, rows, rotation=30, ha="right", fontsize=8)
        axes.margins(x=0.15)
    frame(axes)
    if len(content["optimizers"]) == 1 and axes.get_legend():
        axes.get_legend().remove()  # pyright: ignore[reportOptionalMemberAccess]
