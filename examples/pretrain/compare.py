# SPDX-License-Identifier: Apache-2.0
"""Compare optimizers at the same model, data order and budget, over learning rates and
seeds.

Each arm is an ordinary run (``python -m examples.pretrain train``) in a folder of its
own. First every optimizer runs at every learning rate with the first seed, then at its
best one with the other seeds. A stopped comparison resumes, and an arm that diverges or
fails is reported while the others continue.
"""

import functools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullFormatter
from rich.console import Console

from . import cluster, configs, data, mesh
from .config import Compare, Config, RunError, check_ranges, join_name, split_name
from .logs import read_json, read_lines, write_json
from .optimizers import make_optimizer
from .processes import Stopped, begin_as_child, lock, on_signals

PROGRAM = (  # what trains an arm; examples.research.train has further optimizers
    "examples.pretrain"
)
Result = dict[str, Any]


class Arm(NamedTuple):
    """One run of a comparison."""

    optimizer: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        return f"{self.optimizer}-lr{self.learning_rate:g}-seed{self.seed}".replace(
            "/", "."
        )

    @property
    def flags(self) -> list[str]:
        """Flags of ``train`` that distinguish it from the others."""
        return [
            "--optimizer",
            self.optimizer,
            "--learning-rate",
            repr(self.learning_rate),
            "--seed",
            str(self.seed),
        ]


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
        file = self.folder / "study.json"
        corpus = data.open_corpus(
            self.config, self.console
        )  # once, before arms make it side by side
        if not file.exists() and any(self.folder.rglob("run.json")):
            raise RunError(
                f"{self.folder} holds runs but no study.json: remove it, or choose"
                " another --name"
            )
        own = {
            "flags": self.config_flags,
            "fingerprint": corpus.manifest["fingerprint"],
        }
        before = own | read_json(file) if file.exists() else own
        if before["flags"] != self.config_flags:
            raise RunError(
                f"{self.folder} has other settings ({shlex.join(before['flags'])}):"
                " choose another --name"
            )
        if before != own:
            raise RunError(
                f"{self.folder} was begun with another text: choose another --name"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        with lock(self.folder) or nullcontext():
            write_json(file, own)
            with on_signals(stop):
                yield

    def check(self, arm: Arm) -> None:
        """Raise a RunError that names an option of an arm that cannot be."""
        make_optimizer(self.config_of(arm), lambda t: 0.1)

    def config_of(self, arm: Arm) -> Config:
        """The configuration that ``train`` makes of an arm's flags."""
        return configs.parse([*self.config_flags, *arm.flags])

    def run(self, arms: Sequence[Arm]) -> None:
        """Run ``arms``, ``jobs`` side by side, and keep their ``results``. Leaving
        early stops arms, which save.

        Raises:
            RunError: if the first of all arms to end has failed: then the settings are
                at fault, not the arm.
            Stopped: if an arm was stopped.
        """
        waiting, running = list(arms), dict[int, tuple[Arm, subprocess.Popen]]()
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
                time.sleep(0.2)
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
        command = [
            sys.executable,
            "-m",
            PROGRAM,
            "train",
            *self.config_flags,
            *arm.flags,
            "--name",
            arm.name,
        ]
        command += [
            "--runs-folder",
            str(self.folder),
            *["--resume"] * (folder / "run.json").exists(),
        ]
        begin = (
            functools.partial(begin_as_child, cores_of(place, self.jobs))
            if os.name == "posix"
            else None
        )
        with (self.folder / f"{arm.name}.txt").open("a") as out:
            return subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, preexec_fn=begin
            )

    def ended(self, arm: Arm, process: subprocess.Popen) -> None:
        """Record an arm whose process has ended; one that left no result has failed,
        with the last line it printed.
        """
        number = (
            -process.returncode if process.returncode < 0 else process.returncode - 128
        )
        if number in (signal.SIGTERM, signal.SIGINT):
            raise Stopped(
                f"{arm.name} was stopped; the same command resumes it", number
            )
        output = self.folder / f"{arm.name}.txt"
        if not (result := finished(self.folder / arm.name)):
            if process.returncode < 0:
                reason = (
                    f"killed by signal {number} (9 is often for lack of memory); the"
                    " same command resumes it"
                )
            else:
                said = output.read_text().strip().splitlines() or [
                    f"exit status {process.returncode}"
                ]
                reason = said[-1].removeprefix("error: ")
            if not self.results:
                raise RunError(f"{arm.name} failed: {reason} (its output: {output})")
            result = {"status": "failed", "reason": reason}
        self.record(arm, result)

    def record(self, arm: Arm, result: Result, prefix: str = "") -> None:
        """Keep a result, and print it."""
        self.results[arm] = result
        said = result.get("diverged") or f"failed: {result.get('reason')}"
        if result["status"] == "finished":
            said = (
                f"{result['best_validation_loss']:.4f} ({result['train_seconds']:.0f} s"
                " of training)"
            )
        self.console.print(f"{arm.name}  {prefix}{said}")

    def records(self) -> list[Result]:
        """The results, with the settings of each arm and the learning rate of its AdamW
        group.
        """
        found = []
        for arm, result in self.results.items():
            config = self.config_of(arm)  # its optimizer may set learning rates
            rate = config.adam_learning_rate or config.learning_rate
            found.append({**arm._asdict(), "adam_learning_rate": rate, **result})
        return found

    def facts(self, command: str) -> dict[str, Any]:
        """What a report says about all arms: settings, command, date, machine,
        versions, text.
        """
        example = next(
            arm for arm, result in self.results.items() if result["status"] != "failed"
        )
        run = read_json(self.folder / example.name / "run.json")
        session = run["sessions"][-1]
        return {
            "settings": shlex.join([self.config.config, *self.config_flags[2:]]),
            "command": command,
            "date": time.strftime("%Y-%m-%d"),
            "machine": {
                **session["device"],
                "system": session["machine"],
                "cores": session["cores"],
            },
            **{
                "versions": session["versions"],
                "config": run["config"],
                "parameters": run["parameters"],
            },
            "text": {
                key: run["data"].get(key) for key in ("source", "fingerprint", "passes")
            },
        }


