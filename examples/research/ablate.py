# SPDX-License-Identifier: Apache-2.0
"""Ablations: what one choice in NormPre is worth, everything else being as published.

``python -m examples.research.ablate tangent --config nano --seeds 3 --jobs 2`` trains
every variant under every seed at the configuration's learning rate and writes a table
beside the paper's, a figure and the data. Ablations of one configuration share a
folder, so what two of them have in common runs once; a stopped one resumes.
"""

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tyro

from examples.pretrain.compare.arms import Arm
from examples.pretrain.compare.study import Study, make_study
from examples.pretrain.config import Config, RunError, read_compare
from examples.pretrain.optimizers import settings_of
from examples.research import ablation_report, command, efficiency
from examples.research import train as train  # adds the optimizers of ablations


@dataclass(frozen=True)
class Options:
    """Change one choice in NormPre at a time.

    Any flag of ``train`` may follow and holds for every arm.

    NAME is tangent, orientation, source, rank (the paper's), sketch, newton_schulz,
    rms, momentum, layers; or all.
    """

    config: str = "nano"  # Named configuration.
    seeds: int = 3  # Seeds (of initialization and data order) of every variant.
    jobs: int = 1  # Arms that run side by side. With one accelerator, 1 is fastest.
    name: str = ""  # Name of the folder; empty: ablate-<config>.
    # Where it is made: an arm's run in each subfolder, and report/.
    runs_folder: Path = Path("runs")
    # Rows of the table to run beside the published one, separated by semicolons; empty:
    # all.
    rows: str = ""
    # Measure the optimizer's time per step, too, if the ablation is about it (rank,
    # sketch, newton_schulz).
    efficiency: bool = True
    # Steps of that measurement, after a fifth as many that are not counted.
    efficiency_steps: int = 100
    rest: tyro.conf.Suppress[tuple[str, ...]] = ()  # Options of train.


G = "normpre_g"
L = "normpre_l"


class Ablation(NamedTuple):
    """Rows of a table: settings, one of which is the published one.

    Attributes:
        title: of the table.
        rows: settings by the row's name; None means AdamW. One that begins with _ ends
            the optimizer's name.
        published: name of the row that is the method as published.
        optimizers: what the settings are applied to, in columns.
        shared: settings of every row.
        paper: the paper's validation losses on GPT-2 Small (one seed) by row, in the
            order of ``optimizers``.
        paper_rows: the paper's names of those rows, where they are others.
        axis: what the rows' names count, where they are numbers.
        timed: whether the optimizer's time matters.
    """

    title: str
    rows: Mapping[str, str | None]
    published: str
    optimizers: tuple[str, ...] = (G, L)
    shared: str = ""
    paper: Mapping[str, tuple[float, ...]] = MappingProxyType({})
    paper_rows: Mapping[str, str] = MappingProxyType({})
    axis: str = ""
    timed: bool = False

    def optimizer(self, row: str, name: str) -> str:
        """The optimizer of a cell of the table."""
        settings = self.rows[row]
        if settings is None:
            return "adamw"
        if settings.startswith("_"):
            return name + settings
        return ",".join(filter(None, (name, self.shared, settings)))

    @property
    def cells(self) -> dict[str, tuple[str, str]]:
        """Row and column of every optimizer."""
        found = {}
        for row in self.rows:
            for name in self.optimizers:
                found[self.optimizer(row, name)] = (row, name)
        return found


# --- The ablations
# ------------------------------------------------------------------------------------

