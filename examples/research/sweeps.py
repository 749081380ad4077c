# SPDX-License-Identifier: Apache-2.0
"""Learning rates of several comparisons joined: ``python -m examples.research.sweeps FOLDER ... --out FOLDER``.

Each ``FOLDER`` holds the ``comparison.json`` of ``python -m examples.pretrain compare`` at another width, depth, length
of training or batch, or of another ``--seed``: those of one size are averaged. The table and the figure show the loss
over the learning rate for every optimizer and size, and at which rate it is lowest: does a user keep the rate of a
smaller model? With ``--over OPTIMIZER``, losses less its own.
"""

import json
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import tyro
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from examples.pretrain.compare import first_seed, frame, label, optimizers, save, swept
from examples.pretrain.config import Config, RunError, to_dict
from examples.research import command, report

# What may tell comparisons apart, in the order of a size's name.
SIZES = {
    "model.family": "",
    "model.layers": "layers",
    "model.width": "width",
    "steps": "steps",
    "batch_size": "sequences",
    "model.tied_head": "tied head",
    "matrix.rms": "update RMS",  # of stored comparisons
    "adam_learning_rate": "AdamW at",
}


@dataclass(frozen=True)
class Options:
    """Join the learning rates of several comparisons."""

    # Folders of comparisons, or of their reports, that hold a comparison.json each.
    folders: Annotated[tuple[Path, ...], tyro.conf.Positional]
    out: Path  # Folder for table and figure.
    over: str = ""  # Optimizer, as the comparisons name it, whose loss is subtracted from those of the others.
    only: str = ""  # The one optimizer to show; all of them if empty.
    title: str = "Loss over the learning rate"  # First line of the report.


class Sweep(NamedTuple):
    """One optimizer at one size: its losses by rate, one dict a seed, NaN where a run diverged."""

    size: str
    optimizer: str
    seeds: tuple[dict[float, float], ...]

    @property
    def losses(self) -> dict[float, float]:
        """Mean over the seeds, at the rates that all of them have."""
        rates = set(self.seeds[0]).intersection(*self.seeds)
        return {rate: float(np.mean([losses[rate] for losses in self.seeds])) for rate in sorted(rates)}


def lowest(losses: dict[float, float]) -> tuple[float, str, float]:
    """The rate where the loss is lowest, ``<=`` or ``>=`` where it may lie beyond those that were tried, and that loss.

    Those of the parabola, in the rate's logarithm, through the lowest loss and its two neighbors.
    """
    points = sorted((rate, loss) for rate, loss in losses.items() if np.isfinite(loss))
    rates, y = np.array(points).T
    at = int(y.argmin())
    if at in (0, len(rates) - 1):
        return float(rates[at]), "<=" if at == 0 else ">=", float(y[at])
    x, y = np.log(rates[at - 1 : at + 2]), y[at - 1 : at + 2]
    curvature, slope, middle = np.polyfit(x - x[1], y, 2)
    return float(np.exp(x[1] - slope / (2 * curvature))), "", float(middle - slope**2 / (4 * curvature))


def sweeps(contents: Sequence[dict[str, Any]], over: str = "") -> list[Sweep]:
    """Of every size and optimizer.

    Raises:
        RunError: where two comparisons are of the same size and seed, or one lacks the optimizer to compare with.
    """
    configs = [to_dict(Config()) | content["config"] for content in contents]  # what is older lacks fields
    differ = [field for field in SIZES if len({config.get(field) for config in configs}) > 1]
    found_in = lambda config: (_named(config.get(field), SIZES[field]) for field in differ)  # noqa: E731
    names = [", ".join(filter(None, found_in(config))) for config in configs]
    runs = [f"{name or 'all'}, seed {first_seed(content)}" for name, content in zip(names, contents, strict=True)]
    if len(set(runs)) < len(runs):
        raise RunError(f"comparisons of one size and seed: {'; '.join(runs)}")
    found: dict[tuple[str, str], list[dict[float, float]]] = {}
    for name, content in zip(names, contents, strict=True):
        here = {}
        for optimizer in optimizers(content):
            losses = {
                arm["learning_rate"]: arm.get("best_validation_loss", np.nan) for arm in swept(content, optimizer)
            }
            if np.isfinite(list(losses.values())).any():
                here[optimizer] = losses
        if over and over not in here:
            raise RunError(f"{content['settings']} has no runs of {over!r}: it has {', '.join(here)}")
        for optimizer, losses in here.items():
            if optimizer == over:
                continue
            if over:
                losses = {rate: loss - here[over][rate] for rate, loss in losses.items() if rate in here[over]}
            found.setdefault((name or "all", optimizer), []).append(losses)
    return [Sweep(size, optimizer, tuple(losses)) for (size, optimizer), losses in found.items()]


def _named(value: Any, what: str) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return what if value else f"no {what}"
    if isinstance(value, float):
        return f"{what} {value:g}"
    return f"{value:,} {what}" if what in ("layers", "steps", "sequences") else f"{what} {value}".strip()


