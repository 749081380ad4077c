# SPDX-License-Identifier: Apache-2.0
"""Matched comparison: the same model, data order and budget under several optimizers, learning rates and seeds.

First every optimizer runs at every learning rate with the first seed (``--seed``, 0); then, where some are named, with
other learning rates of AdamW's part and other weight decays, one after the other and each at the best of what went
before; then at its best with the other seeds. So all have the same budget. A stopped comparison goes on where it was.
``--jobs`` runs arms side by side, each with an equal share of the cores.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich.console import Console

from . import cluster, comparison_report, configs, data, mesh
from .arms import Arm, Study, stop
from .config import RunError, check, flag
from .processes import on_signals
from .variants import Variant, read_variants


@dataclass(frozen=True)
class Options:
    """Compare optimizers at matched settings. Any flag of ``train`` may follow and holds for every arm."""

    config: str = "first_run"
    """Named configuration."""
    optimizers: str = "adamw,muon,mano,normpre_g,normpre_l"
    """Optimizers, separated by commas; normpre_l:matrix.rank=8 is one with a setting of its own."""
    learning_rates: str = ""
    """Peak learning rates to try, separated by commas; "muon:8e-3" is for that optimizer only. Empty: the
    configuration's."""
    adam_ratios: str = ""
    """Learning rates of AdamW's part over the matrices', to be tried beside the configuration's at the best learning
    rate."""
    weight_decays: str = ""
    """Weight decays to be tried beside the configuration's at the best of both."""
    seeds: int = 1
    """Seeds (of initialisation and data order) at each optimizer's best settings, counted from ``--seed``."""
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