TANGENT = Ablation(
    "Momentum processing",
    {"no tangent": "tangent=none", "strict": "tangent=strict", "relaxed": ""},
    "relaxed",
    paper={
        "no tangent": (3.0945, 3.1139),
        "strict": (3.1869, 3.1196),
        "relaxed": (3.0711, 3.0864),
    },
)
ORIENTATION = Ablation(
    "Orientation of the normalization",
    {
        "rows": "orientation=rows",
        "columns": "orientation=columns",
        "alternating": "",
        "rows + columns": "orientation=both",
    },
    "alternating",
    paper={
        "rows": (3.0604, 3.0817),
        "alternating": (3.0711, 3.0864),
        "rows + columns": (3.0735, 3.0878),
    },
)
SOURCE = Ablation(
    "Source of the interaction geometry",
    {"X": "_from_x", "Psi": ""},
    "Psi",
    paper={"X": (3.0900, 3.1305), "Psi": (3.0711, 3.0864)},
)
NEWTON_SCHULZ = Ablation(
    "Newton-Schulz steps and coefficients",
    {
        "muon, 3": "ns_steps=3",
        "muon, 10": "ns_steps=10",
        "muon, 5": "",
        "you, 5": "ns_coefficients=you",
        "polar express, 5": "ns_coefficients=polar_express",
    },
    "muon, 5",
    (G,),
    timed=True,
)
ATTENTION_IN = "attention/qkv+attention/query+attention/key+attention/value"
LAYERS = Ablation(
    "Matrices in the matrix group of NormPre-G, the others in the AdamW group",
    {
        "none (AdamW)": None,
        "attention in": f"layers={ATTENTION_IN}",
        "attention out": "layers=attention/out",
        "MLP in": "layers=mlp/up+mlp/gate",
        "MLP out": "layers=mlp/down",
        "all": "",
    },
    "all",
    (G,),
)
PAPER_RANKS = (8, 16, 32, 64)  # of a width of 768
PAPER_LOSSES_BY_RANK = ((3.0962,), (3.0908,), (3.0864,), (3.0827,))
WIDE = 512  # from this width on the paper's ranks are used


def ablations(config: Config) -> dict[str, Ablation]:
    """All of them by name, for the model of ``config``."""
    return {
        "tangent": TANGENT,
        "orientation": ORIENTATION,
        "source": SOURCE,
        "rank": rank_ablation(config),
        "sketch": sketch_ablation(config),
        "newton_schulz": NEWTON_SCHULZ,
        "rms": Ablation(
            "Target RMS",
            numbers("rms", (0.1, 0.2, 0.4), G),
            "0.2",
            (G,),
            axis="target RMS",
        ),
        "momentum": Ablation(
            "Momentum",
            numbers("momentum", (0.8, 0.9, 0.95, 0.98), G),
            "0.95",
            (G,),
            axis="momentum coefficient",
        ),
        "layers": LAYERS,
    }


def rank_ablation(config: Config) -> Ablation:
    """The spectral budget of NormPre-L."""
    ranks = ranks_of(config)
    paper_rows = {}
    if config.model.width < WIDE:
        for rank, theirs in zip(ranks, PAPER_RANKS, strict=True):
            paper_rows[str(rank)] = str(theirs)
    return Ablation(
        "Spectral budget",
        numbers("rank", ranks, L),
        f"{ranks[2]}",
        (L,),
        paper=dict(zip(map(str, ranks), PAPER_LOSSES_BY_RANK, strict=True)),
        paper_rows=paper_rows,
        axis="rank",
        timed=True,
    )


def sketch_ablation(config: Config) -> Ablation:
    """The sketch of NormPre-L."""
    rank = ranks_of(config)[2]
    return Ablation(
        f"Oversampling o and power iterations p of the sketch, rank {rank}",
        {
            "o 0, p 1": "oversample=0",
            "o 8, p 0": "power_iterations=0",
            "o 8, p 1": "",
            "o 8, p 2": "power_iterations=2",
            "o 16, p 1": "oversample=16",
            "exact": "method=exact",
        },
        "o 8, p 1",
        (L,),
        shared=f"rank={rank}",
        timed=True,
    )


