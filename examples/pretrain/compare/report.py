# SPDX-License-Identifier: Apache-2.0
"""Write the report of a comparison: ``README.md``, its data and its figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .plots import frame, paint_learning_rates, paint_losses, save
from .results import Content
from .tables import losses_table, markdown


class Plot(NamedTuple):
    """A figure of the report; ``paint`` returns whether there is something to see."""

    name: str
    caption: str
    paint: Callable[[Axes, Content], bool]


PLOTS = (
    Plot(
        "losses",
        "Validation loss at the best learning rates, mean and range of seeds, without"
        " the first tenth; thin: training.",
        paint_losses,
    ),
    Plot(
        "learning_rates",
        "Best validation loss at the first seed. The axis ends not far above every"
        " best.",
        paint_learning_rates,
    ),
)


def write(folder: Path, content: Content) -> str:
    """Write the report into ``folder``; returns the table of losses.

    It consists of ``comparison.json``, the figures (PNG) and ``README.md``.
    """
    (folder / "comparison.json").write_text(json.dumps(content) + "\n")
    text = markdown(content)
    for plot in PLOTS:
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        if plot.paint(axes, content):
            frame(axes, legend="below")
            save(figure, folder / plot.name)
            title = plot.name.replace("_", " ")
            text += f"\n![{title}]({plot.name}.png)\n\n{plot.caption}\n"
    (folder / "README.md").write_text(text)
    return losses_table(content)
