# SPDX-License-Identifier: Apache-2.0
"""Table, figure and page of an ablation: ``python -m examples.research.ablation_report FILE.json ...``.

A ``FILE.json`` is what ``python -m examples.research.ablate`` wrote; its page and figure are drawn again beside it.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.pretrain.comparison_report import NAMES, frame, save

# Two means count as different where they are this many standard errors of their difference apart.
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
        return float(self.losses.std(ddof=1) / math.sqrt(len(self.losses))) if len(self.losses) > 1 else math.nan


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write the ablation's data, figure (PNG) and page into ``folder``; returns the table."""
    name = content["name"]
    (folder / f"{name}.json").write_text(json.dumps(content) + "\n")
    save(draw(content), folder / name)
    shown = table(content)
    (folder / f"{name}.md").write_text(page(content, shown))
    return shown


def arms_of(content: dict[str, Any], row: str, optimizer: str) -> list[dict[str, Any]]:
    """The arms of a cell of the table."""
    return [arm for arm in content["arms"] if (arm["row"], arm["optimizer"]) == (row, optimizer)]


def finished_arms(content: dict[str, Any], row: str, optimizer: str) -> list[dict[str, Any]]:
    """Those of them that came to their end."""
    return [arm for arm in arms_of(content, row, optimizer) if arm["status"] == "finished"]


def cells(content: dict[str, Any], optimizer: str) -> dict[str, Cell]:
    """By row."""
    found: dict[str, Cell] = {}
    for row in content["rows"]:
        arms = arms_of(content, row, optimizer)
        losses = [arm["best_validation_loss"] for arm in finished_arms(content, row, optimizer)]
        found[row] = Cell(np.array(losses), len(arms) - len(losses))
    return found


def table(content: dict[str, Any]) -> str:
    """Losses by row, each with its difference to the published row, here and in the paper."""
    head, paper, paper_rows = [content["axis"] or "setting"], content["paper"], content.get("paper_rows")
    for optimizer in content["optimizers"]:
        head += [NAMES[optimizer][0], "- published"]
        head += [f"paper's {content['axis']}"] * bool(paper_rows)
        head += ["paper", "- published"] * bool(paper)
        head += ["optimizer, ms"] * bool(content["cost"])
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in content["rows"]:
        entries = [f"**{row}**" if row == content["published"] else row]
        for place, optimizer in enumerate(content["optimizers"]):
            here = cells(content, optimizer)
            entries += [_loss(here[row]), _difference(here[row].mean, here[content["published"]].mean)]
            if paper:
                entries += [paper_rows.get(row, row if row in paper else "")] if paper_rows else []
                theirs = paper[row][place] if row in paper else math.nan
                entries += [_number(theirs), _difference(theirs, paper[content["published"]][place])]
            if content["cost"]:
                entries.append(f"{content['cost'][f'{row}/{optimizer}']:.2f}")
        lines.append(f"| {' | '.join(entries)} |")
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.4f}"


def _difference(value: float, other: float) -> str:
    return "" if math.isnan(value - other) or value == other else f"{round(value - other, 4) + 0.0:+.4f}"


def _loss(cell: Cell) -> str:
    shown = _number(cell.mean)
    shown += f" ± {cell.losses.std(ddof=1):.4f}" if len(cell.losses) > 1 else ""
    return shown + (f" ({cell.lost} lost)" if cell.lost else "")


def verdicts(content: dict[str, Any]) -> list[str]:
    """For every pair of rows of which the paper has both: the same order here, or not, and how clearly."""
    found = []
    for place, optimizer in enumerate(content["optimizers"]):
        here = cells(content, optimizer)
        rows = [row for row in content["rows"] if row in content["paper"] and not math.isnan(here[row].mean)]
        pairs = [(a, b) for i, a in enumerate(rows) for b in rows[i + 1 :]]
        if not pairs:
            continue
        told = [_pair(here, content["paper"], place, a, b) for a, b in pairs]
        same = sum(agrees for agrees, _ in told)
        found.append(
            f"{NAMES[optimizer][0]}: {same} of {len(pairs)} pairs in the paper's order. "
            + "; ".join(text for _, text in told)
            + "."
        )
    return found


def _pair(here: dict[str, Cell], paper: dict[str, Sequence[float]], place: int, a: str, b: str) -> tuple[bool, str]:
    ours, theirs = here[a].mean - here[b].mean, paper[a][place] - paper[b][place]
    error = math.hypot(here[a].error, here[b].error)
    certain = "one seed each" if math.isnan(error) else "clear" if abs(ours) > CLEAR * error else "within the noise"
    agrees = (ours > 0) == (theirs > 0)
    order = "as in the paper" if agrees else "other than in the paper"
    return agrees, f"{a} - {b} {ours:+.4f} ({certain}), the paper {theirs:+.4f}: {order}"


