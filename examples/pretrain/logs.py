# SPDX-License-Identifier: Apache-2.0
"""What a run writes to be read: ``log.jsonl``, ``run.json``, its progress.

``log.jsonl`` has a line per step and per evaluation.
"""

import importlib.metadata
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from .config import RunError

PACKAGES = (
    "normpre_optax",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "orbax-checkpoint",
    "grain",
    "tokenizers",
    "numpy",
)
LINE_SECONDS = 30


def environment() -> dict[str, Any]:
    """Versions and device, as stored with the run."""
    device = jax.devices()[0]
    versions = {"python": platform.python_version()}
    for found in importlib.metadata.distributions():
        if found.name in PACKAGES:
            versions[found.name] = found.version
    return {
        "versions": versions,
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
        "processes": jax.process_count(),
        "machine": platform.platform(),
        "command": sys.argv,
        "cores": cores(),
    }


def cores() -> int | None:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Write the file completely or not at all."""
    write_whole(file, json.dumps(content, indent=2) + "\n")


def write_whole(file: Path, text: str) -> None:
    """Write the file completely or not at all, even if the process is killed."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(text)
    partial.replace(file)


def read_json(file: Path) -> dict[str, Any]:
    """Read what ``write_json`` has written; raise a RunError if it is damaged."""
    with suppress(ValueError, RecursionError):
        if isinstance(content := json.loads(file.read_text()), dict):
            return content
    raise RunError(f"{file} is damaged: another --name starts again")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log, without a last line that a kill cut short.

    Damaged lines are left out with a warning.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().splitlines(keepends=True)
    records = []
    for line in lines:
        with suppress(ValueError, RecursionError, TypeError, KeyError):
            record = json.loads(line)
            if isinstance(record["step"], int):
                records.append(record)
    complete = [line for line in lines if line.endswith(b"\n")]
    damaged = len(complete) - len(records)
    if damaged > 0:
        warnings.warn(f"{path}: {damaged} damaged line(s) left out", stacklevel=2)
    return records


def to_lines(records: Sequence[dict[str, Any]]) -> str:
    """Records as lines of JSON."""
    return "".join(json.dumps(record) + "\n" for record in records)


class Log:
    """Records as lines of JSON, in the folder of a run.

    A resumed run first drops those after the checkpoint of step ``start``. Of several
    processes one ``writes``.
    """

    def __init__(self, folder: Path, start: int, *, writes: bool = True):
        path = Path(os.devnull)
        if writes:
            path = folder / "log.jsonl"
            kept = []
            if start:
                kept = [line for line in read_lines(path) if line["step"] <= start]
            write_whole(path, to_lines(kept))
        self._file = path.open("a")

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Append, and flush: a killed process loses nothing written."""
        self._file.write(to_lines(records))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Progress:
    """One line on where a run is.

    On a terminal it is kept up to date; elsewhere (a file, CI) it is printed every 30
    seconds.
    """

    def __init__(self, console: Console, steps: int):
        self._console = console
        self._steps = steps
        self._last = time.monotonic()
        self.status = console.status("compiling")

    def due(self) -> bool:
        """Whether the last line is 30 seconds old."""
        return time.monotonic() - self._last >= LINE_SECONDS

    def update(self, done: int, loss: float, seconds: float, tokens: int) -> None:
        """Say that ``done`` updates are done.

        Args:
            done: number of updates.
            loss: mean of the last ones.
            seconds: of one of the last ones.
            tokens: of one update.
        """
        left = timedelta(seconds=round(seconds * (self._steps - done)))
        line = (
            f"step {done:>6,} of {self._steps:,}  loss {loss:.4f} "
            f" {tokens / seconds:,.0f} tokens/s  {left} left"
        )
        self.status.update(line)
        if self.due():
            if not self._console.is_terminal:
                self._console.print(line)
            self._last = time.monotonic()
