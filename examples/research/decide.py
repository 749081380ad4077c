# SPDX-License-Identifier: Apache-2.0
"""Decide between optimizers: ``python -m examples.research.decide --config nano --seeds
41-48 --optimizers "..."``.

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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


Setting = tuple[
    float, ...
]  # learning rates of the matrix group and of the AdamW group, weight decay


def arm(optimizer: str, chosen: Setting | None, seed: int) -> Arm:
    """The run of an optimizer with a setting; None is that of its name."""
    name, settings = split_name(optimizer)
    if chosen is None:
        rate = settings.pop("learning_rate")
        return Arm(join_name(name, settings), float(rate), seed)
    rate, adam, decay = chosen
    settings |= {"adam_learning_rate": f"{adam:g}"} | (
        {} if decay == 0.1 else {"weight_decay": f"{decay:g}"}
    )
    return Arm(join_name(name, settings), rate, seed)


def loss(study: Study, one: Arm) -> float:
    """The last validation loss of a run that has ended."""
    found = study.results[one].get("validation_loss")
    return np.inf if found is None else found


def tune(
    study: Study, optimizers: Sequence[str], options: Options
) -> dict[str, Setting]:
    """The best setting of every optimizer on the seeds to tune on."""
    flags = ("learning_rates", "adam_learning_rates", "weight_decays")
    grids = [_numbers(flag, getattr(options, flag), ",", float) for flag in flags]
    best: dict[str, Setting] = dict.fromkeys(
        optimizers, tuple(grid[0] for grid in grids)
    )
    tried: dict[str, set[Setting]] = {optimizer: set() for optimizer in optimizers}

    def score(
        optimizer: str, chosen: Setting, seeds: Sequence[int] = TUNE[:1]
    ) -> float:
        return float(
            np.mean([loss(study, arm(optimizer, chosen, seed)) for seed in seeds])
        )

    for axis, grid in enumerate(grids):
        extends = axis < 2  # learning rates

        def at(chosen: Setting, value: float, axis: int = axis) -> Setting:
            return (*chosen[:axis], value, *chosen[axis + 1 :])

        wanted = {
            name: {at(chosen, value) for value in grid}
            for name, chosen in best.items()
            if extends or not is_relative(name)
        }
        while wanted:
            study.run(
                [
                    arm(name, chosen, TUNE[0])
                    for name, found in wanted.items()
                    for chosen in sorted(found)
                ]
            )
            beyond: dict[str, set[Setting]] = {}
            for name, found in wanted.items():
                tried[name] |= found
                line = sorted(
                    chosen
                    for chosen in tried[name]
                    if at(chosen, 0) == at(best[name], 0)
                )
                best[name] = min(line, key=functools.partial(score, name))
                factor = {line[-1]: 2.0, line[0]: 0.5}.get(best[name])
                if factor and extends and np.isfinite(score(name, best[name])):
                    beyond[name] = {at(best[name], best[name][axis] * factor)}
            wanted = beyond
    finalists = {
        name: sorted(found, key=functools.partial(score, name))[:2]
        for name, found in tried.items()
    }
    study.run(
        [
            arm(name, chosen, seed)
            for seed in TUNE[1:]
            for name, two in finalists.items()
            for chosen in two
        ]
    )
    return {
        name: min(two, key=functools.partial(score, name, seeds=TUNE))
        for name, two in finalists.items()
    }


def _numbers(flag: str, text: str, between: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(between)]
    except ValueError:
        name = flag.replace("_", "-")
        raise RunError(
            f"--{name} must be numbers with {between!r} between them, got {text!r}"
        ) from None


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = read_compare(arguments, Options, "examples.research.decide")
    tuned = ("--learning-rate", "--adam-learning-rate", "--weight-decay")
    study = make_study("decide", options, "--optimizer", "--seed", *tuned)
    optimizers = [
        part.strip().replace(" ", "")
        for part in options.optimizers.split(";")
        if part.strip()
    ]
    ends = _numbers("seeds", options.seeds, "-", int)
    seeds = range(ends[0], ends[-1] + 1)
    if not seeds or len(ends) > 2 or set(seeds) & set(TUNE):
        raise RunError(
            f"--seeds {options.seeds}: write first-last; seeds 0 to 2 are for tuning"
        )
    if not optimizers or len(set(optimizers)) < len(optimizers):
        raise RunError(
            f"--optimizers {options.optimizers!r}: name each optimizer once, at"
            " least one"
        )
    for name in optimizers:
        settings = split_name(name)[1]
        if "learning_rate" not in settings and (
            found := {"adam_learning_rate", "weight_decay"} & settings.keys()
        ):
            raise RunError(
                f"--optimizers: {name} is tuned, also its {min(found)}: remove it, or"
                " add learning_rate="
            )
        study.check(
            arm(name, None if "learning_rate" in settings else (1e-2, 1e-2, 0.1), 0)
        )
    with study.begun():
        chosen: dict[str, Any] = {
            name: None for name in optimizers if "learning_rate" in split_name(name)[1]
        }
        chosen |= tune(
            study, [name for name in optimizers if name not in chosen], options
        )
        study.run(
            [arm(name, chosen[name], seed) for seed in seeds for name in optimizers]
        )
        losses = {
            name: [loss(study, arm(name, chosen[name], seed)) for seed in seeds]
            for name in optimizers
        }
        shorter = slope(
            study,
            [arm(optimizers[0], chosen[optimizers[0]], s) for s in seeds],
            options,
        )
        rows = [
            {
                "optimizer": label(arm(name, chosen[name], 0).optimizer),
                "learning_rate": arm(name, chosen[name], 0)[1],
            }
            | {"losses": found, "less": list(np.subtract(found, losses[optimizers[0]]))}
            for name, found in losses.items()
        ]
        content = study.facts(
            f"python -m examples.research.decide {shlex.join(arguments)}"
        )
        content |= {
            "seeds": list(seeds),
            "rows": rows,
            "slope": shorter,
            "arms": study.records(),
        }
        content["arms"] = [
            {
                k: x.get(k)
                for k in (*Arm._fields, "status", "validation_loss", "train_seconds")
            }
            for x in content["arms"]
        ]
        page = (
            "# Decision:"
            f" {content['settings']}\n\n{setting(content)}\n{decision(content)}"
        )
        report.write(
            study.folder / "report", "decision", content, page, page_name="README.md"
        )
        study.console.print(f"\n{decision(content)}\nReport: {study.folder}/report/")


def slope(study: Study, arms: Sequence[Arm], options: Options) -> list[float]:
    """Mean losses of the baseline at 0.9, 1 and 1.1 times the steps; empty without
    ``--steps-saved``.
    """
    means = []
    for factor in (SLOPE[0], 1.0, SLOPE[1]) if options.steps_saved else ():
        steps = round(factor * study.config.steps)
        flags = [*study.config_flags, "--steps", str(steps)]
        own = dataclasses.replace(
            study,
            config_flags=flags,
            folder=study.folder / f"{steps}_steps",
            results={},
        )
        own = study if factor == 1 else own
        own.folder.mkdir(exist_ok=True)
        own.run(arms)
        means.append(float(np.mean([loss(own, one) for one in arms])))
    return means


def decision(content: dict[str, Any]) -> str:
    """The table: losses of the seeds that decide, their mean, and differences from the
    baseline, which is first.
    """
    steps, means = content["config"]["steps"], content["slope"]
    heads = [
        "optimizer",
        "learning rate",
        *map(str, content["seeds"]),
        "mean",
        "deviation",
    ]
    heads += ["less the baseline", "t", "steps saved"]
    lines = []
    for row in content["rows"]:
        less, mean = np.array(row["less"]), np.mean(row["losses"])
        cells = [
            row["optimizer"],
            f"{row['learning_rate']:g}",
            *(f"{x:.4f}" for x in row["losses"]),
            f"{mean:.4f}",
        ]
        cells.append(f"{np.std(row['losses'], ddof=1):.4f}" if len(less) > 1 else "")
        if row is not content["rows"][0]:
            error = (
                np.std(less, ddof=1) / len(less) ** 0.5
                if len(less) > 1 and np.isfinite(less).all()
                else 0
            )
            cells.append(f"{less.mean():+.4f}" + f" ± {error:.4f}" * bool(error))
            cells.append(f"{less.mean() / error:.1f}" if error else "")
        if (
            row is not content["rows"][0]
            and means
            and means[2] < means[0]
            and np.isfinite(mean)
        ):  # the steps at which the baseline would have this loss
            per_nat = np.log(SLOPE[1] / SLOPE[0]) / (means[2] - means[0])
            cells.append(f"{np.exp((mean - means[1]) * per_nat) - 1:+.1%}")
        lines.append([*cells, *[""] * (len(heads) - len(cells))])
    shorter = f"{means[0]:.4f}, {means[2]:.4f}" if means else ""
    note = (
        f"The baseline at {SLOPE[0]} and {SLOPE[1]} times the {steps:,} steps:"
        f" {shorter}.\n"
        if means
        else ""
    )
    return f"{table(heads, lines)}\n{note}"


if __name__ == "__main__":
    sys.exit(command.run(main))
