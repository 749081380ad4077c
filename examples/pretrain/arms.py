# SPDX-License-Identifier: Apache-2.0
"""Many runs of one model that differ in optimizer, settings, learning rate and seed: the arms of a study.

Each arm is an ordinary run (``python -m examples.pretrain train``) in a folder of its own. A stopped study resumes, and
an arm that diverges or fails is reported while the others continue.
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

from .config import Config, RunError
from .logs import read_lines, write_json
from .processes import Stopped, begin_as_child, lock
from .variants import Variant

ROOT = Path(__file__).parents[2]
PROGRAM = "examples.pretrain"  # what trains an arm; examples.research.train has further optimizers
STOPPED = (signal.SIGTERM, signal.SIGINT)


class Arm(NamedTuple):
    """One run; None is the configuration's value."""

    variant: Variant
    learning_rate: float
    seed: int
    adam_ratio: float | None = None
    """Learning rate of the AdamW group, relative to that of the matrix group."""
    weight_decay: float | None = None

    @property
    def tuned(self) -> dict[str, float]:
        """Settings that were chosen beside the learning rate."""
        found = {"adam_ratio": self.adam_ratio, "weight_decay": self.weight_decay}
        return {name: value for name, value in found.items() if value is not None}

    @property
    def name(self) -> str:
        """Its folder."""
        variant = ",".join((self.variant.optimizer, *self.variant.settings)).replace("/", ".")
        tuned = "".join(f"-{name.partition('_')[0]}{value:g}" for name, value in self.tuned.items())
        return f"{variant}-lr{self.learning_rate:g}{tuned}-seed{self.seed}"

    @property
    def flags(self) -> list[str]:
        """Flags of ``train`` that distinguish its run from others."""
        given = {"--learning-rate": self.learning_rate, "--seed": self.seed, "--weight-decay": self.weight_decay}
        if self.adam_ratio is not None:
            given["--adam-learning-rate"] = self.adam_ratio * self.learning_rate
        return [*self.variant.flags, *(x for name, v in given.items() if v is not None for x in (name, repr(v)))]


