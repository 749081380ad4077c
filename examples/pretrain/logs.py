# SPDX-License-Identifier: Apache-2.0
"""What a run leaves to read: ``log.jsonl`` (a line per step and per evaluation), the facts of ``run.json``, the bar."""

import importlib
import importlib.metadata
import json
import os
import platform
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import jax
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .config import Config, RunError, to_dict

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
        "processes": jax.process_count(),
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "command": sys.argv,
    }


def write_json(file: Path, content: dict[str, Any]) -> None:
    """The file whole or not at all."""
    partial = file.with_name(f"{file.name}.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(file)


class Log:
    """Records as lines of JSON; a continued run first drops what lies behind the checkpoint it starts from.

    ``kept`` are the records it begins with. Every record goes to the ``trackers``, too. Of several processes one
    ``writes``.
    """

    def __init__(self, path: Path, start: int, trackers: Sequence["Tracker"] = (), *, writes: bool = True):
        self.kept = [line for line in read_lines(path) if line["step"] <= start] if start else []
        self._file, self._trackers = None, trackers
        if writes:
            path.write_text("".join(json.dumps(record) + "\n" for record in self.kept))
            self._file = path.open("a")

    def write(self, records: list[dict[str, Any]]) -> None:
        """Append and hand over to the operating system, so that a killed process loses nothing written."""
        if self._file is None:
            return
        self._file.write("".join(json.dumps(record) + "\n" for record in records))
        self._file.flush()
        for tracker in self._trackers:
            for record in records:
                tracker.write(record)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        for tracker in self._trackers:
            tracker.close()


class Tracker(Protocol):
    """Where records go besides the log."""

    def write(self, record: dict[str, Any]) -> None:
        """Take the numbers of one record, which has a ``step``."""
        ...

    def close(self) -> None:
        """Finish."""
        ...


class TensorBoard:
    """Scalars as TensorBoard events."""

    def __init__(self, folder: Path, start: int):
        writer = optional_package("tensorboardX", "--tensorboard").SummaryWriter
        self._writer = writer(str(folder), purge_step=start + 1 if start else None)

    def write(self, record: dict[str, Any]) -> None:
        """Every number as a scalar at its step."""
        for name, value in numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Write what is pending."""
        self._writer.close()


class WeightsAndBiases:
    """Numbers as a Weights & Biases run; a continued run goes on with the same one."""

    def __init__(self, project: str, config: Config):
        wandb = optional_package("wandb", "--wandb")
        file = config.run_folder / "wandb_id.txt"
        if not file.exists():
            file.write_text(uuid.uuid4().hex)
        self._run = wandb.init(
            project=project, name=config.run_name, id=file.read_text(), resume="allow", config=to_dict(config)
        )

    def write(self, record: dict[str, Any]) -> None:
        """All numbers of the record at its step."""
        self._run.log(numbers(record), step=record["step"])

    def close(self) -> None:
        """Send what is pending."""
        self._run.finish()


def trackers(config: Config, start: int) -> list[Tracker]:
    """Those that ``config`` asks for.

    Raises:
        RunError: where the package of one is not installed.
    """
    found: list[Tracker] = []
    if config.tensorboard:
        found.append(TensorBoard(config.run_folder / "tensorboard", start))
    if config.wandb:
        found.append(WeightsAndBiases(config.wandb, config))
    return found


def check_trackers(config: Config) -> None:
    """Refuse trackers whose package is not there.

    Raises:
        RunError: naming the package.
    """
    for package, flag, wanted in (
        ("tensorboardX", "--tensorboard", config.tensorboard),
        ("wandb", "--wandb", config.wandb),
    ):
        if wanted:
            optional_package(package, flag)


def optional_package(name: str, wanted_by: str) -> Any:
    """The module ``name``.

    Raises:
        RunError: where it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RunError(f"{wanted_by} needs {name}: pip install {name}") from error


def numbers(record: dict[str, Any]) -> dict[str, float]:
    """What of a record can be drawn."""
    return {k: v for k, v in record.items() if k != "step" and isinstance(v, int | float)}


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
    """Progress on the terminal: loss, tokens per second, MFU, time left. Elsewhere (a file, CI) plain lines alone."""

    def __init__(self, console: Console, *, start: int, steps: int):
        self._progress = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]} "),
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

    def update(self, step: int, loss: float, tokens_per_second: float, mfu: float | None) -> None:
        """Show that ``step`` updates are done."""
        speed = f"{tokens_per_second:,.0f} tokens/s" + (f"  MFU {100 * mfu:.1f} %" if mfu else "")
        self._progress.update(self._task, completed=step, loss=f"{loss:.3f}", speed=speed)
