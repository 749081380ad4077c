# SPDX-License-Identifier: Apache-2.0
"""Compare optimizers at the same model, data order and budget.

First every optimizer runs at every learning rate with the first seed, then at its best
one with the other seeds.
"""

import re
from collections.abc import Mapping, Sequence

from .. import configs
from ..config import Compare, RunError
from ..names import join_name, split_name
from . import report
from .arms import Arm
from .results import best_runs
from .study import Study, command_line, make_study


def main(options: Compare) -> None:
    """Run a comparison and write its report.

    ``python -m examples.pretrain compare --config nano --learning-rates 2e-3,4e-3,8e-3
    --seeds 3 --jobs 2``.
    """
    study = make_study("compare", options, "--optimizer")
    rates = learning_rates(options, study)
    with study.begun():
        run_sweep(study, rates, options.seeds - 1)
        best = best_learning_rates(study)
        if not best:
            raise RunError(
                "no arm finished: every learning rate was too high, or see the reasons"
                " above"
            )
        first = study.config.seed
        more_arms: list[Arm] = []
        for seed in range(first + 1, first + options.seeds):
            more_arms += [Arm(name, rate, seed) for name, rate in best.items()]
        study.run(more_arms)
        write_report(study)


def run_sweep(
    study: Study, rates: Mapping[str, Sequence[float]], more_seeds: int
) -> None:
    """Run every optimizer at all of its learning rates with the first seed."""
    seed = study.config.seed
    arms: list[Arm] = []
    for optimizer, tried in rates.items():
        arms += [Arm(optimizer, rate, seed) for rate in tried]
    study.console.print(
        f"{study.config.config}: {len(arms)} runs, then {more_seeds} more seed(s) at"
        f" the best learning rates; {study.config.steps:,} steps each, in"
        f" {study.folder}/"
    )
    study.run(sorted(arms, key=lambda arm: arm.learning_rate))


def best_learning_rates(study: Study) -> dict[str, float]:
    """The best learning rate of every optimizer that finished at one."""
    runs = best_runs({"arms": study.records()})
    return {name: arms[0]["learning_rate"] for name, arms in runs.items()}


def write_report(study: Study) -> None:
    """Write the report of a study, and print its table of losses."""
    content = study.facts(command_line()) | {"arms": study.records()}
    folder = study.folder / "report"
    folder.mkdir(exist_ok=True)
    losses = report.write(folder, content)
    study.console.print(f"\n{losses}\nReport, data and figures: {folder}/")


def split_names(text: str) -> list[str]:
    """The optimizers of "muon,normpre_l,rank=8".

    A setting belongs to the name before it.
    """
    parts = re.split(r",(?![^,]*=)", text.replace(" ", ""))
    return [name for name in parts if name]


def learning_rates(options: Compare, study: Study) -> dict[str, list[float]]:
    """The learning rates to try with every optimizer, in ascending order.

    The names of the optimizers are without learning rates.

    Raises:
        RunError: if an optimizer or a learning rate cannot be.
    """
    common = common_learning_rates(options.learning_rates)
    rates: dict[str, list[float]] = {}
    for text in split_names(options.optimizers):
        config = configs.parse([*options.rest, "--optimizer", text])
        base, settings = split_name(text)
        own = settings.pop("learning_rate", None)
        wanted = common
        if own or not common:
            wanted = [config.learning_rate]
        name = join_name(base, settings)
        tried = rates.setdefault(name, [])
        for rate in wanted:
            if f"{rate:g}" in [f"{other:g}" for other in tried]:
                raise RunError(
                    f"--optimizers: {text} with learning rate {rate:g} is listed twice"
                )
            tried.append(rate)
            study.check(Arm(name, rate, 0))
    if not rates:
        raise RunError("--optimizers must name at least one")
    return {optimizer: sorted(tried) for optimizer, tried in rates.items()}


def common_learning_rates(text: str) -> list[float]:
    """The numbers of ``--learning-rates``.

    Raises:
        RunError: if one is no number.
    """
    try:
        return [float(part) for part in text.split(",") if part.strip()]
    except ValueError as error:
        raise RunError(
            f"--learning-rates: numbers separated by commas, got {text!r}"
        ) from error
