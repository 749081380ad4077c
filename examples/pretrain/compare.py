# SPDX-License-Identifier: Apache-2.0
"""Matched comparison: the same model, data order and budget under several optimizers, learning rates and seeds.

First every optimizer runs at every learning rate with seed 0, then at its best one with the other seeds. Each arm is a
run of its own (``python -m examples.pretrain train``) in a folder of its own, so a stopped comparison goes on where it
was, and an arm that diverges or fails is reported and the others go on. ``--jobs`` runs arms side by side, each with an
equal share of the cores.
"""

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
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from examples.analysis import comparison_report

from . import cluster, configs, data, mesh
from .config import Config, RunError, check
from .logs import read_lines, write_json
from .processes import Stopped, on_signals

ROOT = Path(__file__).parents[2]
STOPPED = {128 + signal.SIGTERM, 128 + signal.SIGINT, -signal.SIGTERM, -signal.SIGINT}


@dataclass(frozen=True)
class Options:
    """Compare optimizers at matched settings. Any flag of ``train`` may follow and holds for every arm."""

    config: str = "first_run"
    """Named configuration."""
    optimizers: str = "adamw,muon,mano,normpre_g,normpre_l"
    """Optimizers, separated by commas."""
    learning_rates: str = ""
    """Peak learning rates to try, separated by commas; "muon:8e-3" is for that optimizer only. Empty: the
    configuration's."""
    seeds: int = 1
    """Seeds (of initialisation and data order) at each optimizer's best learning rate."""
    jobs: int = 1
    """Arms that run side by side. More than one on a machine with one accelerator is slower, not faster."""
    name: str = ""
    """Name of the comparison; compare-<config> where none is given."""
    runs_folder: Path = Path("runs")
    """Where its folder is made: an arm's run in each subfolder, and report/."""
    efficiency: bool = True
    """Measure time and memory per step, too (the paper's table 2)."""
    efficiency_steps: int = 100
    """Steps of that measurement, after a fifth as many that are not counted."""


class Arm(NamedTuple):
    """One run of the comparison."""

    optimizer: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.optimizer}-lr{self.learning_rate:g}-seed{self.seed}"


