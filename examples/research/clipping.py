# SPDX-License-Identifier: Apache-2.0
"""How near local clipping comes to orthogonalization: ``python -m examples.research.clipping --run runs/NAME --out D``.

The singular values of ``Psi`` in the last checkpoint of a run, before and after their leading share is clipped to a
multiple of the root mean square of the others. The update's cosine with ``msign(Psi)``, which has equal singular
values, is their mean divided by their root mean square.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

from examples.pretrain.optimizers import by_name, hidden_matrices
from examples.research import command, diagnostics, figure_data, report

DRAWN = 0.25  # the share of which the figure shows the singular values


@dataclass(frozen=True)
class Options:
    """Clip the spectra of a run's last checkpoint."""

    run: Path  # Folder of a run.
    out: Path = Path("clipping")  # Folder for the report.
    share: tuple[float, ...] = (0.0625, 0.125, 0.25, 0.5)  # Of the smaller dimension: singular values that are clipped.
    level: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)  # Times the root mean square of the others.


def spectra(run: figure_data.OpenRun) -> list[np.ndarray]:
    """Singular values of ``Psi`` of every hidden matrix, largest first."""
    *_, (_, state, tokens) = figure_data.restored(run)
    update = run.next_update(state, tokens)
    momenta, weights = figure_data.momenta(state.params, update.opt_state, update.gradients), by_name(state.params)
    found = []
    for name, dims in hidden_matrices(state.params).items():
        tangent = run.settings["tangent"]
        measured = diagnostics.measure(momenta[name][1], weights[name], dims, names=["spectra"], tangent=tangent)
        found += list(np.sqrt(np.maximum(measured["spectra"].after, 0)))
    return found


def clipped(values: np.ndarray, share: float, level: float) -> np.ndarray:
    """The leading share of singular values, none above ``level`` times the root mean square of the others."""
    rank = max(1, round(share * len(values)))
    most = level * np.sqrt(np.mean(values[rank:] ** 2))
    return np.concatenate([np.minimum(values[:rank], most), values[rank:]])


def cosine(values: np.ndarray) -> float:
    """Cosine of a matrix with these singular values and its orthogonal factor."""
    return float(np.mean(values) / np.sqrt(np.mean(values**2)))


def draw(found: Sequence[np.ndarray], levels: Sequence[float]) -> Figure:
    """Mean singular values, of matrices scaled to an RMS of one, by their place in Psi."""
    figure, (axes,) = report.panels(1, 6.5, 3.6)
    places = np.linspace(0, 1, 65)

    def line(of: Any, label: str, **style: Any) -> None:
        scaled = [values / np.sqrt(np.mean(values**2)) for values in map(of, found)]
        mean = np.mean([np.interp(places, np.linspace(0, 1, len(v)), v) for v in scaled], axis=0)
        axes.plot(places, mean, label=label, **style)

    line(lambda values: values, "not clipped", color="black")
    for level in levels:
        line(lambda values, level=level: clipped(values, DRAWN, level), f"clipped to {level:g}")
    axes.axhline(1, color="gray", linestyle=":", label="orthogonal")
    axes.set(
        xlabel="place in Psi, from the largest to the smallest",
        ylabel="singular value / RMS",
        xlim=(0, 1),
        ylim=(0, None),
    )
    axes.legend(frameon=False)
    return figure


def main(arguments: Sequence[str] | None = None) -> None:
    """Write ``clipping.json``, ``README.md`` and ``clipping.png``."""
    options = tyro.cli(Options, args=arguments, prog="python -m examples.research.clipping")
    run = figure_data.open_run(options.run)
    found = spectra(run)
    run.checkpoints.close()
    mean = lambda of: float(np.mean([cosine(of(values)) for values in found]))  # noqa: E731
    cosines = {
        f"{share:g}": [mean(lambda values, s=share, c=level: clipped(values, s, c)) for level in options.level]
        for share in options.share
    }
    header = report.header(report.command("clipping", options), jax.devices()[0])
    result = header | {"levels": list(options.level), "none": mean(lambda values: values), "cosines": cosines}
    titles = ["share clipped", *(f"level {level:g}" for level in options.level)]
    rows = [[share, *(f"{value:.3f}" for value in values)] for share, values in cosines.items()]
    page = (
        f"# Cosine of clipped updates with orthogonal ones\n\n`{header['command']}`, {header['date']}. Mean over "
        f"{len(found)} matrices of `{options.run.name}`, step {run.steps[-1]}. Without clipping: {result['none']:.3f}. "
        f"The level is a multiple of the root mean square of the other singular values.\n\n"
        f"{report.markdown_table(titles, rows)}\n\n![Singular values](clipping.png)\n"
    )
    report.write(options.out, "clipping", result, page, draw(found, options.level), "README.md")


if __name__ == "__main__":
    sys.exit(command.run(main))
