# SPDX-License-Identifier: Apache-2.0
"""The paper's result figures from runs: ``python -m examples.research.figures --run runs/NAME --out FOLDER``.

Spectra with quartile bands by training step and transformation energy as stacked bars, rows active and columns active;
gradient norm and descent alignment; losses. A run keeps what they need with ``--keep-checkpoints 1000``.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.pretrain.comparison_report import NAMES
from examples.pretrain.config import RunError
from examples.research import command, figure_data, figure_drawing, report

PAPER_SHARES_OF_ENERGY = {"rows": "62-67", "columns": "55-60"}
"""Share of the top 32 modes in %, over the checkpoints of NormPre-L on GPT-2 Small, width 768."""
CAPTIONS = {
    "spectra": "Eigenvalues of the momentum's Gram matrix after the relaxed tangent, {orientation} active, before "
    "(solid; scaled to the same trace) and after normalisation (dotted): mean over matrices and, shaded, from the 25th "
    "to the 75th percentile. At one: the target of preconditioning. Below {lowest:g} nothing is shown.",
    "energy": "Share of the squared change of singular values by mode, {orientation} active, mean over matrices. Left "
    "bars: global preconditioning changes all of it; right bars: local preconditioning changes the largest modes.",
    "gradient_norm": "Global gradient norm before clipping: every step (light) and mean of the last 50 steps (dark).",
    "alignment": "Cosine between the gradient of the next batch and the optimizer's direction without weight decay, "
    "mean over hidden matrices, at the checkpoints (single batches, no moving average).",
    "losses": "Training loss, mean of the last 50 steps (light), and validation loss (points). The first tenth of the "
    "steps is left out.",
}
SOURCES = {
    "mu": "AdamW's average of gradients stands for the momentum",
    "gradient": "the gradient stands for the momentum, which the optimizer does not keep",
}


@dataclass(frozen=True)
class Options:
    """Draw the paper's figures from the checkpoints and logs of runs."""

    run: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """Folder of a run: runs/<name>; once for every run."""
    out: Path = Path("figures")
    """Folder for the figures, figures.json and README.md."""
    rank: tuple[int, ...] = ()
    """Modes that local preconditioning clips; the first is drawn, the table has all. None given: the run's own."""
    steps: tuple[int, ...] = ()
    """Checkpoints whose spectra and energies are drawn; none given: those nearest to 1, 5, 10, 20, 50 and 100 % of the
    run, as in the paper."""
    tokens: Path | None = None
    """Folder of the token files, where they are no longer where they were."""


def check(options: Options) -> None:
    """Refuse what cannot be drawn.

    Raises:
        RunError: naming the flag.
    """
    if not options.run:
        raise RunError("--run must name the folder of a run: --run runs/NAME, once for every run")
    for rank in options.rank:
        if rank < 1:
            raise RunError(f"--rank must be at least 1, got {rank}")
    if options.out.exists() and not options.out.is_dir():
        raise RunError(f"--out {options.out} is not a folder")


def command_of(options: Options) -> str:
    """The command line that these options came from."""
    parts = ["python -m examples.research.figures", *(f"--run {folder}" for folder in options.run)]
    parts += [
        f"--{name} {' '.join(map(str, v))}" for name, v in (("rank", options.rank), ("steps", options.steps)) if v
    ]
    parts += [f"--tokens {options.tokens}"] if options.tokens else []
    return " ".join([*parts, f"--out {options.out}"])


def collect(options: Options, console: Console) -> list[dict[str, Any]]:
    """The numbers of all runs, with a bar over their checkpoints on a terminal."""
    opened = [figure_data.open_run(folder, options.tokens) for folder in options.run]
    chosen = [(run, run.ranks(options.rank), run.shown(options.steps)) for run in opened]
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("checkpoints", total=sum(len(run.steps) for run in opened))
        return [figure_data.numbers(run, ranks, shown, lambda: bar.advance(task)) for run, ranks, shown in chosen]


