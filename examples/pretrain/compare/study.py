# SPDX-License-Identifier: Apache-2.0
"""Arms that share a configuration and a folder, and the processes that run them.

Each arm is an ordinary run (``python -m examples.pretrain train``) in a folder of its
own. A stopped study resumes, and an arm that diverges or fails is reported while the
others continue.
"""

import functools
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from .. import cluster, configs, data, mesh
from ..checks import check_ranges
from ..config import Config, RunError
from ..logs import read_json, write_json
from ..optimizers import make_optimizer
from ..paths import check_writable
from ..processes import Stopped, begin_as_child, lock, on_signals
from .arms import Arm, Result, finished

# What trains an arm; examples.research.train has further optimizers.
PROGRAM = "examples.pretrain"
POLL_SECONDS = 0.2


@dataclass
class Study:
    """Arms that share a configuration and a folder, and their results."""

    config: Config
    config_flags: list[str]
    folder: Path
    jobs: int
    console: Console
    results: dict[Arm, Result] = field(default_factory=dict)

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Prepare the text, make the folder and lock it.

        Raises:
            RunError: if it holds arms of another or unknown setting or text, or another
                process works in it.
        """
        # Once, before arms would make it side by side.
        corpus = data.open_corpus(self.config, self.console)
        own = {
            "flags": self.config_flags,
            "fingerprint": corpus.manifest["fingerprint"],
        }
        self._check_folder(own)
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder) or nullcontext():
            write_json(self._file, own)
            with on_signals(stop):
                yield

    @property
    def _file(self) -> Path:
        return self.folder / "study.json"

    def _check_folder(self, own: dict[str, Any]) -> None:
        """Raise a RunError if the folder is of another study than ``own``."""
        if not self._file.exists():
            if any(self.folder.rglob("run.json")):
                raise RunError(
                    f"{self.folder} holds runs but no study.json: choose another --name"
                )
            return
        before = own | read_json(self._file)
        if before["flags"] != self.config_flags:
            raise RunError(
                f"{self.folder} has other settings ({shlex.join(before['flags'])}):"
                " choose another --name"
            )
        if before != own:
            raise RunError(
                f"{self.folder} was begun with another text: choose another --name"
            )

    def check(self, arm: Arm) -> None:
        """Raise a RunError that names an option of an arm that cannot be."""
        check_writable(self.folder / arm.name)
        make_optimizer(self.config_of(arm), lambda t: 0.1)

    def config_of(self, arm: Arm) -> Config:
        """The configuration that ``train`` makes of an arm's flags."""
        return configs.parse([*self.config_flags, *arm.flags])

    def run(self, arms: Sequence[Arm]) -> None:
        """Run ``arms``, ``jobs`` side by side, and keep their ``results``.

        Leaving early stops arms, which save.

        Raises:
            RunError: if the first of all arms to end has failed: then the settings are
                at fault, not the arm.
            Stopped: if an arm was stopped.
        """
        waiting = list(arms)
        running: dict[int, tuple[Arm, subprocess.Popen]] = {}
        try:
            while waiting or running:
                for place in range(self.jobs):
                    if place in running and running[place][1].poll() is not None:
                        self.ended(*running.pop(place))
                    while waiting and place not in running:
                        arm = waiting.pop(0)
                        if result := finished(self.folder / arm.name):
                            self.record(arm, result, "was there: ")
                        else:
                            running[place] = arm, self.start(arm, place)
                time.sleep(POLL_SECONDS)
        finally:
            for _, process in running.values():
                process.terminate()
            for _, process in running.values():
                process.wait()

    def start(self, arm: Arm, place: int) -> subprocess.Popen:
        """Start or resume the run of ``arm`` on the cores of ``place``.

        Raises:
            RunError: if another process works on it, such as one that a killed
                comparison left behind.
        """
        folder = self.folder / arm.name
        if folder.exists() and (held := lock(folder)):
            held.close()
        begin = None
        if os.name == "posix":
            cores = cores_of(place, self.jobs)
            begin = functools.partial(begin_as_child, cores)
        with self._output(arm).open("a") as out:
            return subprocess.Popen(
                self._command(arm),
                stdout=out,
                stderr=subprocess.STDOUT,
                preexec_fn=begin,
            )

    def _command(self, arm: Arm) -> list[str]:
        """The command that trains ``arm``, or continues it."""
        command = [sys.executable, "-m", PROGRAM, "train"]
        command += [*self.config_flags, *arm.flags]
        command += ["--name", arm.name, "--runs-folder", str(self.folder)]
        if (self.folder / arm.name / "run.json").exists():
            command.append("--resume")
        return command

    def _output(self, arm: Arm) -> Path:
        """What the process of ``arm`` prints."""
        return self.folder / f"{arm.name}.txt"

    def ended(self, arm: Arm, process: subprocess.Popen) -> None:
        """Record an arm whose process has ended; one that left no result has failed.

        Raises:
            RunError: if it failed and is the first arm to end.
            Stopped: if it was stopped.
        """
        stopped_by = signal_of(process.returncode)
        if stopped_by in (signal.SIGTERM, signal.SIGINT):
            raise Stopped(
                f"{arm.name} was stopped; the same command resumes it", stopped_by
            )
        result = finished(self.folder / arm.name)
        if result is None:
            failure = self._failure(arm, process.returncode)
            if not self.results:
                raise RunError(
                    f"{arm.name} failed: {failure} (its output: {self._output(arm)})"
                )
            result = {"status": "failed", "reason": failure}
        self.record(arm, result)

    def _failure(self, arm: Arm, status: int) -> str:
        """Why an arm failed: the signal that killed it, or the last line it printed."""
        if status < 0:
            return (
                f"killed by signal {-status} (9 is often for lack of memory); the"
                " same command resumes it"
            )
        printed = self._output(arm).read_text().strip().splitlines()
        if not printed:
            return f"exit status {status}"
        return printed[-1].removeprefix("error: ")

    def record(self, arm: Arm, result: Result, prefix: str = "") -> None:
        """Keep a result, and print it."""
        self.results[arm] = result
        if result["status"] == "finished":
            loss = result["best_validation_loss"]
            ending = f"{loss:.4f} ({result['train_seconds']:.0f} s of training)"
        else:
            ending = result.get("diverged") or f"failed: {result.get('reason')}"
        self.console.print(f"{arm.name}  {prefix}{ending}")

    def records(self) -> list[Result]:
        """The results, each with its arm and the learning rate of its AdamW group."""
        found = []
        for arm, result in self.results.items():
            config = self.config_of(arm)  # its optimizer may set learning rates
            rate = config.adam_learning_rate or config.learning_rate
            found.append({**arm._asdict(), "adam_learning_rate": rate, **result})
        return found

    def facts(self, command: str) -> dict[str, Any]:
        """What a report says about all arms.

        These are settings, command, date, machine, versions and text.
        """
        example = next(
            arm for arm, result in self.results.items() if result["status"] != "failed"
        )
        run = read_json(self.folder / example.name / "run.json")
        session = run["sessions"][-1]
        machine = session["device"] | {
            "system": session["machine"],
            "cores": session["cores"],
        }
        text = ("source", "fingerprint", "passes")
        return {
            "settings": shlex.join([self.config.config, *self.config_flags[2:]]),
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": machine,
            "versions": session["versions"],
            "config": run["config"],
            "parameters": run["parameters"],
            "text": {key: run["data"].get(key) for key in text},
        }


