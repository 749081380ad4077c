# SPDX-License-Identifier: Apache-2.0
"""What every report begins with, and how it is written: the numbers as JSON, a table as Markdown."""

import datetime
import json
import os
import platform
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


def write(folder: Path, name: str, result: dict, table: str) -> Path:
    """Writes ``name.json`` and ``name.md``; returns their path without the ending."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / f"{name}.md").write_text(table)
    return folder / name