@dataclass
class Comparison:
    """What is to be run, and where."""

    options: Options
    variants: list[Variant]
    learning_rates: dict[Variant, list[float]]
    tuned: dict[str, list[float]]
    study: Study


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain compare --config nano --learning-rates 2e-3,4e-3,8e-3 --seeds 3 --jobs 2``."""
    options, overrides = tyro.cli(
        Options, args=list(arguments), return_unknown_args=True, prog="python -m examples.pretrain compare"
    )
    comparison = plan(options, overrides)
    with on_signals(stop):
        run(comparison, shlex.join(arguments), Console(markup=False, highlight=False, soft_wrap=True))


def run(comparison: Comparison, arguments: str, console: Console) -> None:
    """All arms, table 2, and the report."""
    options, study, variants = comparison.options, comparison.study, comparison.variants
    data.open_corpus(study.config.data, console.print)  # once, before arms could make it side by side
    first = study.config.seed
    sweep = [Arm(variant, rate, first) for variant in variants for rate in comparison.learning_rates[variant]]
    sweep.sort(key=lambda arm: arm.learning_rate)
    console.print(
        f"{study.config.config}: {len(sweep)} arms of {', '.join(map(str, variants))}, then {options.seeds} "
        f"seed(s) at the best learning rates; {study.config.steps:,} steps each, in {study.folder}/"
    )
    with study.begun():
        study.run(sweep, console)
        for name, values in comparison.tuned.items():
            best = best_arms(study.results, first).values()
            study.run([arm._replace(**{name: value}) for value in values for arm in best], console)
        best = best_arms(study.results, first)
        more = range(first + 1, first + options.seeds)
        study.run([arm._replace(seed=seed) for seed in more for arm in best.values()], console)
        efficiency = study.efficiency(variants, options.efficiency_steps, console) if options.efficiency else None
        report(study, best, efficiency, arguments, console)
    if not best:
        raise RunError("no arm came to its end: every learning rate was too high, or see the reasons above")


def plan(options: Options, overrides: list[str]) -> Comparison:
    """Read and check everything before the first arm.

    Raises:
        RunError: naming the flag and what it may be.
    """
    if options.seeds < 1 or options.jobs < 1 or options.efficiency_steps < 1:
        raise RunError("--seeds, --jobs and --efficiency-steps must be at least 1")
    study = make_study("compare", options.config, overrides, options.runs_folder, options.name, options.jobs)
    variants = read_variants(options.optimizers, study.config_flags)
    rates = learning_rates(options.learning_rates, variants, study.config.learning_rate)
    tuned = {name: numbers_of(name, getattr(options, name + "s")) for name in ("adam_ratio", "weight_decay")}
    return Comparison(options, variants, rates, tuned, study)


def make_study(kind: str, config_name: str, overrides: list[str], runs_folder: Path, name: str, jobs: int) -> Study:
    """A study of ``kind`` whose arms share ``overrides`` of a configuration.

    Raises:
        RunError: naming the flag and what it may be.
    """
    flags = ["--config", config_name, *overrides]
    config = configs.parse(flags)
    check(config)
    mesh.check(config)
    cluster.refuse_several(config, kind)
    if config.resume or config.overwrite:
        raise RunError(f"{kind} goes on where it was by itself: leave --resume and --overwrite out, or give a --name")
    name = name or f"{kind}-{config_name}"
    if Path(name).name != name:
        raise RunError(f"--name must be a plain folder name, got {name!r}")
    return Study(config, flags, runs_folder / name, jobs)


def learning_rates(text: str, variants: Sequence[Variant], default: float) -> dict[Variant, list[float]]:
    """What "1e-3,muon:2e-3" means for every optimizer, in ascending order.

    Raises:
        RunError: where it is not of that form.
    """
    rates: dict[Variant, set[float]] = {variant: set() for variant in variants}
    for entry in filter(None, (part.strip() for part in text.split(","))):
        name, _, number = entry.rpartition(":")
        meant = [variant for variant in variants if name in ("", str(variant))]
        if not meant:
            raise RunError(f"--learning-rates: {name!r} is none of the optimizers {', '.join(map(str, variants))}")
        try:
            rate = float(number)
        except ValueError as error:
            raise RunError(f"--learning-rates: numbers separated by commas, got {text!r}") from error
        if not 0 < rate < float("inf"):
            raise RunError(f"--learning-rates must be positive, got {entry!r}")
        for variant in meant:
            rates[variant].add(rate)
    return {variant: sorted(found) or [default] for variant, found in rates.items()}


def numbers_of(name: str, text: str) -> list[float]:
    """What "0,0.1" means, in ascending order.

    Raises:
        RunError: where it is not of that form.
    """
    try:
        found = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise RunError(f"{flag(name)}s: numbers separated by commas, got {text!r}") from error
    least = 0 if name == "weight_decay" else np.finfo(float).tiny
    if not all(least <= value < np.inf for value in found):
        raise RunError(f"{flag(name)}s must be {'0 or more' if least == 0 else 'positive'}, got {text!r}")
    return found


def best_arms(results: dict[Arm, dict[str, Any]], first: int) -> dict[Variant, Arm]:
    """For every optimizer with a finished arm the one of the first seed with the lowest loss."""
    best: dict[Variant, tuple[float, Arm]] = {}
    for arm, result in results.items():
        if arm.seed == first and result["status"] == "finished":
            found = (result["best_validation_loss"], arm)
            best[arm.variant] = min(best.get(arm.variant, found), found, key=lambda pair: pair[0])
    return {variant: arm for variant, (_, arm) in best.items()}


def report(
    study: Study,
    best: dict[Variant, Arm],
    efficiency: dict[str, Any] | None,
    arguments: str,
    console: Console,
) -> None:
    """Data, tables and figures."""
    folder = study.folder / "report"
    folder.mkdir(exist_ok=True)
    content = {
        **study.facts(f"compare {arguments}"),
        "best": {str(variant): arm.learning_rate for variant, arm in best.items()},
        "tuned": {str(variant): arm.tuned for variant, arm in best.items()},
        "arms": [arm.facts | result for arm, result in study.results.items()],
        "efficiency": efficiency,
    }
    text = comparison_report.write(folder, content)
    console.print(f"\n{text}\nReport, data and figures: {folder}/")
