# SPDX-License-Identifier: Apache-2.0
"""The paper's result figures from runs.

    python -m examples.research.figures --run runs/NAME --out FOLDER

Spectra with quartile bands by training step and transformation energy as stacked bars,
rows active and columns active; gradient norm and descent alignment; losses. A run keeps
what they need with ``--keep-checkpoints 1000``.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import tyro

from examples.pretrain.compare.results import NAMES
from examples.pretrain.config import RunError
from examples.research import command, figure_data, figure_drawing, report
from examples.research.figure_drawing import ENERGIES

# Share of the top 32 modes in %, over the checkpoints of NormPre-L on GPT-2 Small,
# width 768.
PAPER_SHARES_OF_ENERGY = {"rows": "62-67", "columns": "55-60"}
CAPTIONS = {
    "spectra": (
        "Eigenvalues of the momentum's Gram matrix after the relaxed tangent,"
        " {orientation} active, before (solid; scaled to the same trace) and after"
        " normalization (dotted): mean over matrices and, shaded, from the 25th to the"
        " 75th percentile. At one: the target of preconditioning. Below {lowest:g}"
        " nothing is shown."
    ),
    "energy": (
        "Share of the squared change of singular values by mode, {orientation} active,"
        " mean over matrices. Left bars: global preconditioning changes all of it;"
        " right bars: local preconditioning changes the largest modes."
    ),
    "gradient_norm": (
        "Global gradient norm before clipping: every step (light) and mean of the last"
        " 50 steps (dark)."
    ),
    "alignment": (
        "Cosine between the gradient of the next batch and the optimizer's direction"
        " without weight decay, mean over hidden matrices, at the checkpoints (single"
        " batches, no moving average)."
    ),
    "losses": (
        "Training loss, mean of the last 50 steps (light), and validation loss"
        " (points). The first tenth of the steps is left out."
    ),
}
SOURCES = {
    "mu": "AdamW's average of gradients stands for the momentum",
    "gradient": (
        "the gradient stands for the momentum, which the optimizer does not keep"
    ),
}


@dataclass(frozen=True)
class Options:
    """Draw the paper's figures from the checkpoints and logs of runs."""

    run: tuple[Path, ...] = ()  # Folders of runs: runs/<name>.
    out: Path = Path("figures")  # Folder for the figures, figures.json and README.md.
    # Modes that local preconditioning clips; the first is drawn, the table has all.
    # None given: the run's own.
    rank: tuple[int, ...] = ()
    # Checkpoints whose spectra and energies are drawn; none given: those nearest to 1,
    # 5, 10, 20, 50 and 100 % of the run, as in the paper.
    steps: tuple[int, ...] = ()
    tokens: Path | None = None  # Folder of the token files, if it has moved.


def check(options: Options) -> None:
    """Refuse what cannot be drawn.

    Raises:
        RunError: naming the flag.
    """
    if not options.run:
        raise RunError("--run must name the folders of runs: --run runs/NAME ...")
    for rank in options.rank:
        if rank < 1:
            raise RunError(f"--rank must be at least 1, got {rank}")
    if options.out.exists() and not options.out.is_dir():
        raise RunError(f"--out {options.out} is not a folder")


def energy_table(runs: Sequence[dict[str, Any]]) -> str:
    """Shares of the transformation energy by run, rank and step, beside the paper's."""
    titles = ["run", "rank", "step"]
    titles += ["rows: top", "remain", "sub", "columns: top", "remain", "sub"]
    lines = []
    for run in runs:
        for rank in map(str, run["ranks"]):
            lines += energy_lines(run, rank)
    paper = "paper: NormPre-L, GPT-2 Small, width 768"
    lines.append([paper, "32", "100 to 10,000", *_top_only(PAPER_SHARES_OF_ENERGY)])
    return report.markdown_table(titles, lines)


def energy_lines(run: dict[str, Any], rank: str) -> list[list[str]]:
    """Lines of one run: the shown checkpoints, and the range of all of them."""
    lines = []
    tops: dict[str, list[float | None]] = {side: [] for side in PAPER_SHARES_OF_ENERGY}
    for checkpoint in run["checkpoints"]:
        cells = []
        for side, found in tops.items():
            shares = checkpoint[side]["energies"][rank]
            found.append(shares["top"])
            cells += [percent(shares[part]) for part in ENERGIES]
        if checkpoint["step"] in run["shown"]:
            lines.append([run["name"], rank, f"{checkpoint['step']:,}", *cells])
    count = f"all {len(run['checkpoints'])} checkpoints"
    ranges = {side: span(found) for side, found in tops.items()}
    lines.append([run["name"], rank, count, *_top_only(ranges)])
    return lines


