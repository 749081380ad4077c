# SPDX-License-Identifier: Apache-2.0
"""Loss and row length over all ablations: ``python -m examples.analysis lengths FILE.json ... --out FOLDER``.

Each ``FILE.json`` is the data of an ablation. Every setting is a point: how long the rows of its hidden matrices are at
the end, and its loss.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.analysis.ablation_report import cells, finished_arms, read
from examples.analysis.comparison_report import NAMES, frame, save

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#332288", "#999933", "#777777", "#882255")
MARKERS = "os^Dv<>Ph*"
# A point whose loss is this far above the median is told below the figure instead of drawn, or it would hide the rest.
FAR = 0.3


class Point(NamedTuple):
    """A setting: means over its seeds."""

    optimizer: str
    ablation: str
    row: str
    row_norm: float
    loss: float


def points(contents: Sequence[dict[str, Any]]) -> list[Point]:
    """One for every setting; what several ablations have in common belongs to the first of them.

    Raises:
        ValueError: for the ablation of layers, whose rows are partly AdamW's, and for settings that differ.
    """
    settings = {content["settings"] for content in contents}
    if len(settings) > 1:
        raise ValueError(f"the ablations are of different settings: {', '.join(sorted(settings))}")
    found: list[Point] = []
    first: dict[tuple[str, float, tuple[float, ...]], str] = {}
    for content in contents:
        name = content["name"]
        if name == "layers":
            raise ValueError("rows of `ablate layers` are partly AdamW's: leave it out")
        for optimizer in content["optimizers"]:
            for row, cell in cells(content, optimizer).items():
                norms = [arm["row_norm"][-1][1] for arm in finished_arms(content, row, optimizer)]
                if norms:
                    point = Point(optimizer, name, row, sum(norms) / len(norms), cell.mean)
                    key = optimizer, point.row_norm, tuple(cell.losses.tolist())
                    if first.setdefault(key, name) == name:
                        found.append(point)
    if not found:
        raise ValueError("the ablations are without a finished run")
    return found


def rank_correlation(found: Sequence[Point]) -> float:
    """Spearman's, of length and loss: -1 where longer rows always go with a lower loss."""
    lengths, losses = (np.argsort(np.argsort(v)) for v in ([p.row_norm for p in found], [p.loss for p in found]))
    return float(np.corrcoef(lengths, losses)[0, 1])


def draw(found: Sequence[Point]) -> Figure:
    """A panel for every optimizer."""
    optimizers = list(dict.fromkeys(p.optimizer for p in found))
    figure = Figure(figsize=(1.5 + 4 * len(optimizers), 3.6), layout="constrained")
    ablations = list(dict.fromkeys(p.ablation for p in found))
    for optimizer, axes in zip(optimizers, np.atleast_1d(np.asarray(figure.subplots(1, len(optimizers)))), strict=True):
        near, _ = near_and_far([p for p in found if p.optimizer == optimizer])
        _draw(axes, near, ablations)
        axes.set_title(NAMES[optimizer][0], fontsize=9)
        if optimizer != optimizers[-1]:
            axes.get_legend().remove()  # pyright: ignore[reportOptionalMemberAccess]
    return figure


def near_and_far(found: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Those that are drawn, and those that are told."""
    limit = float(np.median([p.loss for p in found])) + FAR
    return [p for p in found if p.loss <= limit], [p for p in found if p.loss > limit]


def _draw(axes: Axes, found: Sequence[Point], ablations: Sequence[str]) -> None:
    for i, ablation in enumerate(ablations):
        mine = [p for p in found if p.ablation == ablation]
        x, y = [p.row_norm for p in mine], [p.loss for p in mine]
        name = ablation.replace("_", "-")
        marker = MARKERS[i % len(MARKERS)]
        axes.scatter(x, y, 22, COLOURS[i % len(COLOURS)], marker=marker, alpha=0.85, linewidths=0, label=name)
    axes.set_xlabel("mean row norm of hidden matrices at the end")
    axes.set_ylabel("validation loss (nats per token)")
    frame(axes)


def report(found: Sequence[Point], settings: str) -> str:
    """The points as Markdown, by length, with their rank correlation."""
    parts = [f"# Length of rows and loss: {settings}\n", "![Validation loss over row norm](lengths.png)\n"]
    for optimizer in dict.fromkeys(p.optimizer for p in found):
        mine = sorted((p for p in found if p.optimizer == optimizer), key=lambda p: p.row_norm)
        far = "; ".join(f"{p.ablation}: {p.row} ({p.row_norm:.2f}, {p.loss:.4f})" for p in near_and_far(mine)[1])
        told = []
        if len(mine) > 2:
            told.append(
                f"Rank correlation of row norm and loss over {len(mine)} settings: {rank_correlation(mine):.2f}."
            )
        if far:
            told.append(f"Outside the figure: {far}.")
        parts += [
            f"## {NAMES[optimizer][0]}\n",
            " ".join(told) + "\n",
            "| ablation | setting | row norm at the end | validation loss |\n|---|---|---|---|\n"
            + "".join(f"| {p.ablation} | {p.row} | {p.row_norm:.2f} | {p.loss:.4f} |\n" for p in mine),
        ]
    return "\n".join(parts)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m examples.analysis lengths", description=__doc__)
    parser.add_argument("files", type=Path, nargs="+", help="data of ablations of one configuration")
    parser.add_argument("--out", type=Path, required=True, help="folder for page and figure")
    chosen = parser.parse_args(arguments)
    try:
        contents, found = read(chosen.files, points)
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    chosen.out.mkdir(parents=True, exist_ok=True)
    save(draw(found), chosen.out / "lengths")
    (chosen.out / "lengths.md").write_text(report(found, contents[0]["settings"]))
    print(f"Page and figure: {chosen.out}/lengths.*")
    return 0


if __name__ == "__main__":
    sys.exit(main())
