# SPDX-License-Identifier: Apache-2.0
"""Many runs of one model that differ in optimizer, settings, learning rate and seed: the arms of a comparison.

Each arm is a run of its own (``python -m examples.pretrain train``) in a folder of its own, so a stopped study goes on
where it was, and an arm that diverges or fails is reported and the others go on.
"""

import functools
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from .config import Config, RunError
from .logs import read_lines, write_json
from .processes import Stopped, begin_as_child, lock
from .variants import Variant

ROOT = Path(__file__).parents[2]
PROGRAM = "examples.pretrain"  # what trains an arm; examples.research.train has further optimizers
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}


class Arm(NamedTuple):
    """One run."""

    variant: Variant
    learning_rate: float
    seed: int
    adam_ratio: float | None = None
    """Learning rate of AdamW's part over the matrices'; None: the configuration's."""
    weight_decay: float | None = None
    """None: the configuration's."""

    @property
    def name(self) -> str:
        """Its folder."""
        variant = ",".join((self.variant.optimizer, *self.variant.settings)).replace("/", ".")
        tuned = "".join(f"-{name.partition('_')[0]}{value:g}" for name, value in self.tuned.items())
        return f"{variant}-lr{self.learning_rate:g}{tuned}-seed{self.seed}"

    @property
    def tuned(self) -> dict[str, float]:
        """What else was chosen for it."""
        found = {"adam_ratio": self.adam_ratio, "weight_decay": self.weight_decay}
        return {name: value for name, value in found.items() if value is not None}

    def __str__(self) -> str:
        tuned = "".join(f" {name.replace('_', ' ')} {value:g}" for name, value in self.tuned.items())
        return f"{self.variant!s:<10} lr {self.learning_rate:<8g}{tuned} seed {self.seed}"

    @property
    def flags(self) -> list[str]:
        """What tells its run from others."""
        adam = [] if self.adam_ratio is None else ["--adam-learning-rate", f"{self.adam_ratio * self.learning_rate!r}"]
        decay = [] if self.weight_decay is None else ["--weight-decay", f"{self.weight_decay!r}"]
        own = ["--learning-rate", f"{self.learning_rate!r}", "--seed", str(self.seed), *adam, *decay]
        return [*self.variant.flags, *own]

    @property
    def facts(self) -> dict[str, Any]:
        """As a report keeps it."""
        return {"optimizer": str(self.variant), "learning_rate": self.learning_rate, **self.tuned, "seed": self.seed}


