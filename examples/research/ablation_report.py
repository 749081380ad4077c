# SPDX-License-Identifier: Apache-2.0
"""Table, figure and page of an ablation, from the data that ``ablate`` writes."""

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
        if not len(self.losses):
            return math.nan
        return float(self.losses.mean())

    @property
    def deviation(self) -> float:
        """Sample standard deviation; NaN for fewer than two seeds."""
        if len(self.losses) < 2:
            return math.nan
        return float(self.losses.std(ddof=1))

    @property
    def error(self) -> float:
        """Standard error of the mean; NaN for fewer than two seeds."""
        return self.deviation / math.sqrt(max(len(self.losses), 1))


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write data, figure (PNG) and page into ``folder``; returns the table."""
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
        losses = []
        lost = 0
        for arm in content["arms"]:
            if arm["row"] != row or arm["optimizer"] != optimizer:
                continue
            if arm["status"] == "finished":
                losses.append(arm["best_validation_loss"])
            else:
                lost += 1
        found[row] = Cell(np.array(losses), lost)
    return found


def table(content: dict[str, Any]) -> str:
    """Losses by row, each with its difference from the published row.

    In our runs, and in the paper where it has them.
    """
    head = [content["axis"] or "setting"]
    lines = {}
    for row in content["rows"]:
        lines[row] = [row]
        if row == content["published"]:
            lines[row] = [f"**{row}**"]
    for place, optimizer in enumerate(content["optimizers"]):
        head += _heads(content, optimizer)
        ours = cells(content, optimizer)
        for row, entries in lines.items():
            entries += _entries(content, row, place, ours)
    return markdown_table(head, lines.values())


def _heads(content: dict[str, Any], optimizer: str) -> list[str]:
    """Titles of the columns of one optimizer."""
    heads = [NAMES[optimizer][0], "- published"]
    if content.get("paper_rows"):
        heads.append(f"paper's {content['axis']}")
    if content["paper"]:
        heads += ["paper", "- published"]
    if content["cost"]:
        heads.append("optimizer, ms")
    return heads


def _entries(
    content: dict[str, Any], row: str, place: int, ours: Mapping[str, Cell]
) -> list[str]:
    """Cells of a row below ``_heads``, of the optimizer at this place."""
    published = content["published"]
    paper = content["paper"]
    entries = [_loss(ours[row]), _difference(ours[row].mean, ours[published].mean)]
    theirs = math.nan
    their_name = ""
    if row in paper:
        theirs = paper[row][place]
        their_name = row
    if paper:
        if names := content.get("paper_rows"):
            entries.append(names.get(row, their_name))
        entries.append(_number(theirs))
        entries.append(_difference(theirs, paper[published][place]))
    if content["cost"]:
        optimizer = content["optimizers"][place]
        entries.append(f"{content['cost'][f'{row}/{optimizer}']:.2f}")
    return entries


def _number(value: float) -> str:
    """A loss; nothing for NaN."""
    if math.isnan(value):
        return ""
    return f"{value:.4f}"


def _difference(value: float, other: float) -> str:
    """A difference of losses; nothing where there is none."""
    if math.isnan(value - other) or value == other:
        return ""
    rounded = round(value - other, 4) + 0.0  # -0.0 becomes 0.0
    return f"{rounded:+.4f}"


def _loss(cell: Cell) -> str:
    """Mean and sample standard deviation, and how many seeds were lost."""
    shown = _number(cell.mean)
    if len(cell.losses) > 1:
        shown += f" ± {cell.deviation:.4f}"
    if cell.lost:
        shown += f" ({cell.lost} lost)"
    return shown


AS_IN_THE_PAPER = "as in the paper"


def verdicts(content: dict[str, Any]) -> list[str]:
    """Whether pairs of rows have the paper's order in our runs, and how clearly."""
    found = []
    for place, optimizer in enumerate(content["optimizers"]):
        ours = cells(content, optimizer)
        paper = {row: losses[place] for row, losses in content["paper"].items()}
        rows = [
            row
            for row in content["rows"]
            if row in paper and not math.isnan(ours[row].mean)
        ]
        pairs = [verdict(a, b, ours, paper) for a, b in itertools.combinations(rows, 2)]
        same = sum(pair.endswith(AS_IN_THE_PAPER) for pair in pairs)
        if pairs:
            found.append(
                f"{NAMES[optimizer][0]}: {same} of {len(pairs)} pairs in the paper's"
                f" order. {'; '.join(pairs)}."
            )
    return found


