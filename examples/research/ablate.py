# SPDX-License-Identifier: Apache-2.0
"""Ablations: what one choice in NormPre is worth, everything else being as published.

``python -m examples.research.ablate tangent --config nano --seeds 3 --jobs 2`` trains every variant under every seed at
the configuration's learning rate and writes a table beside the paper's, a figure and the data. Ablations of one
configuration share a folder, so what two of them have in common runs once; a stopped one goes on where it was.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import tyro
from rich.console import Console

from examples.pretrain import data
from examples.pretrain.arms import Arm, Study, stop
from examples.pretrain.compare import make_study
from examples.pretrain.config import Config, RunError, check
from examples.pretrain.configs import parse
from examples.pretrain.processes import on_signals
from examples.pretrain.variants import Variant
from examples.research import ablation_report, command, efficiency
from examples.research import train as train  # adds the optimizers of ablations


@dataclass(frozen=True)
class Options:
    """Change one choice in NormPre at a time. Any flag of ``train`` may follow and holds for every arm.

    NAME is tangent, orientation, source, rank (the paper's), sketch, newton_schulz, rms, momentum, layers; or all.
    """

    config: str = "nano"
    """Named configuration."""
    seeds: int = 3
    """Seeds (of initialisation and data order) of every variant."""
    jobs: int = 1
    """Arms that run side by side. More than one on a machine with one accelerator is slower, not faster."""
    name: str = ""
    """Name of the folder; ablate-<config> where none is given."""
    runs_folder: Path = Path("runs")
    """Where it is made: an arm's run in each subfolder, and report/."""
    rows: str = ""
    """Rows of the table to run beside the published one, separated by semicolons; all where empty."""
    efficiency: bool = True
    """Measure the optimizer's time per step, too, where the ablation is about it (rank, sketch, newton_schulz)."""
    efficiency_steps: int = 100
    """Steps of that measurement, after a fifth as many that are not counted."""


G, L = "normpre_g", "normpre_l"


class Ablation(NamedTuple):
    """Rows of a table: settings, one of which is the published one.

    Attributes:
        title: of the table.
        rows: settings by the row's name; None stands for AdamW. One that begins with _ ends the optimizer's name.
        published: name of the row that is the method as published.
        optimizers: what the settings are applied to, in columns.
        shared: settings of every row.
        paper: the paper's validation losses on GPT-2 Small (one seed) by row, in the order of ``optimizers``.
        paper_rows: the paper's names of those rows, where they are others.
        axis: what the rows' names count, where they are numbers.
        timed: whether the optimizer's time matters.
    """

    title: str
    rows: Mapping[str, tuple[str, ...] | None]
    published: str
    optimizers: tuple[str, ...] = (G, L)
    shared: tuple[str, ...] = ()
    paper: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    paper_rows: Mapping[str, str] = MappingProxyType({})
    axis: str = ""
    timed: bool = False

    def variant(self, row: str, optimizer: str) -> Variant:
        """What trains in a cell of the table."""
        settings = self.rows[row]
        if settings is None:
            return Variant("adamw")
        suffix = "".join(setting for setting in settings if setting.startswith("_"))
        return Variant(optimizer + suffix, (*self.shared, *(s for s in settings if not s.startswith("_"))))


def ablations(config: Config) -> dict[str, Ablation]:
    """All of them by name, for the model of ``config``."""

    def numbers(name: str, values: Sequence[float]) -> dict[str, tuple[str, ...]]:
        usual = getattr(config.matrix, name)
        return {f"{v:g}": () if v == usual else (f"matrix.{name}={v:g}",) for v in values}

    wide = config.model.width >= 512
    ranks = (8, 16, 32, 64) if wide else tuple(config.model.width * k // 64 for k in (2, 4, 8, 16))
    rank = config.matrix.rank if wide else config.model.width // 8
    inputs = "+".join(f"attention/{part}" for part in ("qkv", "query", "key", "value"))
    return {
        "tangent": Ablation(
            "Momentum processing",
            {"no tangent": ("matrix.tangent=none",), "strict": ("matrix.tangent=strict",), "relaxed": ()},
            "relaxed",
            paper={"no tangent": (3.0945, 3.1139), "strict": (3.1869, 3.1196), "relaxed": (3.0711, 3.0864)},
        ),
        "orientation": Ablation(
            "Orientation of the normalization",
            {
                "rows": ("matrix.orientation=rows",),
                "columns": ("matrix.orientation=columns",),
                "alternating": (),
                "rows + columns": ("matrix.orientation=both",),
            },
            "alternating",
            paper={"rows": (3.0604, 3.0817), "alternating": (3.0711, 3.0864), "rows + columns": (3.0735, 3.0878)},
        ),
        "source": Ablation(
            "Source of the interaction geometry",
            {"X": ("_from_x",), "Psi": ()},
            "Psi",
            paper={"X": (3.0900, 3.1305), "Psi": (3.0711, 3.0864)},
        ),
        "rank": Ablation(
            "Spectral budget",
            numbers("rank", ranks),
            f"{ranks[2]}",
            (L,),
            paper=dict(zip(map(str, ranks), ((3.0962,), (3.0908,), (3.0864,), (3.0827,)), strict=True)),
            paper_rows={
                str(r): theirs for r, theirs in zip(ranks, ("8", "16", "32", "64"), strict=True) if str(r) != theirs
            },
            axis="rank",
            timed=True,
        ),
        "sketch": Ablation(
            f"Oversampling o and power iterations p of the sketch, rank {rank}",
            {
                "o 0, p 1": ("matrix.oversample=0",),
                "o 8, p 0": ("matrix.power_iterations=0",),
                "o 8, p 1": (),
                "o 8, p 2": ("matrix.power_iterations=2",),
                "o 16, p 1": ("matrix.oversample=16",),
                "exact": ("matrix.method=exact",),
            },
            "o 8, p 1",
            (L,),
            shared=(f"matrix.rank={rank}",),
            timed=True,
        ),
        "newton_schulz": Ablation(
            "Newton-Schulz steps and coefficients",
            {
                **{f"muon, {n}": (f"matrix.ns_steps={n}",) for n in (3, 10)},
                "muon, 5": (),
                "you, 5": ("matrix.ns_coefficients=you",),
                "polar express, 5": ("matrix.ns_coefficients=polar_express",),
            },
            "muon, 5",
            (G,),
            timed=True,
        ),
        "rms": Ablation("Target RMS", numbers("rms", (0.1, 0.2, 0.4)), "0.2", (G,), axis="target RMS"),
        "momentum": Ablation(
            "Momentum", numbers("momentum", (0.8, 0.9, 0.95, 0.98)), "0.95", (G,), axis="momentum coefficient"
        ),
        "layers": Ablation(
            "Matrices in the matrix group of NormPre-G, the others in the AdamW group",
            {
                "none (AdamW)": None,
                "attention in": (f"matrix.layers={inputs}",),
                "attention out": ("matrix.layers=attention/out",),
                "MLP in": ("matrix.layers=mlp/up+mlp/gate",),
                "MLP out": ("matrix.layers=mlp/down",),
                "all": (),
            },
            "all",
            (G,),
        ),
    }


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.research.ablate tangent --config nano --seeds 3 --jobs 2``."""
    given = list(arguments)
    word = given.pop(0) if given and not given[0].startswith("-") else ""
    prog = f"python -m examples.research.ablate {word or 'NAME'}"
    options, overrides = tyro.cli(Options, args=given, return_unknown_args=True, prog=prog)
    study = make_study("ablate", options.config, overrides, options.runs_folder, options.name, options.jobs)
    known = ablations(study.config)
    if word not in (*known, "all"):
        raise RunError(f"ablate what? {', '.join(known)} or all" + (f", not {word!r}" if word else ""))
    if options.seeds < 1 or options.efficiency_steps < 1 or options.jobs < 1:
        raise RunError("--seeds, --jobs and --efficiency-steps must be at least 1")
    if options.rows:
        known = {name: some_rows(known[name], options.rows) for name in ([word] if word != "all" else known)}
    wanted = list(known) if word == "all" else [word]
    for name in wanted:
        refuse_what_varies(name, known[name], overrides)
    for arm in (arm for name in wanted for arm in arms(known[name], study.config, 1)):
        check(parse([*study.config_flags, *arm.variant.flags]))
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with on_signals(stop):
        data.open_corpus(study.config.data, console.print)  # once, before arms could make it side by side
        with study.begun():
            for name in wanted:
                run(study, name, known[name], options, shlex.join(arguments), console)


def refuse_what_varies(name: str, ablation: Ablation, overrides: Sequence[str]) -> None:
    """The published row has no flags of its own, so what a row changes must not be set for all of them.

    Raises:
        RunError: naming the flag.
    """
    rows = (ablation.variant(row, who).flags for row in ablation.rows for who in ablation.optimizers)
    varied = {part for flags in rows for part in flags if part.startswith("--")} | {"--seed"}
    for given in overrides:
        if given.partition("=")[0].replace("_", "-") in varied:
            raise RunError(f"{given.partition('=')[0]} is what `ablate {name}` sets itself: leave it out")


def some_rows(ablation: Ablation, text: str) -> Ablation:
    """The rows that ``text`` names, and the published one.

    Raises:
        RunError: where there is no such row.
    """
    named = [row.strip() for row in text.split(";")]
    unknown = [row for row in named if row not in ablation.rows]
    if unknown:
        raise RunError(f"--rows must be of {'; '.join(ablation.rows)}, got {unknown[0]!r}")
    rows = {row: s for row, s in ablation.rows.items() if row in (*named, ablation.published)}
    paper = {row: losses for row, losses in ablation.paper.items() if row in rows}
    return ablation._replace(rows=rows, paper=paper)


def arms(ablation: Ablation, config: Config, seeds: int) -> list[Arm]:
    """Every variant under every seed, seed by seed."""
    variants = [ablation.variant(row, name) for row in ablation.rows for name in ablation.optimizers]
    return [Arm(variant, config.learning_rate, seed) for seed in range(seeds) for variant in dict.fromkeys(variants)]


def run(study: Study, name: str, ablation: Ablation, options: Options, arguments: str, console: Console) -> None:
    """The arms of one ablation, and its report."""
    wanted = arms(ablation, study.config, options.seeds)
    console.print(f"{ablation.title}: {len(wanted)} arms of {study.config.steps:,} steps, in {study.folder}/")
    study.run(wanted, console)
    cost = None
    if ablation.timed and options.efficiency:
        variants = list(dict.fromkeys(arm.variant for arm in wanted))
        cost = efficiency.of_study(study, variants, options.efficiency_steps, console, f"efficiency-{name}.json")
    folder = study.folder / "report"
    folder.mkdir(exist_ok=True)
    cells = {str(ablation.variant(row, who)): (row, who) for row in ablation.rows for who in ablation.optimizers}
    content = {
        **study.facts(f"ablate {arguments}"),
        "command": f"python -m examples.research.ablate {arguments}",
        "name": name,
        "title": ablation.title,
        "rows": list(ablation.rows),
        "optimizers": list(ablation.optimizers),
        "published": ablation.published,
        "axis": ablation.axis,
        "paper": dict(ablation.paper),
        "paper_rows": dict(ablation.paper_rows),
        "cost": cost and {"/".join(cells[spec]): row["optimizer_ms"] for spec, row in cost["rows"].items()},
        "arms": [
            {"row": cells[str(arm.variant)][0], "optimizer": cells[str(arm.variant)][1], "seed": arm.seed}
            | study.results[arm]
            for arm in wanted
        ],
    }
    text = ablation_report.write(folder, content)
    console.print(f"\n{text}\nReport, data and figure: {folder}/{name}.*\n")


if __name__ == "__main__":
    sys.exit(command.run(main))