def main(options: Compare) -> None:
    """``python -m examples.pretrain compare --config nano --learning-rates
    2e-3,4e-3,8e-3 --seeds 3 --jobs 2``.
    """
    study = make_study("compare", options, "--optimizer")
    rates = learning_rates(options, study)
    first = study.config.seed
    with study.begun():
        sweep = [
            Arm(optimizer, rate, first)
            for optimizer, found in rates.items()
            for rate in found
        ]
        then = (
            f"{options.seeds - 1} more seed(s) at the best learning rates;"
            f" {study.config.steps:,} steps each"
        )
        study.console.print(
            f"{study.config.config}: {len(sweep)} runs, then {then}, in {study.folder}/"
        )
        study.run(sorted(sweep, key=lambda arm: arm.learning_rate))
        best = {
            name: arms[0]["learning_rate"]
            for name, arms in best_runs({"arms": study.records()}).items()
        }
        if not best:
            raise RunError(
                "no arm finished: every learning rate was too high, or see the reasons"
                " above"
            )
        study.run(
            [
                Arm(name, rate, first + i)
                for i in range(1, options.seeds)
                for name, rate in best.items()
            ]
        )
        content = study.facts(shlex.join(["python", "-m", PROGRAM, *sys.argv[1:]])) | {
            "arms": study.records()
        }
        folder = study.folder / "report"
        folder.mkdir(exist_ok=True)
        study.console.print(
            f"\n{write(folder, content)}\nReport, data and figures: {folder}/"
        )


