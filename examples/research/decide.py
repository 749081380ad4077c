# SPDX-License-Identifier: Apache-2.0
"""Decide between optimizers.

    python -m examples.research.decide --config nano --seeds 41-48 --optimizers "..."

Each optimizer is tuned on seeds 0 to 2 and compared with a baseline on other seeds, by
the differences of runs with the same initialization and data order. Tuning goes one
option after the other with seed 0: learning rate of the matrix group, that of the AdamW
group, and weight decay where matrices have one. Learning rates are extended by factors
of two until the best is not at an end. The two best settings then also run with seeds 1
and 2. An optimizer whose name has a learning rate is not tuned. A stopped program
resumes.
"""

import dataclasses
import functools
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tyro

from examples.pretrain.compare.arms import Arm
from examples.pretrain.compare.results import label
from examples.pretrain.compare.study import Study, make_study
from examples.pretrain.compare.tables import setting, table
from examples.pretrain.config import RunError, read_compare
from examples.pretrain.names import is_relative, join_name, split_name
from examples.research import command, report
from examples.research import train as train  # adds the optimizers of ablations

TUNE = (0, 1, 2)  # seeds
SLOPE = (0.9, 1.1)  # of the steps, for the baseline's slope


@dataclass(frozen=True)
class Options:
    """Compare tuned optimizers with a baseline on fresh seeds. Any flag of ``train``
    may follow.
    """

    optimizers: str  # Separated by semicolons; the first is the baseline.
    config: str = "nano"  # Named configuration.
    seeds: str = "41-43"  # Seeds that decide, as first-last.
    learning_rates: str = "8e-3,1.6e-2,3.2e-2"  # Of the matrix group, tried first.
    # Of the AdamW group; the first while the matrix group's is tuned.
    adam_learning_rates: str = "1.6e-2,8e-3"
    # Where matrices have one; the first while learning rates are tuned.
    weight_decays: str = "0.1,0.03,0.3"
    steps_saved: bool = True  # Train the baseline for 0.9 and 1.1 times the steps, too.
    jobs: int = 1  # Runs side by side.
    name: str = ""  # Name of the folder; empty: decide-<config>.
    runs_folder: Path = Path("runs")  # Where it is made.
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()  # Options of train.


class Setting(NamedTuple):
    """What is tuned of an optimizer, in the order in which it is tuned."""

    learning_rate: float  # Of the matrix group.
    adam_learning_rate: float
    weight_decay: float


# Flags whose values are tried first; each is a field of ``Setting`` in the plural.
GRIDS = ("learning_rates", "adam_learning_rates", "weight_decays")
EXTENDED = ("learning_rate", "adam_learning_rate")  # beyond the values tried first


def arm(optimizer: str, chosen: Setting | None, seed: int) -> Arm:
    """The run of an optimizer with a setting; None is that of its name."""
    name, settings = split_name(optimizer)
    if chosen is None:
        rate = float(settings.pop("learning_rate"))
        return Arm(join_name(name, settings), rate, seed)
    settings["adam_learning_rate"] = f"{chosen.adam_learning_rate:g}"
    # The default is left out: names of folders are without it.
    if chosen.weight_decay != 0.1:
        settings["weight_decay"] = f"{chosen.weight_decay:g}"
    return Arm(join_name(name, settings), chosen.learning_rate, seed)


def loss(study: Study, one: Arm) -> float:
    """The last validation loss of a run that has ended; infinite if it diverged."""
    found = study.results[one].get("validation_loss")
    if found is None:
        return np.inf
    return found


# --- Tuning
# ------------------------------------------------------------------------------------