def ranks_of(config: Config) -> tuple[int, ...]:
    """The paper's ranks, or about the same shares of a narrow model's width."""
    width = config.model.width
    if width >= WIDE:
        return PAPER_RANKS
    return tuple(width * part // 64 for part in (2, 4, 8, 16))


def numbers(option: str, values: Sequence[float], optimizer: str) -> dict[str, str]:
    """Rows of an option that is a number; its default needs no setting."""
    usual = settings_of(optimizer)[1][option]
    rows = {}
    for value in values:
        rows[f"{value:g}"] = f"{option}={value:g}"
        if value == usual:
            rows[f"{value:g}"] = ""
    return rows


# --- The command
# ------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> None:
    """``python -m examples.research.ablate tangent --config nano --seeds 3``."""
    given = list(arguments)
    word = ""
    if given and not given[0].startswith("-"):
        word = given.pop(0)
    options = read_compare(given, Options, f"examples.research.ablate {word or 'NAME'}")
    study = make_study("ablate", options, "--optimizer", "--seed")
    wanted = chosen_ablations(word, options, study.config)
    for ablation in wanted.values():
        for arm in arms(ablation, study.config, 1):
            study.check(arm)
    line = f"python -m examples.research.ablate {shlex.join(arguments)}"
    with study.begun():
        for name, ablation in wanted.items():
            run(study, name, ablation, options, line)


def chosen_ablations(
    word: str, options: Options, config: Config
) -> dict[str, Ablation]:
    """The ablation that the user names, or all.

    Raises:
        RunError: if there is no such ablation, or no such row.
    """
    known = ablations(config)
    if word not in (*known, "all"):
        question = f"ablate what? {', '.join(known)} or all"
        if word:
            question += f", not {word!r}"
        raise RunError(question)
    names = [word]
    if word == "all":
        names = [*known]
    wanted = {name: known[name] for name in names}
    if options.rows:
        for name, ablation in wanted.items():
            wanted[name] = some_rows(ablation, options.rows)
    return wanted


def some_rows(ablation: Ablation, text: str) -> Ablation:
    """The rows that ``text`` names, and the published one.

    Raises:
        RunError: if there is no such row.
    """
    named = [row.strip() for row in text.split(";")]
    unknown = [row for row in named if row not in ablation.rows]
    if unknown:
        raise RunError(
            f"--rows must be of {'; '.join(ablation.rows)}, got {unknown[0]!r}"
        )
    kept = (*named, ablation.published)
    rows = {row: setting for row, setting in ablation.rows.items() if row in kept}
    paper = {row: losses for row, losses in ablation.paper.items() if row in rows}
    return ablation._replace(rows=rows, paper=paper)


def arms(ablation: Ablation, config: Config, seeds: int) -> list[Arm]:
    """Every optimizer under every seed, seed by seed."""
    found: list[Arm] = []
    for seed in range(seeds):
        for optimizer in ablation.cells:
            found.append(Arm(optimizer, config.learning_rate, seed))
    return found


def run(
    study: Study, name: str, ablation: Ablation, options: Options, line: str
) -> None:
    """The arms of one ablation, and its report."""
    wanted = arms(ablation, study.config, options.seeds)
    study.console.print(
        f"{ablation.title}: {len(wanted)} arms of {study.config.steps:,} steps, in"
        f" {study.folder}/"
    )
    study.run(wanted)
    cost = None
    if ablation.timed and options.efficiency:
        cost = cost_of(study, name, ablation, options)
    folder = study.folder / "report"
    folder.mkdir(exist_ok=True)
    content = {
        **study.facts(line),
        "name": name,
        "title": ablation.title,
        "optimizers": ablation.optimizers,
        "published": ablation.published,
        "axis": ablation.axis,
        "rows": list(ablation.rows),
        "paper": dict(ablation.paper),
        "paper_rows": dict(ablation.paper_rows),
        "cost": cost,
        "arms": results_of(study, ablation, wanted),
    }
    text = ablation_report.write(folder, content)
    study.console.print(f"\n{text}\nReport, data and figure: {folder}/{name}.*\n")


def cost_of(
    study: Study, name: str, ablation: Ablation, options: Options
) -> dict[str, float] | None:
    """Milliseconds of the optimizer by "row/column"; None if measuring fails."""
    cells = ablation.cells
    measured = efficiency.of_study(
        study, list(cells), options.efficiency_steps, f"efficiency-{name}.json"
    )
    if measured is None:
        return None
    cost = {}
    for optimizer, row in measured["rows"].items():
        cost["/".join(cells[optimizer])] = row["optimizer_ms"]
    return cost


def results_of(
    study: Study, ablation: Ablation, arms: Sequence[Arm]
) -> list[dict[str, Any]]:
    """Results of arms, each with its row and column."""
    cells = ablation.cells
    found = []
    for arm in arms:
        row, column = cells[arm.optimizer]
        place = {"row": row, "optimizer": column, "seed": arm.seed}
        found.append(place | study.results[arm])
    return found


if __name__ == "__main__":
    sys.exit(command.run(main))