def make_study(kind: str, options: Any, *own: str) -> Study:
    """Make a study of ``kind``, which sets the flags ``own``; ``options`` are
    ``Compare``, or a class with its fields.

    Raises:
        RunError: naming the flag and its valid values.
    """
    for flag in {part.partition("=")[0] for part in options.rest}.intersection(own):
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
    console = Console(markup=False, highlight=False, soft_wrap=True)
    return Study(
        config, list(options.rest), options.runs_folder / name, options.jobs, console
    )


def split_names(text: str) -> list[str]:
    """The optimizers of "muon,normpre_l,rank=8": a setting belongs to the name before
    it.
    """
    return [name for name in re.split(r",(?![^,]*=)", text.replace(" ", "")) if name]


def learning_rates(options: Compare, study: Study) -> dict[str, list[float]]:
    """Every optimizer, without a learning rate in its name, and the learning rates to
    try, in ascending order.

    Raises:
        RunError: if an optimizer or a learning rate cannot be.
    """
    try:
        common = [
            float(part) for part in options.learning_rates.split(",") if part.strip()
        ]
    except ValueError as error:
        raise RunError(
            "--learning-rates: numbers separated by commas, got"
            f" {options.learning_rates!r}"
        ) from error
    rates: dict[str, list[float]] = {}
    for text in split_names(options.optimizers):
        config = configs.parse([*options.rest, "--optimizer", text])
        name, settings = split_name(text)
        own = settings.pop("learning_rate", None)
        tried = rates.setdefault(join_name(name, settings), [])
        for rate in [config.learning_rate] if own else common or [config.learning_rate]:
            if f"{rate:g}" in map("{:g}".format, tried):
                raise RunError(
                    f"--optimizers: {text} with learning rate {rate:g} is listed twice"
                )
            tried.append(rate)
            study.check(Arm(join_name(name, settings), rate, 0))
    if not rates:
        raise RunError("--optimizers must name at least one")
    return {optimizer: sorted(tried) for optimizer, tried in rates.items()}


def stop(number: int) -> None:
    """Handle a signal: arms save, and everything that has ended is kept."""
    raise Stopped("stopped; the same command resumes it", number)


