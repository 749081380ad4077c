# SPDX-License-Identifier: Apache-2.0
"""What every report begins with, and how it is written: the numbers as JSON, tables as Markdown."""

import datetime
import json
import os
import platform
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax


def header(command: str, device: Any) -> dict:
    """What is needed to measure again: command, date, machine (of a JAX device), versions."""
    return {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": {"device": device.device_kind, "platform": device.platform, "cores": len(_cores())},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "optax": optax.__version__,
            "numpy": np.__version__,
        },
    }


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def table(first: str, columns: Mapping[str, Callable[[dict], str]], rows: Mapping[str, dict]) -> list[str]:
    """Lines of Markdown: titles from ``first`` on, then a line for every row; columns that stay empty are left out.

    What a column makes of a row is empty where the row has not got what it wants.
    """
    cells = {name: {title: _cell(f, row) for title, f in columns.items()} for name, row in rows.items()}
    titles = [title for title in columns if any(row[title] for row in cells.values())]
    lines = [f"| {first}".rstrip() + f" | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    return lines + [f"| {name} | {' | '.join(row[title] for title in titles)} |" for name, row in cells.items()]


def _cell(f: Callable[[dict], str], row: dict) -> str:
    try:
        return f(row)
    except KeyError:  # not measured, or a ratio to what is not in the table
        return ""


def number(value: float) -> str:
    """Three digits, or all before the point; nothing for zero."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}" if value else ""


def write(folder: Path, name: str, result: dict, page: str) -> Path:
    """Writes ``name.json`` and ``name.md``; returns their path without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / f"{name}.md").write_text(page)
    return folder / name
