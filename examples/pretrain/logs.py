# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to read: ``log.jsonl`` (a line per step and per evaluation), the facts of ``run.json``, the bar."""

import importlib.metadata
import json
import platform
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PACKAGES = ("normpre_optax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")


def environment() -> dict[str, Any]:
    """Versions and device, as stored with the run."""
    device = jax.devices()[0]
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None  # run from a checkout without installing it
    return {
        "versions": versions,
        "device": {"platform": device.platform, "kind": device.device_kind, "count": jax.device_count()},
        "machine": platform.platform(),
        "command": sys.argv,
    }


class Log:
    """Records as lines of JSON; a continued run first drops what lies behind the checkpoint it starts from."""

    def __init__(self, path: Path, start: int):
        kept = [line for line in read_lines(path) if line["step"] <= start] if start else []
        path.write_text("".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a")

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append and hand over to the operating system, so that a killed process loses nothing written."""
        self._file.write("".join(json.dumps(record) + "\n" for record in records))
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The records of a log; a last line cut short by a kill is left out."""
    if not path.exists():
        return []
    records = []
    for line in path.read_text().splitlines():
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return records


class Bar:
    """Progress on the terminal: loss, tokens per second, time left. Elsewhere (a file, CI) the plain lines alone."""

    def __init__(self, console: Console, *, start: int, steps: int):
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} tokens/s "),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=steps, completed=start, loss="-", speed="-")

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, step: int, loss: float, tokens_per_second: float) -> None:
        """Show that ``step`` updates are done."""
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=f"{tokens_per_second:,.0f}")