def cores_of(place: int, jobs: int) -> set[int]:
    """Cores of the ``place``-th of ``jobs`` processes; empty if they are not to be
    divided.
    """
    if jobs == 1 or not hasattr(os, "sched_setaffinity"):
        return set()
    cores = sorted(os.sched_getaffinity(0))
    share = max(len(cores) // jobs, 1)
    return {cores[(place * share + i) % len(cores)] for i in range(share)}


def finished(folder: Path) -> Result | None:
    """How the run in ``folder`` ended, with what figures need of its log; None if it
    has not ended.

    These are every validation loss, at most 100 means of training losses, and row
    norms.
    """
    try:
        result = read_json(folder / "result.json")
    except (OSError, RunError):
        return None
    if not {"best_validation_loss", "diverged"} & result.keys():
        return None
    lines = read_lines(folder / "log.jsonl")
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    parts = [
        part
        for part in np.array_split(np.array(losses).reshape(-1, 2), 100)
        if len(part)
    ]
    scores = [line for line in lines if "validation_loss" in line]
    return {
        "status": "diverged" if "diverged" in result else "finished",
        **result,
        "train": [
            [int(part[-1, 0]), round(float(part[:, 1].mean()), 5)] for part in parts
        ],
        "validation": [
            [line["step"], round(line["validation_loss"], 6)] for line in scores
        ],
        "row_norm": [
            [line["step"], round(line["row_norm"], 5), round(line["rows_beyond_1"], 5)]
            for line in scores
        ],
        "norms": {
            name: round(x, 4)
            for name, x in (scores or [{}])[-1].items()
            if "_norm" in name or "beyond" in name
        },
    }


# The report, from the content of a ``comparison.json``.

# Label and color of every optimizer. Those of the paper are distinguishable with every
# common color blindness (Okabe and Ito); the others have the rest of that palette and
# of Paul Tol's.
NAMES = {
    "adamw": ("AdamW", "#000000"),
    "normpre_h": ("NormPre-H", "#9933FF"),
    "muon": ("Muon", "#0072B2"),
    "mano": ("MANO", "#E69F00"),
    "rmnp": ("RMNP", "#56B4E9"),
    "muoneq": ("MuonEq", "#332288"),
    "normuon": ("NorMuon", "#CC79A7"),
    "normpre_g": ("NormPre-G", "#D55E00"),
    "normpre_l": ("NormPre-L", "#009E73"),
}
LINE_STYLES = ("-", "--", ":", "-.")
MARKERS = "os^Dv"
SHOWN_FROM_SHARE = 0.1  # all runs look alike in the first tenth of the steps


def write(folder: Path, content: dict[str, Any]) -> str:
    """Write ``comparison.json``, the figures (PNG) and ``README.md`` into ``folder``;
    returns the table of losses.
    """
    (folder / "comparison.json").write_text(json.dumps(content) + "\n")
    shown = ""
    for name, paint in {
        "losses": paint_losses,
        "learning_rates": paint_learning_rates,
    }.items():
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        if paint(figure.add_subplot(), content):
            frame(figure.axes[0], legend="below")
            save(figure, folder / name)
            shown += f"\n![{name.replace('_', ' ')}]({name}.png)\n\n{paint.__doc__}\n"
    (folder / "README.md").write_text(markdown(content) + shown)
    return losses_table(content)


def label(optimizer: str) -> str:
    """``normpre_l,rank=8,tangent=none`` as ``NormPre-L, rank=8, tangent=none``."""
    base, *settings = optimizer.split(",")
    return ", ".join((NAMES[base][0] if base in NAMES else base, *settings))


def optimizers(content: dict[str, Any]) -> list[str]:
    """Names in the order of ``NAMES``; those of one optimizer side by side, the one
    without settings first.
    """
    present = dict.fromkeys(arm["optimizer"] for arm in content["arms"])
    order = [
        *NAMES,
        *sorted({name.partition(",")[0] for name in present} - NAMES.keys()),
    ]
    return sorted(
        present, key=lambda name: (order.index(name.partition(",")[0]), "," in name)
    )


def style(optimizer: str, content: dict[str, Any]) -> dict[str, Any]:
    """Label, color, line and marker; line and marker distinguish settings of one
    optimizer.
    """
    base = optimizer.partition(",")[0]
    place = [
        other for other in optimizers(content) if other.partition(",")[0] == base
    ].index(optimizer)
    line, marker = (
        LINE_STYLES[place % len(LINE_STYLES)],
        MARKERS[place // len(LINE_STYLES) % len(MARKERS)],
    )
    color = NAMES.get(base, ("", "#BBBBBB"))[1]
    return {
        "label": label(optimizer),
        "color": color,
        "linestyle": line,
        "marker": marker,
        "markersize": 4,
    }


def first_seed(content: dict[str, Any]) -> int:
    """The seed with which the learning rates were chosen."""
    return min(arm["seed"] for arm in content["arms"])


def swept(content: dict[str, Any], optimizer: str) -> list[dict[str, Any]]:
    """Arms of the first seed, by learning rate."""
    arms = (
        arm
        for arm in content["arms"]
        if (arm["optimizer"], arm["seed"]) == (optimizer, first_seed(content))
    )
    return sorted(arms, key=lambda arm: arm["learning_rate"])


def best_runs(content: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Arms (seeds) of each optimizer at the learning rate that is best with the first
    seed, of those that finished.
    """
    found = {}
    for name in optimizers(content):
        arms = [
            arm
            for arm in content["arms"]
            if arm["optimizer"] == name and arm["status"] == "finished"
        ]
        first = [arm for arm in swept(content, name) if arm["status"] == "finished"]
        if first:
            best = min(first, key=lambda arm: arm["best_validation_loss"])[
                "learning_rate"
            ]
            found[name] = [arm for arm in arms if arm["learning_rate"] == best]
    return found


def curves(arms: Sequence[dict[str, Any]], losses: str) -> np.ndarray:
    """Steps and "validation" or "train" losses of arms, (arms, points, 2); no points if
    a log was damaged.
    """
    found = [arm.get(losses, ()) for arm in arms]
    return np.array(found if len(set(map(len, found))) == 1 else ()).reshape(
        len(arms), -1, 2
    )


def mean_loss(arms: Sequence[dict[str, Any]]) -> float:
    """Mean of the best validation losses."""
    return float(np.mean([arm["best_validation_loss"] for arm in arms]))


def step_of(loss: float, arms: Sequence[dict[str, Any]]) -> float:
    """Step at which the mean validation loss of arms falls to ``loss``, interpolated;
    NaN if never, or unknown.
    """
    steps, losses = curves(arms, "validation").mean(0).T
    lowest = np.minimum.accumulate(losses)[::-1]
    return (
        float(np.interp(loss, lowest, steps[::-1], left=math.nan))
        if len(steps)
        else math.nan
    )


def paired(*optimizers: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The arms of each optimizer with the seeds that all of them have, in the same
    order.
    """
    by_seed = [{arm["seed"]: arm for arm in arms} for arms in optimizers]
    seeds = sorted(set.intersection(*map(set, by_seed)))
    return [[arms[seed] for seed in seeds] for arms in by_seed]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "".join(
        f"| {' | '.join(row)} |\n" for row in (heads, ["---"] * len(heads), *rows)
    )


def losses_table(content: dict[str, Any]) -> str:
    """Best validation loss at the best learning rate: mean and sample standard
    deviation over seeds; bold: the lowest.

    With the norms of the hidden matrices' rows and columns at the end, of the first
    seed.
    """
    runs, rows = best_runs(content), []
    least = min(map(mean_loss, runs.values()), default=0.0)
    for name, arms in runs.items():
        rates, best = (
            [arm["learning_rate"] for arm in swept(content, name)],
            arms[0]["learning_rate"],
        )
        end = (
            {rates[-1]: " (largest)", rates[0]: " (smallest)"}.get(best, "")
            if len(rates) > 1
            else ""
        )
        mean = (
            f"**{least:.4f}**" if mean_loss(arms) == least else f"{mean_loss(arms):.4f}"
        )
        deviation = (
            f"{np.std([arm['best_validation_loss'] for arm in arms], ddof=1):.4f}"
            if len(arms) > 1
            else ""
        )
        norms = [
            f"{arms[0]['norms'][x]:.2f}" if arms[0].get("norms") else ""
            for x in ("row_norm", "column_norm")
        ]
        group = f"{arms[0].get('adam_learning_rate', best):g}"
        rows.append(
            [
                label(name),
                f"{best:g}{end}",
                group,
                mean,
                deviation,
                str(len(arms)),
                *norms,
            ]
        )
    heads = [
        "optimizer",
        "learning rate",
        "of the AdamW group",
        "validation loss",
        "deviation",
        "seeds",
    ]
    seeds = {frozenset(arm["seed"] for arm in arms) for arms in runs.values()}
    note = "\nRuns are missing: these means are of different seeds.\n" * (
        len(seeds) > 1
    )
    return table([*heads, "row norm", "column norm"], rows) + note


def differences_table(content: dict[str, Any]) -> str:
    """By how much the best optimizer is ahead over common seeds, and at which step it
    has another's loss.
    """
    runs, rows = best_runs(content), []
    best = min(runs, key=lambda name: mean_loss(runs[name]), default="")
    for name in [name for name in runs if name != best]:
        others, own = paired(runs[name], runs[best])
        ahead = [
            a["best_validation_loss"] - b["best_validation_loss"]
            for a, b in zip(others, own, strict=True)
        ]
        gain = f"{np.mean(ahead):.4f}" if ahead else ""
        error = (
            f" ± {np.std(ahead, ddof=1) / len(ahead) ** 0.5:.4f}"
            if len(ahead) > 1
            else ""
        )
        reached = ""
        if own:
            step = step_of(mean_loss(others), own)
            fewer = f"{step:,.0f} ({1 - step / content['config']['steps']:.0%} fewer)"
            reached = "not reached, or a log is damaged" if math.isnan(step) else fewer
        rows.append([label(name), gain + error, reached])
    note = "Steps are where the mean loss first falls to the other's, interpolated. "
    note += (
        "The learning rate is still high there, so a run of so many steps would end"
        " lower."
    )
    heads = ["optimizer", f"{label(best)} is ahead by", "and has its loss at step"]
    return f"{table(heads, rows)}\n{note}\n" if rows else ""


def runs_table(content: dict[str, Any]) -> str:
    """Best validation loss of every run, by learning rate, and why runs failed."""
    rates = sorted({arm["learning_rate"] for arm in content["arms"]})
    rows: dict[tuple[str, str], dict[float, str]] = {}
    for arm in sorted(
        content["arms"], key=lambda arm: optimizers(content).index(arm["optimizer"])
    ):
        shown = (
            f"{arm['best_validation_loss']:.4f}"
            if arm["status"] == "finished"
            else arm["status"]
        )
        rows.setdefault((label(arm["optimizer"]), str(arm["seed"])), {})[
            arm["learning_rate"]
        ] = shown
    heads = ["optimizer", "seed", *(f"{rate:g}" for rate in rates)]
    failed = [arm for arm in content["arms"] if arm["status"] == "failed"]
    reasons = [
        f"\n{label(arm['optimizer'])}, seed {arm['seed']}, failed: {arm['reason']}\n"
        for arm in failed
    ]
    runs = table(
        heads,
        [[*key, *(row.get(rate, "") for rate in rates)] for key, row in rows.items()],
    )
    return runs + "".join(reasons)


def setting(content: dict[str, Any]) -> str:
    """Command, model, budget, machine and versions of a report, in a paragraph."""
    config, machine, versions = (
        content["config"],
        content["machine"],
        content["versions"],
    )
    tokens = config["steps"] * config["batch_size"] * config["model.context"]
    passes = content["text"].get("passes")  # None in reports of versions before 0.3
    text = content["text"]["source"] + (
        f", {passes:.2g} passes over it" if passes else ""
    )
    return (
        f"`{content['command']}`, {content['date']}. {content['parameters']:,}"
        f" parameters ({config['model.family']}, {config['model.layers']} layers, width"
        f" {config['model.width']}), {config['steps']:,} steps of"
        f" {config['batch_size']} x {config['model.context']} tokens ({tokens:,}) of"
        f" {text}. {machine['kind']}, {machine['cores']} core(s) a run, Python"
        f" {versions['python']}, jax {versions['jax']}.\n"
    )


def markdown(content: dict[str, Any]) -> str:
    """The report, without figures."""
    parts = {
        f"# Comparison: {content['settings']}": setting(content),
        "## Validation loss": (
            "Best validation loss in nats per token at each optimizer's best learning"
            " rate: mean and sample standard deviation over seeds, of which the first"
            " chose the learning rates; mean norms of the hidden matrices' rows and"
            " columns at the end, first seed. If the best is the smallest or largest"
            " tried, the optimum may lie beyond.\n\n" + losses_table(content)
        ),
        "## Differences over common seeds, mean ± standard error": differences_table(
            content
        ),
        "## Every run, by learning rate": runs_table(content),
    }
    return "\n".join(f"{heading}\n\n{part}" for heading, part in parts.items() if part)


def paint_losses(axes: Axes, content: dict[str, Any]) -> bool:
    """Validation loss at the best learning rates, mean and range of seeds, without the
    first tenth; thin: training.
    """
    runs = best_runs(content)
    for name, arms in runs.items():
        look, scores, train = (
            style(name, content),
            curves(arms, "validation"),
            curves(arms, "train").mean(0),
        )
        if not (scores.size and train.size):  # the log of an arm was damaged
            return False
        begin = scores[0, scores[0, :, 0] >= SHOWN_FROM_SHARE * train[-1, 0], 0].min()
        scores, train = scores[:, scores[0, :, 0] >= begin], train[train[:, 0] >= begin]
        axes.plot(*train.T, color=look["color"], alpha=0.4, linewidth=0.8)
        axes.plot(*scores.mean(0).T, **look)
        losses = scores[:, :, 1]
        axes.fill_between(
            scores[0, :, 0],
            losses.min(0),
            losses.max(0),
            color=look["color"],
            alpha=0.2,
            linewidth=0,
        )
    best, next_best = (
        paired(*sorted(runs.values(), key=mean_loss)[:2]) if len(runs) > 1 else ([], [])
    )
    if best:
        loss, last = mean_loss(next_best), content["config"]["steps"]
        step = step_of(loss, best)
        if not math.isnan(step):
            look = {
                "color": "0.3",
                "linewidth": 0.8,
                "label": f"{1 - step / last:.0%} fewer steps than the next best",
            }
            axes.plot([step, last], [loss, loss], "|-", **look)
    over_steps(axes)
    axes.set_ylabel("loss (nats per token)")
    return bool(runs)


def paint_learning_rates(axes: Axes, content: dict[str, Any]) -> bool:
    """Best validation loss, first seed. The axis ends not far above every best."""
    curves, rates = {}, sorted({arm["learning_rate"] for arm in content["arms"]})
    for name in optimizers(content):
        arms = [arm for arm in swept(content, name) if arm["status"] == "finished"]
        if arms:
            curves[name] = np.array(
                [(arm["learning_rate"], arm["best_validation_loss"]) for arm in arms]
            )
            axes.plot(*curves[name].T, **style(name, content))
    if max(map(len, curves.values()), default=0) < 2:
        return False
    optima = [points[:, 1].min() for points in curves.values()]
    worst = max(points[:, 1].max() for points in curves.values())
    span = max(max(optima) - min(optima), 0.05)
    axes.set_ylim(
        min(optima) - 0.05 * span, min(worst + 0.05 * span, max(optima) + 0.3 * span)
    )
    axes.set(
        xscale="log",
        xlabel="peak learning rate",
        ylabel="validation loss (nats per token)",
    )
    axes.set_xticks(rates, [f"{rate:g}" for rate in rates])
    axes.xaxis.set_minor_formatter(NullFormatter())
    return True


def over_steps(axes: Axes) -> None:
    """An axis of steps."""
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))


def frame(axes: Axes, legend: str = "beside") -> None:
    """Few lines, and a legend without a box: ``beside`` the axes, or ``below`` the
    figure if labels are long.
    """
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
    handles, labels = axes.get_legend_handles_labels()
    if labels and legend == "beside":
        axes.legend(
            fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5)
        )
    elif labels:
        figure, columns = axes.figure, max(1, min(4, 96 // (max(map(len, labels)) + 6)))
        assert isinstance(figure, Figure)
        figure.legend(
            handles,
            labels,
            fontsize=8,
            frameon=False,
            loc="outside lower center",
            ncols=columns,
        )
        figure.set_figheight(3.6 + 0.18 * math.ceil(len(labels) / columns))


def save(figure: Figure, file: Path) -> None:
    """Write the figure as a PNG; the same figure gives the same bytes."""
    figure.savefig(file.with_suffix(".png"), dpi=150)