@dataclass
class Comparison:
    """What is to be run, and where."""

    options: Options
    overrides: list[str]
    config: Config
    optimizers: list[str]
    learning_rates: dict[str, list[float]]
    folder: Path
    results: dict[Arm, dict[str, Any]] = field(default_factory=dict)


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain compare --config nano --learning-rates 2e-3,4e-3,8e-3 --seeds 3 --jobs 2``."""
    options, overrides = tyro.cli(
        Options, args=list(arguments), return_unknown_args=True, prog="python -m examples.pretrain compare"
    )
    comparison = plan(options, overrides)
    with on_signals(stop):
        run(comparison, shlex.join(arguments), Console(markup=False, highlight=False, soft_wrap=True))


def stop(number: int) -> None:
    """What a signal does at any time: the arms save, and everything that has ended is kept."""
    raise Stopped("stopped; the same command goes on from there", number)


def run(comparison: Comparison, arguments: str, console: Console) -> None:
    """All arms, table 2, and the report."""
    options = comparison.options
    data.open_corpus(comparison.config.data, console.print)  # once, before arms could make it side by side
    begin(comparison.folder, {"config": options.config, "overrides": comparison.overrides})
    sweep = [Arm(name, rate, 0) for name in comparison.optimizers for rate in comparison.learning_rates[name]]
    sweep.sort(key=lambda arm: arm.learning_rate)
    console.print(
        f"{comparison.config.config}: {len(sweep)} arms of {', '.join(comparison.optimizers)}, then {options.seeds} "
        f"seed(s) at the best learning rates; {comparison.config.steps:,} steps each, in {comparison.folder}/"
    )
    run_all(comparison, sweep, console)
    best = best_rates(comparison)
    seeds = range(1, options.seeds)
    others = [Arm(name, best[name], seed) for seed in seeds for name in comparison.optimizers if name in best]
    run_all(comparison, others, console)
    efficiency = measure_efficiency(comparison, console) if options.efficiency else None
    report(comparison, best, efficiency, arguments, console)
    if not best:
        raise RunError("no arm came to its end: every learning rate was too high, or see the reasons above")


def plan(options: Options, overrides: list[str]) -> Comparison:
    """Read and check everything before the first arm.

    Raises:
        RunError: naming the flag and what it may be.
    """
    if options.seeds < 1 or options.jobs < 1 or options.efficiency_steps < 1:
        raise RunError("--seeds, --jobs and --efficiency-steps must be at least 1")
    config = configs.parse(["--config", options.config, *overrides])
    check(config)
    mesh.check(config)
    cluster.refuse_several(config, "compare")
    if config.resume or config.overwrite:
        raise RunError(
            "a comparison goes on where it was by itself: leave --resume and --overwrite out, or give a --name"
        )
    optimizers = [name.strip() for name in options.optimizers.split(",") if name.strip()]
    known = comparison_report.NAMES
    for name in optimizers:
        if name not in known:
            raise RunError(f"--optimizers must be of {', '.join(known)}, got {name!r}")
    if not optimizers:
        raise RunError("--optimizers must name at least one")
    rates = learning_rates(options.learning_rates, optimizers, config.learning_rate)
    name = options.name or f"compare-{options.config}"
    if Path(name).name != name:
        raise RunError(f"--name must be a plain folder name, got {name!r}")
    folder = options.runs_folder / name
    return Comparison(options, overrides, config, list(dict.fromkeys(optimizers)), rates, folder)


def learning_rates(text: str, optimizers: Sequence[str], default: float) -> dict[str, list[float]]:
    """What "1e-3,muon:2e-3" means for every optimizer, in ascending order.

    Raises:
        RunError: where it is not of that form.
    """
    rates: dict[str, set[float]] = {name: set() for name in optimizers}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.rpartition(":")
        if name and name not in rates:
            raise RunError(f"--learning-rates: {name!r} is none of the optimizers {', '.join(optimizers)}")
        try:
            rate = float(number)
        except ValueError as error:
            raise RunError(f"--learning-rates: numbers separated by commas, got {text!r}") from error
        if not 0 < rate < float("inf"):
            raise RunError(f"--learning-rates must be positive, got {entry!r}")
        for wanted in [name] if name else optimizers:
            rates[wanted].add(rate)
    return {name: sorted(found) or [default] for name, found in rates.items()}


def begin(folder: Path, settings: dict[str, Any]) -> None:
    """Make the folder, which holds the arms of one setting.

    Raises:
        RunError: where it holds those of another.
    """
    file = folder / "compare.json"
    if file.exists():
        before = json.loads(file.read_text())
        if before != settings:
            flags = shlex.join(["--config", before["config"], *before["overrides"]])
            raise RunError(f"{folder} holds a comparison with other settings ({flags}): --name starts another")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(file, settings)


def best_rates(comparison: Comparison) -> dict[str, float]:
    """For every optimizer with a finished arm the learning rate with the lowest loss at seed 0."""
    best: dict[str, tuple[float, float]] = {}
    for arm, result in comparison.results.items():
        if arm.seed == 0 and result["status"] == "finished":
            found = (result["best_validation_loss"], arm.learning_rate)
            best[arm.optimizer] = min(best.get(arm.optimizer, (np.inf, 0.0)), found)
    return {name: rate for name, (_, rate) in best.items()}


def run_all(comparison: Comparison, arms: list[Arm], console: Console) -> None:
    """Run ``arms``, some side by side; their results go to ``comparison.results``."""
    waiting, running = list(arms), dict[Arm, tuple[subprocess.Popen, int, TaskID]]()
    free = list(range(comparison.options.jobs))
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
                result = finished(comparison.folder / arm.name)
                if result:
                    record(comparison, arm, result, console, "was there: ")
                    continue
                place = free.pop()
                task = progress.add_task(arm.name, total=comparison.config.steps)
                running[arm] = (start(comparison, arm, place), place, task)
            for arm, (process, place, task) in list(running.items()):
                if process.poll() is not None:
                    del running[arm]
                    free.append(place)
                    progress.remove_task(task)
                    if process.returncode in STOPPED:
                        code = process.returncode
                        why = f"{arm.name} was stopped; the same command goes on from there"
                        raise Stopped(why, -code if code < 0 else code - 128)
                    result = finished(comparison.folder / arm.name) or failure(comparison, arm, process.returncode)
                    record(comparison, arm, result, console, "")
                elif console.is_terminal:
                    progress.update(task, completed=last_step(comparison.folder / arm.name / "log.jsonl"))
            time.sleep(0.2)


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


def start(comparison: Comparison, arm: Arm, place: int) -> subprocess.Popen:
    """Begin or continue the run of ``arm``."""
    folder = comparison.folder / arm.name
    if folder.exists() and not (folder / "run.json").exists():
        shutil.rmtree(folder)  # killed before there was anything to go on with
    command = [sys.executable, "-m", "examples.pretrain", "train", *arguments_of(comparison, arm)]
    command += ["--resume"] if folder.exists() else []
    mine = cores_of(place, comparison.options.jobs)
    with (comparison.folder / f"{arm.name}.txt").open("a") as output:
        return subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(),
            preexec_fn=(lambda: os.sched_setaffinity(0, mine)) if mine else None,
        )


def environment() -> dict[str, str]:
    """That of this process, in which another finds this program from any folder."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}