def tune(
    study: Study, optimizers: Sequence[str], options: Options
) -> dict[str, Setting]:
    """The best setting of every optimizer on the seeds to tune on."""
    grids = {}
    for option, flag in zip(Setting._fields, GRIDS, strict=True):
        grids[option] = _numbers(flag, getattr(options, flag), ",", float)
    first = Setting(**{option: grid[0] for option, grid in grids.items()})
    tuning = _Tuning(study, dict.fromkeys(optimizers, first))
    for option, grid in grids.items():
        tuning.search(option, grid)
    return tuning.best_of_finalists()


class _Tuning:
    """The settings tried so far, and the best of each optimizer."""

    def __init__(self, study: Study, best: dict[str, Setting]) -> None:
        self.study = study
        self.best = best
        self.tried: dict[str, set[Setting]] = {name: set() for name in best}

    def score(
        self, optimizer: str, chosen: Setting, seeds: Sequence[int] = TUNE[:1]
    ) -> float:
        """Mean loss of a setting over seeds that have run."""
        arms = [arm(optimizer, chosen, seed) for seed in seeds]
        return float(np.mean([loss(self.study, one) for one in arms]))

    def search(self, option: str, grid: Sequence[float]) -> None:
        """Run the values of ``grid``, and more while the best is at an end of them."""
        wanted: dict[str, set[Setting]] = {}
        for name, chosen in self.best.items():
            if option in EXTENDED or not is_relative(name):
                wanted[name] = {chosen._replace(**{option: value}) for value in grid}
        while wanted:
            self.run(wanted)
            beyond: dict[str, set[Setting]] = {}
            for name in wanted:
                more = self.choose(name, option)
                if more is not None and option in EXTENDED:
                    beyond[name] = {more}
            wanted = beyond

    def run(self, wanted: Mapping[str, set[Setting]]) -> None:
        """Run settings with the first seed."""
        arms: list[Arm] = []
        for name, found in wanted.items():
            arms += [arm(name, chosen, TUNE[0]) for chosen in sorted(found)]
            self.tried[name] |= found
        self.study.run(arms)

    def choose(self, name: str, option: str) -> Setting | None:
        """Keep the best value of an option.

        Returns:
            The next setting beyond it if it is at an end of those tried and did not
            diverge, else None.
        """
        line = self._alike_but_for(option, name)
        best = min(line, key=functools.partial(self.score, name))
        self.best[name] = best
        if best == line[0]:
            factor = 0.5
        elif best == line[-1]:
            factor = 2.0
        else:
            return None
        if not np.isfinite(self.score(name, best)):
            return None
        return best._replace(**{option: factor * getattr(best, option)})

    def _alike_but_for(self, option: str, name: str) -> list[Setting]:
        """What was tried with the best values of all other options, in order."""
        without = self.best[name]._replace(**{option: 0})
        return sorted(
            chosen
            for chosen in self.tried[name]
            if chosen._replace(**{option: 0}) == without
        )

    def best_of_finalists(self) -> dict[str, Setting]:
        """The better of each optimizer's two best settings, on all seeds to tune on."""
        finalists: dict[str, list[Setting]] = {}
        for name, found in self.tried.items():
            finalists[name] = sorted(found, key=functools.partial(self.score, name))[:2]
        arms: list[Arm] = []
        for seed in TUNE[1:]:
            for name, two in finalists.items():
                arms += [arm(name, chosen, seed) for chosen in two]
        self.study.run(arms)
        best = {}
        for name, two in finalists.items():
            best[name] = min(two, key=functools.partial(self.score, name, seeds=TUNE))
        return best


def _numbers(flag: str, text: str, between: str, kind: type) -> list[Any]:
    """The numbers that the user wrote for ``--flag``."""
    try:
        return [kind(part) for part in text.split(between)]
    except ValueError:
        name = flag.replace("_", "-")
        raise RunError(
            f"--{name} must be numbers with {between!r} between them, got {text!r}"
        ) from None


