# SPDX-License-Identifier: Apache-2.0
"""Reports of research programs: command and machine, Markdown tables, and files."""

import dataclasses
import datetime
import json
import os
import platform
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from examples.pretrain.compare.plots import save


def command(name: str, options: Any) -> str:
    """The command line that sets ``options``, a dataclass.

    It is without its defaults and without ``--out``.
    """
    words = [f"python -m examples.research.{name}"]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if field.name == "out" or value == field.default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if isinstance(value, tuple):
            words += [shlex.quote(str(one)) for one in value]
        elif value is not True:
            words.append(shlex.quote(str(value)))
    return " ".join(words)


def header(command: str, device: Any) -> dict:
    """What is needed to repeat a measurement.

    Command, date, machine (of a JAX device) and versions.
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": {
            "device": device.device_kind,
            "platform": device.platform,
            "cores": cores,
        },
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
        },
    }


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown, with a newline at its end."""
    lines = [
        f"| {' | '.join(titles)} |",
        "|---" * len(titles) + "|",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def table(
    first: str,
    columns: Mapping[str, Callable[[dict], str]],
    rows: Mapping[str, dict] | list[dict],
) -> str:
    """A table with a line for every row and without empty columns.

    Args:
        first: title of the first column, which has the rows' names, or key of a row's
            name.
        columns: functions of a row by title. A cell is empty where its function raises
            a KeyError.
        rows: values by the row's name, or a list with the names under the key
            ``first``.
    """
    if isinstance(rows, Mapping):
        named = list(rows.items())
    else:
        named = [(str(row[first]), row) for row in rows]
    filled = {}
    for title, cell in columns.items():
        cells = [_cell(cell, row) for _, row in named]
        if any(cells):
            filled[title] = cells
    lines = []
    for place, (name, _) in enumerate(named):
        lines.append([name, *(cells[place] for cells in filled.values())])
    return markdown_table([first, *filled], lines)


def _cell(f: Callable[[dict], str], row: dict) -> str:
    """What ``f`` says of a row, or nothing."""
    try:
        return f(row)
    except KeyError:
        # Not measured, or a ratio to an optimizer that is not in the table.
        return ""


def number(value: float) -> str:
    """Three significant digits, or all before the point; nothing for zero."""
    if value >= 100:
        return f"{value:,.0f}"
    if value:
        return f"{value:.3g}"
    return ""


def panels(
    count: int, width: float, height: float, **options: Any
) -> tuple[Figure, list[Any]]:
    """A figure with panels side by side.

    ``options`` are those of ``Figure.subplots``.
    """
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, count, squeeze=False, **options)
    return figure, list(axes[0])


def legend_at_end(axes: Sequence[Any]) -> None:
    """Keep the legend of the last panel only."""
    for one in axes[:-1]:
        one.get_legend().remove()


def write(
    folder: Path,
    name: str,
    result: dict,
    page: str,
    figure: Figure | None = None,
    page_name: str = "",
) -> None:
    """Write ``name.json``, ``name.md`` (or ``page_name``) and ``name.png``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / (page_name or f"{name}.md")).write_text(page)
    if figure is not None:
        save(figure, folder / name)
