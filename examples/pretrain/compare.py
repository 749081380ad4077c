# SPDX-License-Identifier: Apache-2.0
"""Compare optimizers at the same model, data order and budget, over learning rates and seeds.

First every optimizer runs at every learning rate with the first seed (``--seed``, 0). Then, if any are given, it tries
other learning rates of the AdamW group, and after them other weight decays, each at the best setting so far. Last it
runs at its best setting with the other seeds. So all optimizers have the same budget. A stopped comparison resumes.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console

from . import cluster, comparison_report, configs, data, mesh
from .arms import Arm, Study, stop
from .config import RunError, check
from .processes import on_signals
from .variants import Variant, read_variants


@dataclass(frozen=True)
class Options:
    """Compare optimizers at matched settings. Any flag of ``train`` may follow; it applies to every arm."""

    config: str = "first_run"
    """Named configuration."""
    optimizers: str = "adamw,muon,mano,normpre_g,normpre_l"
    """Optimizers, separated by commas; normpre_l:matrix.rank=8 is one with a setting of its own."""
    learning_rates: str = ""
    """Peak learning rates to try, separated by commas; "muon:8e-3" is for that optimizer only. Default: the
    configuration's."""
    adam_ratios: str = ""
    """Learning rates of the AdamW group, relative to that of the matrix group, to try at the best learning rate."""
    weight_decays: str = ""
    """Weight decays to try at the best of both."""
    seeds: int = 1
    """Seeds (of initialization and data order) at each optimizer's best settings, counted from ``--seed``."""
    jobs: int = 1
    """Arms that run side by side, each with an equal share of the cores. With one accelerator, 1 is fastest."""
    name: str = ""
    """Name of the comparison. Default: compare-<config>."""
    runs_folder: Path = Path("runs")
    """Its folder is made here: the run of an arm in each subfolder, and report/."""


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.pretrain compare --config nano --learning-rates 2e-3,4e-3,8e-3 --seeds 3 --jobs 2``."""
    prog = "python -m examples.pretrain compare"
    options, overrides = tyro.cli(Options, args=list(arguments), return_unknown_args=True, prog=prog)
    if options.seeds < 1 or options.jobs < 1:
        raise RunError("--seeds and --jobs must be at least 1")
    study = make_study("compare", options.config, overrides, options.runs_folder, options.name, options.jobs)
    variants = read_variants(options.optimizers, study.config_flags)
    rates = learning_rates(options.learning_rates, variants, study.config.learning_rate)
    tuned = {
        "adam_ratio": numbers("--adam-ratios", options.adam_ratios),
        "weight_decay": numbers("--weight-decays", options.weight_decays, zero=True),
    }
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with on_signals(stop), study.begun():
        run(study, rates, tuned, options.seeds, console)
        content = study.facts(f"compare {shlex.join(arguments)}") | {"arms": study.records()}
        folder = study.folder / "report"
        folder.mkdir(exist_ok=True)
        console.print(f"\n{comparison_report.write(folder, content)}\nReport, data and figures: {folder}/")


def run(
    study: Study, rates: dict[Variant, list[float]], tuned: dict[str, list[float]], seeds: int, console: Console
) -> None:
    """Run all arms: learning rates, then the ``tuned`` settings one after the other, then further seeds.

    Raises:
        RunError: if no arm finishes.
    """
    data.open_corpus(study.config.data, console.print)  # once, before arms make it side by side
    first = study.config.seed
    sweep = [Arm(variant, rate, first) for variant, found in rates.items() for rate in found]
    console.print(
        f"{study.config.config}: {len(sweep)} arms of {', '.join(map(str, rates))}, then {seeds} seed(s) at the best "
        f"settings; {study.config.steps:,} steps each, in {study.folder}/"
    )
    study.run(sorted(sweep, key=lambda arm: arm.learning_rate), console)
    for name, values in tuned.items():
        best = best_arms(study.results, first).values()
        study.run([arm._replace(**{name: value}) for value in values for arm in best], console)
    best = best_arms(study.results, first)
    if not best:
        raise RunError("no arm finished: every learning rate was too high, or see the reasons above")
    study.run([arm._replace(seed=first + i) for i in range(1, seeds) for arm in best.values()], console)


def make_study(kind: str, config_name: str, overrides: list[str], runs_folder: Path, name: str, jobs: int) -> Study:
    """Make a study of ``kind`` whose arms share ``overrides`` of a configuration.

    Raises:
        RunError: naming the flag and its valid values.
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
        RunError: if a part is no learning rate, or of an optimizer that is not compared.
    """
    rates: dict[str, list[float]] = {str(variant): [] for variant in variants}
    for entry in filter(None, map(str.strip, text.split(","))):
        name, _, number = entry.rpartition(":")
        if name not in ("", *rates):
            raise RunError(f"--learning-rates: {name!r} is none of the optimizers {', '.join(rates)}")
        for variant in [name] if name else rates:
            rates[variant] += numbers("--learning-rates", number)
    return {variant: sorted(set(rates[str(variant)])) or [default] for variant in variants}


def numbers(name: str, text: str, *, zero: bool = False) -> list[float]:
    """The numbers in "0,0.1", in ascending order; they must be positive, or may be ``zero``.

    Raises:
        RunError: if a part is none.
    """
    try:
        found = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError as error:
        raise RunError(f"{name}: numbers separated by commas, got {text!r}") from error
    if not all(0 < value < float("inf") or (zero and value == 0) for value in found):
        raise RunError(f"{name} must be {'0 or more' if zero else 'positive'}, got {text!r}")
    return found


def best_arms(results: dict[Arm, dict[str, Any]], first: int) -> dict[Variant, Arm]:
    """For every optimizer with a finished arm, the one of seed ``first`` with the lowest loss."""
    finished = {arm: x["best_validation_loss"] for arm, x in results.items() if x["status"] == "finished"}
    ranked = sorted((arm for arm in finished if arm.seed == first), key=lambda arm: -finished[arm])
    return {arm.variant: arm for arm in ranked}