# --- The command
# ------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = read_compare(arguments, Options, "examples.research.decide")
    tuned = ("--learning-rate", "--adam-learning-rate", "--weight-decay")
    study = make_study("decide", options, "--optimizer", "--seed", *tuned)
    written = [part.strip().replace(" ", "") for part in options.optimizers.split(";")]
    optimizers = [name for name in written if name]
    seeds = seeds_of(options)
    check_optimizers(study, optimizers, options)
    with study.begun():
        chosen = settings_that_decide(study, optimizers, options)
        arms: list[Arm] = []
        for seed in seeds:
            arms += [arm(name, chosen[name], seed) for name in optimizers]
        study.run(arms)
        by_name = {}
        for name in optimizers:
            by_name[name] = [arm(name, chosen[name], seed) for seed in seeds]
        shorter = slope(study, by_name[optimizers[0]], options)
        content = study.facts(
            f"python -m examples.research.decide {shlex.join(arguments)}"
        )
        content |= {
            "seeds": list(seeds),
            "rows": rows_of(study, by_name),
            "slope": shorter,
            "arms": arms_of(study),
        }
        write_report(study, content)


def seeds_of(options: Options) -> range:
    """The seeds that decide.

    Raises:
        RunError: if they are not first-last, or some of them are for tuning.
    """
    ends = _numbers("seeds", options.seeds, "-", int)
    seeds = range(ends[0], ends[-1] + 1)
    if not seeds or len(ends) > 2 or set(seeds) & set(TUNE):
        raise RunError(
            f"--seeds {options.seeds}: write first-last; seeds 0 to 2 are for tuning"
        )
    return seeds


def check_optimizers(study: Study, optimizers: Sequence[str], options: Options) -> None:
    """Refuse what cannot run.

    Raises:
        RunError: if one is there twice, none is there, one is not known, or one that is
            tuned sets what is tuned.
    """
    if not optimizers or len(set(optimizers)) < len(optimizers):
        raise RunError(
            f"--optimizers {options.optimizers!r}: name each optimizer once, at"
            " least one"
        )
    for name in optimizers:
        _, settings = split_name(name)
        setting_to_check = None
        if "learning_rate" not in settings:
            setting_to_check = Setting(1e-2, 1e-2, 0.1)  # any: the name is checked
            found = {"adam_learning_rate", "weight_decay"} & settings.keys()
            if found:
                raise RunError(
                    f"--optimizers: {name} is tuned, also its {min(found)}: remove it,"
                    " or add learning_rate="
                )
        study.check(arm(name, setting_to_check, 0))


def settings_that_decide(
    study: Study, optimizers: Sequence[str], options: Options
) -> dict[str, Setting | None]:
    """The tuned setting of every optimizer, None for one whose name has its own."""
    chosen: dict[str, Setting | None] = {}
    to_tune = []
    for name in optimizers:
        if "learning_rate" in split_name(name)[1]:
            chosen[name] = None
        else:
            to_tune.append(name)
    return chosen | tune(study, to_tune, options)


def slope(study: Study, arms: Sequence[Arm], options: Options) -> list[float]:
    """Mean losses of the baseline at 0.9, 1 and 1.1 times the steps.

    Empty without ``--steps-saved``.
    """
    if not options.steps_saved:
        return []
    means = []
    for factor in (SLOPE[0], 1.0, SLOPE[1]):
        own = study
        if factor != 1:
            own = with_steps(study, round(factor * study.config.steps))
        own.run(arms)
        means.append(float(np.mean([loss(own, one) for one in arms])))
    return means


def with_steps(study: Study, steps: int) -> Study:
    """The study of runs of so many steps, in a folder within that of ``study``."""
    folder = study.folder / f"{steps}_steps"
    folder.mkdir(exist_ok=True)
    return dataclasses.replace(
        study,
        config_flags=[*study.config_flags, "--steps", str(steps)],
        folder=folder,
        results={},
    )


# --- The report
# ------------------------------------------------------------------------------------