def table(found: Sequence[Sweep], over: str = "") -> str:
    """A line for every sweep."""
    rates = sorted({rate for sweep in found for rate in sweep.losses})
    heads = ["optimizer", "size", *(f"{rate:g}" for rate in rates), *([] if over else ["lowest at", "loss there"])]
    lines = []
    for sweep in sorted(found, key=lambda s: [x.optimizer for x in found].index(s.optimizer)):
        shown = [sweep.losses.get(rate) for rate in rates]
        losses = ["" if x is None else "diverged" if np.isnan(x) else f"{x:{'+' if over else ''}.4f}" for x in shown]
        end = [] if over else _lowest_in_words(sweep)
        lines.append([label(sweep.optimizer), sweep.size, *losses, *end])
    return report.markdown_table(heads, lines)


def _lowest_in_words(sweep: Sweep) -> list[str]:
    found = [lowest(losses) for losses in (sweep.losses, *sweep.seeds)]
    mean, *alone = (f"{beyond} {rate:.2g}".strip() for rate, beyond, _ in found)
    return [f"{mean} ({', '.join(alone)})" if alone[1:] else mean, f"{found[0][2]:.4f}"]


def draw(found: Sequence[Sweep], over: str = "") -> Figure:
    """A panel for every optimizer, a line for every size: the loss over its lowest, or over another optimizer's."""
    names = list(dict.fromkeys(sweep.optimizer for sweep in found))
    sizes = list(dict.fromkeys(sweep.size for sweep in found))
    shades = dict(zip(sizes, np.linspace(0.75, 0, len(sizes)).astype(str), strict=True))
    ticks = sorted({rate for sweep in found for rate in sweep.losses})
    figure, panels = report.panels(len(names), 2.5 + 2.5 * len(names), 3.0, sharey=True)
    lines = {}
    for axes, name in zip(panels, names, strict=True):
        for sweep in (sweep for sweep in found if sweep.optimizer == name):
            rates, losses = np.array(sorted(sweep.losses.items())).T
            y = losses if over else losses - np.nanmin(losses)
            (lines[sweep.size],) = axes.plot(rates, y, color=shades[sweep.size], marker="o", markersize=4)
        axes.axhline(0, color="0.6", linewidth=0.8, linestyle="--")
        axes.set(xscale="log", xlabel="peak learning rate")
        axes.set_title(textwrap.fill(label(name), 28), fontsize=8)
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], fontsize=7, rotation=45)
        axes.xaxis.set_minor_locator(NullLocator())
        frame(axes)
    panels[0].set_ylabel(f"loss less that of\n{label(over)}" if over else "loss over the lowest (nats)")
    figure.set_figheight(3.4)
    if not over:  # a hopeless learning rate leaves the figure
        panels[0].set_ylim(top=min(panels[0].get_ylim()[1], 0.2))
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=len(names), fontsize=8, frameon=False)
    return figure


def _file(folder: Path) -> Path:
    """The comparison's data in a report's folder, or in that of the comparison, which holds the report's.

    Raises:
        RunError: where there is none.
    """
    found = next((file for file in map(folder.joinpath, PLACES) if file.exists()), None)
    if found is None:
        raise RunError(f"{folder} holds no {' and no '.join(PLACES)}: is it the folder of a comparison that has ended?")
    return found


PLACES = ("comparison.json", "report/comparison.json")


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = tyro.cli(Options, args=list(arguments), prog="python -m examples.research.sweeps")
    if not options.folders:
        raise RunError("which folders? Name those that hold a comparison.json")
    contents = [json.loads(_file(folder).read_text()) for folder in options.folders]
    found = [sweep for sweep in sweeps(contents, options.over) if options.only in ("", sweep.optimizer)]
    if not found:
        raise RunError(f"no comparison has runs of {options.only!r}")
    options.out.mkdir(parents=True, exist_ok=True)
    save(draw(found, options.over), options.out / "sweeps")
    less = f", less that of {label(options.over)}" if options.over else ""
    best = "" if options.over else " Lowest at: of the parabola through the lowest loss and its two neighbors."
    seeds = sorted(set(map(first_seed, contents)))
    if seeds[1:]:
        best = best and best[:-1] + "; in brackets those of each seed."
    which = (
        f"mean of seeds {', '.join(map(str, seeds))} where there are several" if seeds[1:] else f"at seed {seeds[0]}"
    )
    commands = "".join(f"- `{content['command']}`, {content['date']}\n" for content in contents)
    shown = table(found, options.over)
    (options.out / "README.md").write_text(
        f"# {options.title}\n\nValidation loss in nats per token, {which}, by peak learning rate{less}.{best}\n\n"
        f"{shown}\n![Loss over the learning rate](sweeps.png)\n\n{commands}"
    )
    print(shown)


if __name__ == "__main__":
    sys.exit(command.run(main))