def arguments_of(comparison: Comparison, arm: Arm) -> list[str]:
    """Flags of the arm's run."""
    return [
        *("--config", comparison.options.config, *comparison.overrides),
        *("--optimizer", arm.optimizer, "--learning-rate", f"{arm.learning_rate!r}", "--seed", str(arm.seed)),
        *("--name", arm.name, "--runs-folder", str(comparison.folder)),
    ]


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
        "events": [line for line in lines if "event" in line],
    }


def failure(comparison: Comparison, arm: Arm, code: int) -> dict[str, Any]:
    """Of an arm that left no result: the last line it said.

    Raises:
        RunError: where no arm has come to an end yet: the settings are at fault, not the arm.
    """
    said = (comparison.folder / f"{arm.name}.txt").read_text().strip().splitlines()
    last = said[-1] if said else f"exit status {code}"
    if not comparison.results:
        reason = last.removeprefix("error: ")
        raise RunError(f"{arm.name} failed: {reason} (all that it said: {comparison.folder / arm.name}.txt)")
    return {"status": "failed", "reason": last}


def record(comparison: Comparison, arm: Arm, result: dict[str, Any], console: Console, prefix: str) -> None:
    """Keep a result, and say it."""
    comparison.results[arm] = result
    said = {
        "finished": lambda: f"{result['best_validation_loss']:.4f} ({result['train_seconds']:.0f} s of training)",
        "diverged": lambda: result["diverged"],
        "failed": lambda: f"failed: {result['reason']}",
    }[result["status"]]()
    console.print(f"{arm.optimizer:<10} lr {arm.learning_rate:<8g} seed {arm.seed}  {prefix}{said}")


def last_step(log: Path) -> int:
    """Of a log that is being written."""
    try:
        with log.open("rb") as file:
            file.seek(-min(2048, log.stat().st_size), os.SEEK_END)
            return json.loads(file.read().splitlines()[-1])["step"]
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        return 0


def measure_efficiency(comparison: Comparison, console: Console) -> dict[str, Any] | None:
    """The paper's table 2, measured by a process of its own; kept, so that it is measured once."""
    file = comparison.folder / "efficiency.json"
    measured = json.loads(file.read_text()) if file.exists() else {"rows": {}}
    if measured["rows"].keys() != set(comparison.optimizers):
        console.print(f"Measuring {comparison.options.efficiency_steps} steps of each optimizer")
        steps = str(comparison.options.efficiency_steps)
        command = [sys.executable, "-m", "examples.pretrain", "efficiency", "--config", comparison.options.config]
        command += ["--optimizers", ",".join(comparison.optimizers), "--steps", steps, "--output", str(file)]
        done = subprocess.run(
            [*command, *comparison.overrides],
            check=False,
            capture_output=True,
            text=True,
            env=environment(),
        )
        if done.returncode:
            lines = (done.stderr or done.stdout).strip().splitlines()
            console.print(f"efficiency could not be measured: {lines[-1] if lines else done.returncode}")
            return None
    return json.loads(file.read_text())


def report(
    comparison: Comparison, best: dict[str, float], efficiency: dict[str, Any] | None, arguments: str, console: Console
) -> None:
    """Data, tables and figures."""
    folder = comparison.folder / "report"
    folder.mkdir(exist_ok=True)
    arms = [
        {"optimizer": arm.optimizer, "learning_rate": arm.learning_rate, "seed": arm.seed, **result}
        for arm, result in comparison.results.items()
    ]
    example = next(arm for arm, result in comparison.results.items() if result["status"] != "failed")
    run = json.loads((comparison.folder / example.name / "run.json").read_text())
    session = run["sessions"][-1]
    content = {
        "settings": shlex.join([comparison.config.config, *comparison.overrides]),
        "command": f"python -m examples.pretrain compare {arguments}",
        "date": time.strftime("%Y-%m-%d"),
        "machine": {**session["device"], "system": session["machine"], "cores": session["cores"]},
        "versions": session["versions"],
        "config": run["config"],
        "parameters": run["parameters"],
        "text": {"source": run["data"]["source"], "fingerprint": run["fingerprint"]},
        "best": best,
        "arms": arms,
        "efficiency": efficiency,
    }
    text = comparison_report.write(folder, content)
    console.print(f"\n{text}\nReport, data and figures: {folder}/")