def rows_of(study: Study, arms: Mapping[str, Sequence[Arm]]) -> list[dict[str, Any]]:
    """Losses of every optimizer and their differences from the first, the baseline."""
    losses = {}
    for name, of_seeds in arms.items():
        losses[name] = [loss(study, one) for one in of_seeds]
    baseline = next(iter(losses.values()))
    rows = []
    for name, found in losses.items():
        example = arms[name][0]
        rows.append(
            {
                "optimizer": label(example.optimizer),
                "learning_rate": example.learning_rate,
                "losses": found,
                "less": list(np.subtract(found, baseline)),
            }
        )
    return rows


def arms_of(study: Study) -> list[dict[str, Any]]:
    """All runs of a study with what a report keeps of them."""
    kept = (*Arm._fields, "status", "validation_loss", "train_seconds")
    arms = []
    for record in study.records():
        arms.append({key: record.get(key) for key in kept})
    return arms


def write_report(study: Study, content: dict[str, Any]) -> None:
    """Write the report into the study's folder, and print its table."""
    shown = decision(content)
    page = f"# Decision: {content['settings']}\n\n{setting(content)}\n{shown}"
    folder = study.folder / "report"
    report.write(folder, "decision", content, page, page_name="README.md")
    study.console.print(f"\n{shown}\nReport: {study.folder}/report/")


def decision(content: dict[str, Any]) -> str:
    """The table of losses, their mean, and differences from the baseline.

    The losses are those of the seeds that decide; the baseline is first.
    """
    rows = content["rows"]
    means = content["slope"]
    heads = ["optimizer", "learning rate", *map(str, content["seeds"])]
    heads += ["mean", "deviation", "less the baseline", "t", "steps saved"]
    lines = []
    for row in rows:
        cells = loss_cells(row)
        if row is not rows[0]:
            cells += difference_cells(np.array(row["less"]))
            cells.append(steps_saved(float(np.mean(row["losses"])), means))
        empty = [""] * (len(heads) - len(cells))
        lines.append(cells + empty)
    return f"{table(heads, lines)}\n{slope_note(content['config']['steps'], means)}"


def loss_cells(row: dict[str, Any]) -> list[str]:
    """Name, learning rate, losses, their mean and sample standard deviation."""
    losses = row["losses"]
    deviation = ""
    if len(losses) > 1:
        deviation = f"{np.std(losses, ddof=1):.4f}"
    return [
        row["optimizer"],
        f"{row['learning_rate']:g}",
        *(f"{value:.4f}" for value in losses),
        f"{np.mean(losses):.4f}",
        deviation,
    ]


def difference_cells(less: np.ndarray) -> list[str]:
    """Mean difference from the baseline with its standard error, and t."""
    mean = f"{less.mean():+.4f}"
    if len(less) < 2 or not np.isfinite(less).all():
        return [mean, ""]
    error = np.std(less, ddof=1) / len(less) ** 0.5
    if not error:
        return [mean, ""]
    return [f"{mean} ± {error:.4f}", f"{less.mean() / error:.1f}"]


def steps_saved(loss: float, means: Sequence[float]) -> str:
    """How many more steps the baseline would need for this loss, as a share.

    The loss is taken to fall with the logarithm of the steps. Empty where the slope is
    not known, or the baseline's loss does not fall.
    """
    if not means or not np.isfinite(loss):
        return ""
    shorter, usual, longer = means
    if not longer < shorter:
        return ""
    per_nat = np.log(SLOPE[1] / SLOPE[0]) / (longer - shorter)
    return f"{np.exp((loss - usual) * per_nat) - 1:+.1%}"


def slope_note(steps: int, means: Sequence[float]) -> str:
    """The line below the table, if the slope was measured."""
    if not means:
        return ""
    return (
        f"The baseline at {SLOPE[0]} and {SLOPE[1]} times the {steps:,} steps:"
        f" {means[0]:.4f}, {means[2]:.4f}.\n"
    )


if __name__ == "__main__":
    sys.exit(command.run(main))
