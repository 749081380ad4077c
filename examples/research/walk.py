# SPDX-License-Identifier: Apache-2.0
"""How far a random walk lengthens weights: ``python -m examples.research.walk FOLDER --out FOLDER``.

``FOLDER`` holds the ``comparison.json`` of a comparison with NormPre, with and without its tangent. Had gradients no
direction (white noise, made into updates of one root mean square), momentum alone would tie one update to the next, and
the size of an entry of W would be known beforehand: from its first size, the rates, the decay and mu. Rows and columns
that are as long as this without the tangent have grown by diffusion, not because the loss asks for it.
"""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
import tyro
from matplotlib.figure import Figure

from examples.pretrain import models
from examples.pretrain.compare import LINE_STYLES, NAMES, frame, save, swept
from examples.pretrain.config import Config, RunError, from_dict
from examples.pretrain.models.transformer import residual_std
from examples.pretrain.optimizers import by_name, hidden_matrices, kind_of, settings_of
from examples.pretrain.train import schedule
from examples.research import command, report
from normpre_optax.parameters.dims import split_axes

FREE, TANGENT = "normpre_g,tangent=none", "normpre_g"
INTO_THE_STREAM = ("out", "down")


@dataclass(frozen=True)
class Options:
    """Hold the lengths of rows and columns against those of a random walk."""

    folder: Annotated[Path, tyro.conf.Positional]  # Folder with the comparison.json.
    out: Path  # Folder for table and figure.


class Kind(NamedTuple):
    """Matrices of one kind: size of a row and of a column, standard deviation of an entry at the start."""

    name: str
    row: int
    column: int
    std: float


def kinds(config: Config) -> list[Kind]:
    """Of the model's hidden matrices."""
    params = models.shapes(config.model, config.model.vocabulary or config.vocabulary)
    leaves, found = by_name(params), {}
    for path, dims in hidden_matrices(params).items():
        shape, name = leaves[path].shape, kind_of(path)
        _, outputs, inputs = split_axes(len(shape), dims)
        std = residual_std(config.model) if name.endswith(INTO_THE_STREAM) else config.model.hidden_std
        row, column = (math.prod(shape[axis] for axis in axes) for axes in (inputs, outputs))
        found[name] = Kind(name, row, column, std)
    return list(found.values())


def walk(first: float, rates: np.ndarray, *, rms: float, decay: float, momentum: float) -> np.ndarray:
    """Root mean square of an entry after every step of ``W <- (1 - lr wd) W - lr U``, the first one included.

    ``U`` has root mean square ``rms``, and keeps ``momentum`` of what it was: the second moments of W and U are known.
    Without decay and at a constant rate they grow by ``(lr rms)^2 (1 + mu) / (1 - mu)`` a step, 39 times that of steps
    that know nothing of each other where mu is 0.95.

    Args:
        first: at the start.
        rates: learning rate of every step.
        rms: of the updates.
        decay: ``wd``.
        momentum: ``mu``.

    Returns:
        ``(steps + 1,)``.

    Example:
        >>> far = walk(0.0, np.full(4000, 0.01), rms=0.2, decay=0.0, momentum=0.95)
        >>> print(round((far[-1] ** 2 - far[-2] ** 2) / 0.002**2, 6))
        39.0
    """
    square, product, sizes = first**2, 0.0, [first]  # of W, of W and U
    for rate in rates:
        kept = 1 - rate * decay
        square, product = (
            kept**2 * square - 2 * kept * rate * product + (rate * rms) ** 2,
            momentum * (kept * product - rate * rms**2),
        )
        sizes.append(math.sqrt(max(square, 0.0)))
    return np.array(sizes)


def walks(config: Config) -> dict[Kind, np.ndarray]:
    """Entries' sizes of every kind of matrix after every step of a run."""
    rates = np.asarray(jax.vmap(schedule(config))(np.arange(config.steps)), np.float64)
    settings = settings_of(config.optimizer)[1]
    given = {"rms": settings["rms"], "decay": config.weight_decay, "momentum": settings["momentum"]}
    return {kind: walk(kind.std, rates, **given) for kind in kinds(config)}


def arms_of(content: dict[str, Any]) -> list[tuple[Config, dict[str, Any], dict[str, Any] | None]]:
    """Configuration and arm of every rate without the tangent, with the arm that has it at the same rate.

    Raises:
        RunError: where there is none.
    """
    config = from_dict(content["config"])
    with_it = {arm["learning_rate"]: arm for arm in swept(content, TANGENT) if arm["status"] == "finished"}
    found = [
        (replace(config, optimizer=FREE, learning_rate=arm["learning_rate"]), arm, with_it.get(arm["learning_rate"]))
        for arm in swept(content, FREE)
        if arm["status"] == "finished"
    ]
    if not found:
        raise RunError(f"{content['settings']} has no finished run of {FREE}")
    return found


def table(content: dict[str, Any]) -> str:
    """A line for every rate and kind of matrix: rows and columns at the start, as the walk ends, as they were."""
    sides = ["start", "walk", "no tangent", "with it"]
    titles = [f"{prefix}{side}" for prefix in ("rows: ", "columns: ") for side in sides]
    lines = []
    for config, arm, other in arms_of(content):
        for kind, sizes in walks(config).items():
            cells = []
            for side, size in (("row", kind.row), ("column", kind.column)):
                name = f"{side}_norm/{kind.name}"
                ends = [sizes[0] * math.sqrt(size), sizes[-1] * math.sqrt(size), arm["norms"][name]]
                cells += [f"{x:.2f}" for x in ends] + [f"{other['norms'][name]:.2f}" if other else ""]
            lines.append([f"{config.learning_rate:g}", kind.name, *cells])
    return report.markdown_table(["learning rate", "matrix", *titles], lines)


def draw(content: dict[str, Any]) -> Figure:
    """Mean row norm along training, without the tangent, with it, and of the walk: a panel for every rate."""
    arms = arms_of(content)
    figure, panels = report.panels(len(arms), 1.6 + 2.6 * len(arms), 2.8, sharey=True)
    color = NAMES["normpre_g"][1]
    for axes, (config, arm, other) in zip(panels, arms, strict=True):
        found = walks(config)
        rows = np.array([kind.column for kind in found], float)
        norms = [sizes * math.sqrt(kind.row) for kind, sizes in found.items()]
        axes.plot(np.average(norms, axis=0, weights=rows), color="0.5", linestyle="--", label="random walk")
        for one, line, label in ((arm, LINE_STYLES[0], "no tangent"), (other, LINE_STYLES[2], "with tangent")):
            if one:
                axes.plot(*np.array(one["row_norm"])[:, :2].T, color=color, linestyle=line, label=label)
        axes.set_title(f"learning rate {config.learning_rate:g}", fontsize=9)
        axes.set_xlabel("step")
        frame(axes)
    report.legend_at_end(panels)
    panels[0].set_ylabel("mean row norm of hidden matrices")
    return figure


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = tyro.cli(Options, args=list(arguments), prog="python -m examples.research.walk")
    content = json.loads((options.folder / "comparison.json").read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    shown = table(content)
    save(draw(content), options.out / "walk")
    (options.out / "walk.md").write_text(
        "# Lengths of weights, and of a random walk\n\n"
        f"NormPre-G on {content['settings']}, {content['config']['steps']:,} steps. Root mean square lengths at the "
        "start and of the walk, mean lengths of the runs at their end.\n\n"
        f"{shown}\n![Mean row norms along training](walk.png)\n\n- `{content['command']}`, {content['date']}\n"
    )
    print(shown)


if __name__ == "__main__":
    sys.exit(command.run(main))