def make_study(kind: str, options: Any, *own: str) -> Study:
    """Make a study of ``kind``, which sets the flags ``own``.

    Args:
        kind: the command.
        options: ``Compare``, or a dataclass with its fields.
        own: flags of ``train`` that the user may not set.

    Raises:
        RunError: naming the flag and its valid values.
    """
    given = {part.partition("=")[0] for part in options.rest}
    for flag in given.intersection(own):
        raise RunError(f"{flag} is what `{kind}` sets itself: remove it")
    check_ranges(vars(options))
    name = options.name or f"{kind}-{options.config}"
    config = configs.parse([*options.rest, "--name", name])
    mesh.check(config)
    cluster.refuse_several(config, kind)
    if config.resume or config.overwrite:
        raise RunError(
            f"{kind} resumes by itself: remove --resume and --overwrite, or choose"
            " another --name"
        )
    return Study(
        config=config,
        config_flags=list(options.rest),
        folder=options.runs_folder / name,
        jobs=options.jobs,
        console=Console(markup=False, highlight=False, soft_wrap=True),
    )


def command_line() -> str:
    """The command that runs the study, as a user types it."""
    return shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])


def stop(number: int) -> None:
    """Handle a signal: arms save, and everything that has ended is kept."""
    raise Stopped("stopped; the same command resumes it", number)


def signal_of(status: int) -> int:
    """The number of the signal that ended a process, if one did.

    The status of a process is -n if signal n killed it, and 128 + n if it handled the
    signal and saved (``main.exit_status``).
    """
    if status < 0:
        return -status
    return status - 128


def cores_of(place: int, jobs: int) -> set[int]:
    """Cores of the ``place``-th of ``jobs`` processes; empty: all of them."""
    if jobs == 1 or not hasattr(os, "sched_setaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // jobs, 1)
    return {cores[(place * share + i) % len(cores)] for i in range(share)}