def energy_table(runs: Sequence[dict[str, Any]]) -> str:
    """Shares of the transformation energy by run, rank and step, beside the paper's."""
    lines = [
        "| run | rank | step | rows: top | remain | sub | columns: top | remain | sub |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        shown = [checkpoint for checkpoint in run["checkpoints"] if checkpoint["step"] in run["shown"]]
        for rank in map(str, run["ranks"]):
            for checkpoint in shown:
                parts = [checkpoint[o]["energies"][rank][part] for o in PAPER_SHARES_OF_ENERGY for part in energies()]
                cells = " | ".join(percent(part) for part in parts)
                lines.append(f"| {run['name']} | {rank} | {checkpoint['step']:,} | {cells} |")
            every = run["checkpoints"]
            rows, columns = (span([c[o]["energies"][rank]["top"] for c in every]) for o in PAPER_SHARES_OF_ENERGY)
            lines.append(f"| {run['name']} | {rank} | all {len(every)} checkpoints | {rows} | | | {columns} | | |")
    rows, columns = PAPER_SHARES_OF_ENERGY.values()
    lines.append(f"| paper: NormPre-L, GPT-2 Small, width 768 | 32 | 100 to 10,000 | {rows} | | | {columns} | | |")
    return "\n".join(lines) + "\n"


def energies() -> tuple[str, ...]:
    """The components of the energy, in the order of the table."""
    return tuple(figure_drawing.ENERGIES)


def percent(share: float | None) -> str:
    """A share in per cent; None, where it was no number, as such."""
    return "no number" if share is None else f"{100 * share:.1f}"


def span(shares: Sequence[float | None]) -> str:
    """From the least to the largest share, in per cent."""
    known = [share for share in shares if share is not None]
    return f"{100 * min(known):.1f}-{100 * max(known):.1f}" if known else "no number"


def runs_table(runs: Sequence[dict[str, Any]]) -> str:
    """What the runs were, and where they ended."""
    lines = [
        "| run | optimizer | learning rate | model | parameters | steps | tokens a step | checkpoints | "
        "last validation loss | last alignment |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        last, alignment = run["losses"]["validation"][-1], run["checkpoints"][-1]["alignment"]
        lines.append(
            f"| {run['name']} | {NAMES[run['optimizer']][0]} | {run['learning_rate']:g} | {run['model']} | "
            f"{run['parameters']:,} | {run['steps']:,} | {run['tokens_a_step']:,} | {len(run['checkpoints'])} | "
            f"{last} | {alignment} |"
        )
    return "\n".join(lines) + "\n"


def remarks(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader must know before comparing."""
    found = []
    for run in runs:
        found += [f"{run['name']}: {SOURCES[source]}." for source in run["momentum"] if source in SOURCES]
    if len({(run["vocabulary"], run["text"]) for run in runs}) > 1:
        found.append("The runs have different texts or vocabularies: their losses per token cannot be compared.")
    return found


def markdown(content: dict[str, Any], drawn: Sequence[str]) -> str:
    """The report."""
    machine, versions, runs = content["machine"], content["versions"], content["runs"]
    parts = [
        f"# Figures of {', '.join(run['name'] for run in runs)}\n",
        f"`{content['command']}`, {content['date']}, {machine['device']}, {machine['cores']} core(s), Python "
        f"{versions['python']}, jax {versions['jax']}, optax {versions['optax']}, numpy {versions['numpy']}.\n",
        "## Runs\n",
        runs_table(runs),
        "".join(f"- `{run['command']}` ({run['device']}, jax {run['versions']['jax']})\n" for run in runs),
        "".join(f"- {remark}\n" for remark in remarks(runs)),
        "## Transformation energy\n",
        "In % of the energy of all modes, mean over hidden matrices: the at most `rank` largest eigenvalues above one "
        "(top), the others above one (remain), those below one (sub).\n",
        energy_table(runs),
        "## Figures\n",
    ]
    for name in drawn:
        kind, _, orientation = name.partition("_") if name not in CAPTIONS else (name, "", "")
        caption = CAPTIONS[kind].format(orientation=orientation, lowest=figure_drawing.LOWEST_EIGENVALUE)
        parts.append(f"![{name.replace('_', ' ')}]({name}.png)\n\n{caption}\n")
    return "\n".join(part for part in parts if part)


def write(folder: Path, content: dict[str, Any]) -> None:
    """The figures (PNG), ``figures.json`` and ``README.md``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "figures.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")
    (folder / "README.md").write_text(markdown(content, figure_drawing.draw(folder, content["runs"])))


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line.

    Raises:
        RunError: where something the user can mend is wrong; its one line names the flag.
    """
    options = tyro.cli(Options, args=arguments, prog="python -m examples.research.figures")
    check(options)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    runs = collect(options, console)
    content = report.header(command_of(options), jax.devices()[0]) | {"runs": runs}
    write(options.out, content)
    console.print(energy_table(runs))
    console.print(f"Figures, numbers and report: {options.out}/")


if __name__ == "__main__":
    sys.exit(command.run(main))