@dataclass
class Study:
    """Where the arms run, with what they have in common, and what became of them."""

    config: Config
    config_flags: list[str]
    folder: Path
    jobs: int
    results: dict[Arm, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the folder, which holds the arms of one setting, and keep other studies out of it.

        Raises:
            RunError: where it holds those of another setting, or another process is at work in it.
        """
        file = self.folder / "study.json"
        if file.exists():
            before = json.loads(file.read_text())["flags"]
            if before != self.config_flags:
                raise RunError(f"{self.folder} holds runs with other settings ({shlex.join(before)}): --name another")
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder)
        try:
            write_json(file, {"flags": self.config_flags})
            yield
        finally:
            if held:
                held.close()

    def flags(self, arm: Arm) -> list[str]:
        """Of the arm's run."""
        return [
            *(*self.config_flags, *arm.flags),
            *("--name", arm.name, "--runs-folder", str(self.folder)),
        ]

    def run(self, arms: Sequence[Arm], console: Console) -> None:
        """Run ``arms``, some side by side; what becomes of them goes to ``results``.

        Raises:
            RunError: where the first of all to end has failed.
            Stopped: where an arm was stopped.
        """
        waiting, running = list(arms), dict[Arm, tuple[subprocess.Popen, int, TaskID]]()
        free = list(range(self.jobs))
        progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed:,.0f} of {task.total:,.0f}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        with progress, ending_together(running):
            while waiting or running:
                while waiting and free:
                    arm = waiting.pop(0)
                    result = finished(self.folder / arm.name)
                    if result:
                        self.record(arm, result, console, "was there: ")
                        continue
                    place = free.pop()
                    task = progress.add_task(arm.name, total=self.config.steps)
                    running[arm] = (self.start(arm, place), place, task)
                for arm, (process, place, task) in list(running.items()):
                    if process.poll() is not None:
                        del running[arm]
                        free.append(place)
                        progress.remove_task(task)
                        self.ended(arm, process.returncode, console)
                    elif console.is_terminal:
                        progress.update(task, completed=last_step(self.folder / arm.name / "log.jsonl"))
                time.sleep(0.2)

    def start(self, arm: Arm, place: int) -> subprocess.Popen:
        """Begin or continue the run of ``arm``.

        Raises:
            RunError: where another process is at it, such as one that a killed comparison left behind.
        """
        folder = self.folder / arm.name
        if folder.exists() and (held := lock(folder)):
            held.close()
        if folder.exists() and not (folder / "run.json").exists():
            shutil.rmtree(folder)  # killed before there was anything to go on with
        command = [sys.executable, "-m", PROGRAM, "train", *self.flags(arm)]
        command += ["--resume"] if folder.exists() else []
        mine = cores_of(place, self.jobs)
        with (self.folder / f"{arm.name}.txt").open("a") as output:
            return subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment(),
                preexec_fn=functools.partial(begin_as_child, mine) if os.name == "posix" else None,
            )

    def ended(self, arm: Arm, code: int, console: Console) -> None:
        """An arm's process has."""
        if code in STOPPED:
            why = f"{arm.name} was stopped; the same command goes on from there"
            raise Stopped(why, -code if code < 0 else code - 128)
        self.record(arm, finished(self.folder / arm.name) or self.failure(arm, code), console, "")

    def failure(self, arm: Arm, code: int) -> dict[str, Any]:
        """Of an arm that left no result: the last line it said.

        Raises:
            RunError: where no arm has come to an end yet: the settings are at fault, not the arm.
        """
        said = (self.folder / f"{arm.name}.txt").read_text().strip().splitlines()
        last = said[-1] if said else f"exit status {code}"
        if not self.results:
            reason = last.removeprefix("error: ")
            raise RunError(f"{arm.name} failed: {reason} (all that it said: {self.folder / arm.name}.txt)")
        return {"status": "failed", "reason": last}

    def record(self, arm: Arm, result: dict[str, Any], console: Console, prefix: str) -> None:
        """Keep a result, and say it."""
        self.results[arm] = result
        said = {
            "finished": lambda: f"{result['best_validation_loss']:.4f} ({result['train_seconds']:.0f} s of training)",
            "diverged": lambda: result["diverged"],
            "failed": lambda: f"failed: {result['reason']}",
        }[result["status"]]()
        console.print(f"{arm}  {prefix}{said}")

    def facts(self, command: str) -> dict[str, Any]:
        """What a report says about all arms: settings, command, date, machine, versions, text."""
        example = next(arm for arm, result in self.results.items() if result["status"] != "failed")
        run = json.loads((self.folder / example.name / "run.json").read_text())
        session = run["sessions"][-1]
        return {
            "settings": shlex.join([self.config.config, *self.config_flags[2:]]),
            "command": f"python -m examples.pretrain {command}",
            "date": time.strftime("%Y-%m-%d"),
            "machine": {**session["device"], "system": session["machine"], "cores": session["cores"]},
            "versions": session["versions"],
            "config": run["config"],
            "parameters": run["parameters"],
            "text": {"source": run["data"]["source"], "fingerprint": run["fingerprint"]},
        }

    def efficiency(
        self, variants: Sequence[Variant], steps: int, console: Console, file: str = "efficiency.json"
    ) -> dict[str, Any] | None:
        """The paper's table 2, measured by a process of its own; kept, so that it is measured once."""
        path = self.folder / file
        names = [str(variant) for variant in variants]
        measured = json.loads(path.read_text()) if path.exists() else {"rows": {}}
        if set(names) <= measured["rows"].keys():
            return {**measured, "rows": {name: measured["rows"][name] for name in names}}
        console.print(f"Measuring {steps} steps of each optimizer")
        command = [sys.executable, "-m", PROGRAM, "efficiency", "--optimizers", ",".join(names)]
        command += ["--steps", str(steps), "--output", str(path), *self.config_flags]
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment())
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            console.print(f"efficiency could not be measured: {lines[-1] if lines else done.returncode}")
            return None
        return json.loads(path.read_text())


@contextmanager
def ending_together(running: dict[Arm, tuple[subprocess.Popen, int, TaskID]]) -> Iterator[None]:
    """Leaving early stops the arms that are running, which save."""
    try:
        yield
    finally:
        for process, _, _ in running.values():
            process.terminate()
        for process, _, _ in running.values():
            process.wait()


def stop(number: int) -> None:
    """What a signal does at any time: the arms save, and everything that has ended is kept."""
    raise Stopped("stopped; the same command goes on from there", number)


def environment() -> dict[str, str]:
    """That of this process, in which another finds this program from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def cores_of(place: int, jobs: int) -> set[int]:
    """The cores of the ``place``-th of ``jobs`` processes; empty where they are not to be divided."""
    if jobs == 1 or not hasattr(os, "sched_setaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // jobs, 1)
    return {cores[(place * share + i) % len(cores)] for i in range(share)}


def finished(folder: Path) -> dict[str, Any] | None:
    """How the run in ``folder`` ended, with its curves; None where it has not."""
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    status = "diverged" if "diverged" in result else "finished"
    return {"status": status, **result, **curves(folder)}


def curves(folder: Path) -> dict[str, Any]:
    """What the figures need of a log: every validation loss, at most 100 means of training losses, row norms."""
    lines = read_lines(folder / "log.jsonl")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    parts = [part for part in np.array_split(np.array(losses).reshape(-1, 2), 100) if len(part)]
    scores = [line for line in lines if "validation_loss" in line]
    return {
        "train": [[int(part[-1, 0]), round(float(part[:, 1].mean()), 5)] for part in parts],
        "validation": [[line["step"], round(line["validation_loss"], 6)] for line in scores],
        "row_norm": [[line["step"], round(line["row_norm"], 5), round(line["rows_beyond_1"], 5)] for line in scores],
        "norms": {name: round(value, 4) for name, value in scores[-1].items() if "_norm" in name or "beyond" in name},
        "events": [line for line in lines if "event" in line],
    }


def last_step(log: Path) -> int:
    """Of a log that is being written."""
    try:
        with log.open("rb") as file:
            file.seek(-min(2048, log.stat().st_size), os.SEEK_END)
            return json.loads(file.read().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0