@dataclass
class Study:
    """Arms that share a configuration and a folder, and their results."""

    config: Config
    config_flags: list[str]
    folder: Path
    jobs: int
    results: dict[Arm, dict[str, Any]] = field(default_factory=dict)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Make the folder and lock it.

        Raises:
            RunError: if it holds arms of another setting, or another process works in it.
        """
        file = self.folder / "study.json"
        if file.exists() and (before := json.loads(file.read_text())["flags"]) != self.config_flags:
            raise RunError(f"{self.folder} holds runs with other settings ({shlex.join(before)}): --name another")
        self.folder.mkdir(parents=True, exist_ok=True)
        held = lock(self.folder)
        try:
            write_json(file, {"flags": self.config_flags})
            yield
        finally:
            if held:
                held.close()

    def run(self, arms: Sequence[Arm], console: Console) -> None:
        """Run ``arms``, ``jobs`` side by side, and keep their ``results``. Leaving early stops arms, which save.

        Raises:
            RunError: if the first of all arms to end has failed: then the settings are at fault, not the arm.
            Stopped: if an arm was stopped.
        """
        waiting, running = list(arms), dict[int, tuple[Arm, subprocess.Popen]]()
        try:
            while waiting or running:
                for place in range(self.jobs):
                    if place in running and running[place][1].poll() is not None:
                        self.ended(*running.pop(place), console)
                    while waiting and place not in running:
                        arm = waiting.pop(0)
                        if result := finished(self.folder / arm.name):
                            self.record(arm, result, console, "was there: ")
                        else:
                            running[place] = arm, self.start(arm, place)
                time.sleep(0.2)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()

    def start(self, arm: Arm, place: int) -> subprocess.Popen:
        """Start or resume the run of ``arm`` on the cores of ``place``.

        Raises:
            RunError: if another process works on it, such as one that a killed comparison left behind.
        """
        folder = self.folder / arm.name
        if folder.exists() and (held := lock(folder)):
            held.close()
        if folder.exists() and not (folder / "run.json").exists():
            shutil.rmtree(folder)  # killed before there was anything to resume
        command = [sys.executable, "-m", PROGRAM, "train", *self.config_flags, *arm.flags, "--name", arm.name]
        command += ["--runs-folder", str(self.folder), *(["--resume"] if folder.exists() else [])]
        begin = functools.partial(begin_as_child, cores_of(place, self.jobs)) if os.name == "posix" else None
        with (self.folder / f"{arm.name}.txt").open("a") as out:
            return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment(), preexec_fn=begin)

    def ended(self, arm: Arm, process: subprocess.Popen, console: Console) -> None:
        """Record an arm whose process has ended; one that left no result has failed, with the last line it printed."""
        number = -process.returncode if process.returncode < 0 else process.returncode - 128
        if number in STOPPED:
            raise Stopped(f"{arm.name} was stopped; the same command resumes it", number)
        output = self.folder / f"{arm.name}.txt"
        if not (result := finished(self.folder / arm.name)):
            reason = (output.read_text().strip().splitlines() or [f"exit status {process.returncode}"])[-1]
            if not self.results:
                raise RunError(f"{arm.name} failed: {reason.removeprefix('error: ')} (its output: {output})")
            result = {"status": "failed", "reason": reason}
        self.record(arm, result, console)

    def record(self, arm: Arm, result: dict[str, Any], console: Console, prefix: str = "") -> None:
        """Keep a result, and print it."""
        self.results[arm] = result
        if result["status"] == "finished":
            said = f"{result['best_validation_loss']:.4f} ({result['train_seconds']:.0f} s of training)"
        else:
            said = result.get("diverged") or f"failed: {result['reason']}"
        console.print(f"{arm.name}  {prefix}{said}")

    def records(self) -> list[dict[str, Any]]:
        """The results, with the settings of each arm."""
        return [
            {"optimizer": str(arm.variant), "learning_rate": arm.learning_rate, "seed": arm.seed, **arm.tuned, **result}
            for arm, result in self.results.items()
        ]

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


def stop(number: int) -> None:
    """Handle a signal: arms save, and everything that has ended is kept."""
    raise Stopped("stopped; the same command resumes it", number)


def environment() -> dict[str, str]:
    """The environment of this process, in which a child finds this program from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def cores_of(place: int, jobs: int) -> set[int]:
    """Cores of the ``place``-th of ``jobs`` processes; empty if they are not to be divided."""
    if jobs == 1 or not hasattr(os, "sched_setaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // jobs, 1)
    return {cores[(place * share + i) % len(cores)] for i in range(share)}


def finished(folder: Path) -> dict[str, Any] | None:
    """How the run in ``folder`` ended, with what figures need of its log; None if it has not ended.

    These are every validation loss, at most 100 means of training losses, and row norms.
    """
    try:
        result = json.loads((folder / "result.json").read_text())
    except (OSError, ValueError):
        return None
    lines = read_lines(folder / "log.jsonl")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    parts = [part for part in np.array_split(np.array(losses).reshape(-1, 2), 100) if len(part)]
    scores = [line for line in lines if "validation_loss" in line]
    return {
        "status": "diverged" if "diverged" in result else "finished",
        **result,
        "train": [[int(part[-1, 0]), round(float(part[:, 1].mean()), 5)] for part in parts],
        "validation": [[line["step"], round(line["validation_loss"], 6)] for line in scores],
        "row_norm": [[line["step"], round(line["row_norm"], 5), round(line["rows_beyond_1"], 5)] for line in scores],
        "norms": {name: round(value, 4) for name, value in scores[-1].items() if "_norm" in name or "beyond" in name},
        "events": [line for line in lines if "event" in line],
    }