def _top_only(sides: Mapping[str, str]) -> list[str]:
    """Cells of a line that says nothing of the other modes."""
    return [sides["rows"], "", "", sides["columns"], "", ""]


def percent(share: float | None) -> str:
    """A share in per cent."""
    if share is None:
        return "NaN"
    return f"{100 * share:.1f}"


def span(shares: Sequence[float | None]) -> str:
    """From the smallest to the largest share, in per cent."""
    known = [share for share in shares if share is not None]
    if not known:
        return "NaN"
    return f"{100 * min(known):.1f}-{100 * max(known):.1f}"


RUN_COLUMNS = {
    "optimizer": lambda run: NAMES[run["optimizer"]][0],
    "learning rate": lambda run: f"{run['learning_rate']:g}",
    "model": lambda run: run["model"],
    "parameters": lambda run: f"{run['parameters']:,}",
    "steps": lambda run: f"{run['steps']:,}",
    "tokens per step": lambda run: f"{run['tokens_a_step']:,}",
    "checkpoints": lambda run: str(len(run["checkpoints"])),
    "last validation loss": lambda run: str(run["losses"]["validation"][-1]),
    "last alignment": lambda run: str(run["checkpoints"][-1]["alignment"]),
}


def markdown(content: dict[str, Any], drawn: Sequence[str]) -> str:
    """The report."""
    machine = content["machine"]
    versions = content["versions"]
    runs = content["runs"]
    commands = [
        f"- `{run['command']}` ({run['device']}, jax {run['versions']['jax']})\n"
        for run in runs
    ]
    parts = [
        f"# Figures of {', '.join(run['name'] for run in runs)}\n",
        (
            f"`{content['command']}`, {content['date']}, {machine['device']},"
            f" {machine['cores']} core(s), Python {versions['python']}, jax"
            f" {versions['jax']}, optax {versions['optax']}, numpy"
            f" {versions['numpy']}.\n"
        ),
        "## Runs\n",
        report.table("run", RUN_COLUMNS, {run["name"]: run for run in runs}),
        "".join(commands),
        "".join(f"- {remark}\n" for remark in remarks_on(runs)),
        "## Transformation energy\n",
        (
            "In % of the energy of all modes, mean over hidden matrices: the at most"
            " `rank` largest eigenvalues above one (top), the others above one"
            " (remain), those below one (sub).\n"
        ),
        energy_table(runs),
        "## Figures\n",
    ]
    for name in drawn:
        title = name.replace("_", " ")
        parts.append(f"![{title}]({name}.png)\n\n{caption(name)}\n")
    return "\n".join(part for part in parts if part)


def remarks_on(runs: Sequence[dict[str, Any]]) -> list[str]:
    """What a reader has to know to compare runs."""
    remarks = []
    for run in runs:
        for source in run["momentum"]:
            if source in SOURCES:
                remarks.append(f"{run['name']}: {SOURCES[source]}.")
    if len({(run["vocabulary"], run["text"]) for run in runs}) > 1:
        remarks.append(
            "The runs have different texts or vocabularies: their losses per token"
            " cannot be compared."
        )
    return remarks


def caption(name: str) -> str:
    """The caption of a figure, such as ``losses`` or ``spectra_rows``."""
    kind = name
    orientation = ""
    if name not in CAPTIONS:
        kind, _, orientation = name.partition("_")
    return CAPTIONS[kind].format(
        orientation=orientation, lowest=figure_drawing.LOWEST_EIGENVALUE
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all runs, then draw.

    Raises:
        RunError: where the user can fix something; it names the flag.
    """
    options = tyro.cli(
        Options, args=arguments, prog="python -m examples.research.figures"
    )
    check(options)
    opened = [figure_data.open_run(folder, options.tokens) for folder in options.run]
    # All are checked before any is measured, which takes long.
    chosen = []
    for run in opened:
        chosen.append((run, run.ranks(options.rank), run.shown(options.steps)))
    runs = [figure_data.numbers(*one) for one in chosen]
    command_line = report.command("figures", options)
    content = report.header(command_line, jax.devices()[0]) | {"runs": runs}
    options.out.mkdir(parents=True, exist_ok=True)
    written = json.dumps(content, separators=(",", ":"))
    (options.out / "figures.json").write_text(written + "\n")
    drawn = figure_drawing.draw(options.out, runs)
    (options.out / "README.md").write_text(markdown(content, drawn))
    print(energy_table(runs))
    print(f"Figures, numbers and report: {options.out}/")


if __name__ == "__main__":
    sys.exit(command.run(main))