def page(content: dict[str, Any], shown: str) -> str:
    """The ablation as Markdown."""
    config, machine, versions, name = content["config"], content["machine"], content["versions"], content["name"]
    tokens = config["steps"] * config["batch_size"] * config["model.context"]
    seeds = len({arm["seed"] for arm in content["arms"]})
    parts = [
        f"# {content['title']}: {content['settings']}\n",
        f"`{content['command']}`, {content['date']}. {content['parameters']:,} parameters "
        f"({config['model.family']}, {config['model.layers']} layers, width {config['model.width']}), "
        f"{config['steps']:,} steps of {config['batch_size']} x {config['model.context']} tokens "
        f"({tokens / 1e6:,.1f} M) of {content['text']['source']}; learning rate {config['learning_rate']:g}, "
        f"{seeds} seed(s). {machine['kind']}, {machine['cores']} core(s) a run, Python {versions['python']}, "
        f"jax {versions['jax']}.\n",
        "Best validation loss in nats per token, mean over seeds and sample standard deviation; bold: as published."
        + (" The paper's is GPT-2 Small on OpenWebText, one seed." if content["paper"] else "")
        + "\n",
        shown,
        "".join(f"- {verdict}\n" for verdict in verdicts(content)),
        f"![{content['title']}]({name}.png)\n",
    ]
    return "\n".join(part for part in parts if part)


def draw(content: dict[str, Any]) -> Figure:
    """Losses by row; the paper's beside them; loss over the optimizer's time, or row norms, where they matter."""
    panels = [draw_losses]
    panels += [draw_paper] if content["paper"] else []
    panels += [draw_frontier] if content["cost"] else []
    panels += [draw_row_norms] if content["name"] == "tangent" else []
    figure = Figure(figsize=(1.0 + 3.6 * len(panels), 3.2), layout="constrained")
    for axes, paint in zip(np.atleast_1d(np.asarray(figure.subplots(1, len(panels)))), panels, strict=True):
        paint(axes, content)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_losses(axes: Axes, content: dict[str, Any]) -> None:
    """Every seed a dot, their mean a line."""
    places = _places(content)
    for optimizer in content["optimizers"]:
        label, colour = NAMES[optimizer]
        here = cells(content, optimizer)
        means = [here[row].mean for row in content["rows"]]
        axes.plot(places, means, color=colour, marker="_", markersize=14, linewidth=_line(content), label=label)
        for place, row in zip(places, content["rows"], strict=True):
            losses = here[row].losses
            axes.plot([place] * len(losses), losses, ".", color=colour, alpha=0.5, markersize=5)
    axes.set_ylabel("validation loss (nats per token)")
    axes.set_title("here", fontsize=9)
    _rows_below(axes, content)


def draw_paper(axes: Axes, content: dict[str, Any]) -> None:
    """The paper's losses."""
    rows = [row for row in content["rows"] if row in content["paper"]]
    places = [place for place, row in zip(_places(content), content["rows"], strict=True) if row in rows]
    for place, optimizer in enumerate(content["optimizers"]):
        label, colour = NAMES[optimizer]
        losses = [content["paper"][row][place] for row in rows]
        axes.plot(places, losses, color=colour, marker="_", markersize=14, linewidth=_line(content), label=label)
    axes.set_title("the paper, GPT-2 Small", fontsize=9)
    _rows_below(axes, content, content.get("paper_rows", {}))


def draw_frontier(axes: Axes, content: dict[str, Any]) -> None:
    """Loss over what the optimizer costs."""
    for optimizer in content["optimizers"]:
        _, colour = NAMES[optimizer]
        costs = {row: content["cost"][f"{row}/{optimizer}"] for row in content["rows"]}
        here = cells(content, optimizer)
        for place, (row, cost) in enumerate(sorted(costs.items(), key=lambda item: item[1])):
            cell, height = here[row], (4, -10)[place % 2]  # names of neighbours above and below
            axes.errorbar(cost, cell.mean, cell.error, color=colour, marker="o", markersize=4, capsize=2)
            axes.annotate(row, (cost, cell.mean), xytext=(4, height), textcoords="offset points", fontsize=7)
    axes.set_xlabel("optimizer, ms a step")
    axes.set_ylabel("validation loss (nats per token)")
    axes.margins(x=0.15)
    frame(axes)


def draw_row_norms(axes: Axes, content: dict[str, Any]) -> None:
    """Mean length of hidden rows along training, of the first optimizer, seed 0."""
    optimizer = content["optimizers"][0]
    for i, row in enumerate(content["rows"]):
        arms = [a for a in content["arms"] if (a["row"], a["optimizer"], a["seed"]) == (row, optimizer, 0)]
        for arm in arms:
            if arm["status"] == "finished":
                steps, norms, _ = zip(*arm["row_norm"], strict=True)
                share = i / max(len(content["rows"]) - 1, 1)
                axes.plot(steps, norms, color=shade(share), marker="o", markersize=2.5, linewidth=1.2, label=row)
    axes.axhline(1, color="0.6", linewidth=0.8, linestyle="--")
    axes.set_xlabel("step")
    axes.set_ylabel("mean row norm of hidden matrices")
    axes.set_title(NAMES[optimizer][0], fontsize=9)
    frame(axes)


def shade(share: float) -> Any:
    """Of a sequential map that colour-blind readers can order."""
    return colormaps["cividis"](0.9 * share)


def _line(content: dict[str, Any]) -> float:
    return 1.0 if content["axis"] else 0.0


def _places(content: dict[str, Any]) -> list[float]:
    return [float(row) for row in content["rows"]] if content["axis"] else [*range(len(content["rows"]))]


def _rows_below(axes: Axes, content: dict[str, Any], names: Mapping[str, str] = MappingProxyType({})) -> None:
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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.research.ablation_report", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="data of an ablation")
    chosen = parser.parse_args(arguments)
    for file in chosen.files:
        try:
            content = json.loads(file.read_text())
            shown = write(file.parent, content)
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"error: {file} is no ablation's data: {error!r}", file=sys.stderr)
            return 1
        print(shown)
    return 0


if __name__ == "__main__":
    sys.exit(main())