def verdict(
    a: str, b: str, ours: Mapping[str, Cell], paper: Mapping[str, float]
) -> str:
    """Whether two rows have the paper's order in our runs, and how clearly."""
    difference = ours[a].mean - ours[b].mean
    theirs = paper[a] - paper[b]
    error = math.hypot(ours[a].error, ours[b].error)
    if math.isnan(error):
        clear = "one seed each"
    elif abs(difference) > CLEAR * error:
        clear = "clear"
    else:
        clear = "within the noise"
    order = "other than in the paper"
    if (difference > 0) == (theirs > 0):
        order = AS_IN_THE_PAPER
    return f"{a} - {b} {difference:+.4f} ({clear}), the paper {theirs:+.4f}: {order}"


def page(content: dict[str, Any], shown: str) -> str:
    """The ablation as Markdown."""
    seeds = {arm["seed"] for arm in content["arms"]}
    rate = content["config"]["learning_rate"]
    legend = (
        f"Best validation loss in nats per token, mean over {len(seeds)} seed(s) and"
        f" sample standard deviation, at learning rate {rate:g}; bold: as published."
    )
    if content["paper"]:
        legend += " The paper's is GPT-2 Small on OpenWebText, one seed."
    parts = [
        f"# {content['title']}: {content['settings']}\n",
        setting(content),
        f"{legend}\n",
        shown,
        "".join(f"- {verdict}\n" for verdict in verdicts(content)),
        f"![{content['title']}]({content['name']}.png)\n",
    ]
    return "\n".join(part for part in parts if part)


def draw(content: dict[str, Any]) -> Figure:
    """Losses by row, and what belongs beside them.

    The paper's losses, loss over the optimizer's time, or row norms.
    """
    paint = [draw_losses]
    if content["paper"]:
        paint.append(draw_paper)
    if content["cost"]:
        paint.append(draw_frontier)
    if content["name"] == "tangent":
        paint.append(draw_row_norms)
    figure, axes = panels(len(paint), 1.0 + 3.6 * len(paint), 3.2)
    for one, draw_one in zip(axes, paint, strict=True):
        draw_one(one, content)
        one.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, content: dict[str, Any]) -> None:
    """Every seed a dot, their mean a line."""
    for optimizer in content["optimizers"]:
        _, color = NAMES[optimizer]
        ours = cells(content, optimizer)
        means = {row: ours[row].mean for row in content["rows"]}
        _line(axes, content, optimizer, means)
        for place, row in zip(_places(content), content["rows"], strict=True):
            losses = ours[row].losses
            axes.plot([place] * len(losses), losses, ".", color=color, alpha=0.5)
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("our runs", fontsize=9)
    _rows_below(axes, content, {})


def draw_paper(axes: Axes, content: dict[str, Any]) -> None:
    """The paper's losses."""
    for place, optimizer in enumerate(content["optimizers"]):
        paper = {row: losses[place] for row, losses in content["paper"].items()}
        _line(axes, content, optimizer, paper)
    axes.set_title("the paper, GPT-2 Small", fontsize=9)
    _rows_below(axes, content, content.get("paper_rows", {}))


def draw_frontier(axes: Axes, content: dict[str, Any]) -> None:
    """Loss over what the optimizer costs."""
    for optimizer in content["optimizers"]:
        _, color = NAMES[optimizer]
        costs = {row: content["cost"][f"{row}/{optimizer}"] for row in content["rows"]}
        here = cells(content, optimizer)
        for place, row in enumerate(sorted(costs, key=costs.__getitem__)):
            cell = here[row]
            height = (4, -10)[place % 2]  # names of neighbors above and below
            axes.errorbar(
                costs[row],
                cell.mean,
                cell.error,
                color=color,
                marker="o",
                markersize=4,
                capsize=2,
            )
            axes.annotate(
                row,
                (costs[row], cell.mean),
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
        drawn = {
            "row": row,
            "optimizer": optimizer,
            "seed": 0,
            "status": "finished",
        }
        for arm in content["arms"]:
            if drawn.items() <= arm.items():
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
    """A mark for every loss, joined where rows are numbers."""
    label, color = NAMES[optimizer]
    places = []
    heights = []
    for place, row in zip(_places(content), content["rows"], strict=True):
        if row in losses:
            places.append(place)
            heights.append(losses[row])
    width = 0.0
    if content["axis"]:
        width = 1.0
    axes.plot(
        places,
        heights,
        color=color,
        marker="_",
        markersize=14,
        linewidth=width,
        label=label,
    )


def _places(content: dict[str, Any]) -> list[float]:
    """Where rows are on the axis: at their numbers, or one after the other."""
    if content["axis"]:
        return [float(row) for row in content["rows"]]
    return [*range(len(content["rows"]))]


def _rows_below(axes: Axes, content: dict[str, Any], names: Mapping[str, str]) -> None:
    """Names of the rows below the axis; ``names`` replace those that they have."""
    places = _places(content)
    rows = [names.get(row, row) for row in content["rows"]]
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
