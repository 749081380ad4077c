# SPDX-License-Identifier: Apache-2.0
"""What the metric and the momenta of ``normpre_h`` do in a run: ``python -m
examples.research.inside --out FOLDER``.

A run of ``examples.pretrain`` with ``normpre_h``. At some steps it measures

- the metric: the size of rows and columns of earlier gradients, relative to their
  matrix, by kind of layer;
- signal: the cosine of momenta of several ages with the gradient of a large batch, on
  the hidden matrices;
- Newton-Schulz: how close it comes to ``msign``, by steps and the norm that it starts
  from.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track

from examples.pretrain import configs, data
from examples.pretrain.compare.plots import frame
from examples.pretrain.optimizers import by_name, hidden_matrices, kind_of
from examples.pretrain.train import Trainer, loss_and_gradients
from examples.research import command, report
from normpre_optax import direction, two_momenta, with_metric
from normpre_optax.linalg.newton_schulz import coefficient_table, newton_schulz
from normpre_optax.stages.metric import MetricState

# Momenta to compare, all of the same gradients.
MOMENTA: dict[str, optax.GradientTransformation] = {
    "gradient": optax.identity(),
    "age 7": two_momenta(slow_weight=0.0, gradient_share=0.0),
    "age 20, Nesterov (Muon)": optax.trace(0.95, nesterov=True),
    "age 50": optax.ema(0.98),
    "two momenta (normpre_h)": two_momenta(),
}


def kept(updates: Any, state: Any, params: Any = None) -> Any:
    """The update of a spectral stage that only keeps its input, as its state."""
    return updates, updates


KEEPS = optax.GradientTransformation(lambda params: optax.tree.zeros_like(params), kept)
ORTHOGONALIZED = direction(two_momenta(), with_metric(KEEPS))
# Steps of Newton-Schulz, and the norm to start from.
FORMS = (
    (5, "schatten"),
    (5, "frobenius"),
    (4, "schatten"),
    (4, "frobenius"),
    (3, "schatten"),
)


@dataclass(frozen=True)
class Options:
    """Measure the metric and the momenta of normpre_h along a run."""

    out: Path  # Folder for the report.
    config: str = "nano"  # Named configuration.
    # Updates after which to measure; the metric at the ends.
    steps: tuple[int, ...] = (100, 300, 600, 1000, 1400)
    batches: int = 128  # Batches of the gradient that is taken for the truth.
    batch_size: int = 16  # Sequences of a batch.
    seed: int = 0  # Of the run.
    # Of the model, with heads of 64; None: that of the configuration.
    width: int | None = None


def measure(options: Options) -> dict[str, Any]:
    """Train, and measure after the steps: cosines by momentum, relative sizes by kind
    of layer.
    """
    sizes = {
        "batch_size": options.batch_size,
        "seed": options.seed,
        "optimizer": "normpre_h",
    }
    config = dataclasses.replace(
        configs.load(options.config), learning_rate=1.6e-2, **sizes
    )
    if options.width:
        sizes = {
            "width": options.width,
            "heads": options.width // 64,
            "mlp_width": 4 * options.width,
        }
        config = dataclasses.replace(
            config, model=dataclasses.replace(config.model, **sizes)
        )
    dataset = data.open_corpus(config, Console())
    trainer = Trainer(config, dataset)
    gradients = jax.jit(
        lambda params, tokens: loss_and_gradients(trainer.graphdef)(params, tokens)[1]
    )
    hidden = hidden_matrices(trainer.state.params)

    def of_hidden(tree):
        return {name: x for name, x in by_name(tree).items() if name in hidden}

    transformations = MOMENTA | {"orthogonalized": ORTHOGONALIZED}
    states = {
        name: tx.init(of_hidden(trainer.state.params))
        for name, tx in transformations.items()
    }

    @jax.jit
    def update(
        states: dict[str, Any], grads: Any
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        found = {
            name: tx.update(grads, states[name]) for name, tx in transformations.items()
        }
        return {name: u for name, (u, _) in found.items()}, {
            name: state for name, (_, state) in found.items()
        }

    others = data.training_batches(
        dataset,
        context=config.model.context,
        batch_size=options.batch_size,
        seed=options.seed + 1,
    )
    cosines: dict[str, list[float]] = {name: [] for name in MOMENTA}
    metrics: dict[str, Any] = {}
    signs: dict[str, Any] = {}
    for step in track(range(1, max(options.steps) + 1), "training"):
        tokens = trainer.layout.batch(next(trainer.batches), config.batch_size)
        momenta, states = update(
            states, of_hidden(gradients(trainer.state.params, tokens))
        )
        if step in options.steps:
            grad_of = functools.partial(gradients, trainer.state.params)
            truth = of_hidden(
                mean_of(grad_of, [next(others) for _ in range(options.batches)])
            )
            for name in MOMENTA:
                cosines[name].append(cosine(momenta[name], truth))
        trainer.state, _ = trainer.step(trainer.state, tokens)
        if step in (options.steps[0], options.steps[-1]):
            metrics[str(step)] = relative_sizes(trainer.state.opt_state)
            signs[str(step)] = orthogonality(states["orthogonalized"][1].spectral)
    return {
        "cosines": cosines,
        "metric": metrics,
        "orthogonality": signs,
        "steps": list(options.steps),
    }


def mean_of(gradients: Callable[[Any], Any], batches: Sequence[np.ndarray]) -> Any:
    """The mean gradient of some batches."""
    total = gradients(batches[0])
    for tokens in batches[1:]:
        total = jax.tree.map(jnp.add, total, gradients(tokens))
    return jax.tree.map(lambda x: x / len(batches), total)


def cosine(a: Any, b: Any) -> float:
    """Of two trees."""
    return float(optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b)))


def relative_sizes(state: Any) -> dict[str, dict[str, list[float]]]:
    """Root mean squares of rows and columns over that of their matrix, of all layers of
    a kind.
    """

    def is_metric(x):
        return isinstance(x, MetricState)

    (metric,) = (x for x in jax.tree.leaves(state, is_leaf=is_metric) if is_metric(x))
    found: dict[str, dict[str, list[float]]] = {}
    for side in ("rows", "columns"):
        for name, squares in by_name(getattr(metric, side)).items():
            sizes = np.sqrt(np.ravel(squares) / np.mean(squares))
            for kind, part in parts_of(kind_of(name), sizes, side):
                found.setdefault(kind, {"rows": [], "columns": []})[side] += part.round(
                    4
                ).tolist()
    return found


def orthogonality(matrices: dict[str, jax.Array]) -> dict[str, list[list[float]]]:
    """For every form of Newton-Schulz, cosine with ``msign`` and share of singular
    values below 1/2, means by kind.
    """
    found: dict[str, list] = {}
    for name, x in matrices.items():
        u, _, vt = jnp.linalg.svd(x, full_matrices=False)
        signs = [
            newton_schulz(x, coefficient_table("muon", steps), norm=norm)
            for steps, norm in FORMS
        ]
        values = [
            jnp.diag(u.T @ t @ vt.T) for t in signs
        ]  # the singular vectors are kept
        each = [
            (jnp.mean(v) / jnp.sqrt(jnp.mean(v**2)), jnp.mean(v < 0.5)) for v in values
        ]
        found.setdefault(kind_of(name), []).append(each)
    return {kind: np.mean(each, 0).round(4).tolist() for kind, each in found.items()}


def parts_of(kind: str, sizes: np.ndarray, side: str) -> list[tuple[str, np.ndarray]]:
    """Rows of a fused qkv are of three kinds; its columns belong to all of them."""
    if kind != "attention/qkv" or side == "columns":
        return [(kind, sizes)]
    return [
        (f"attention/{part}", x)
        for part, x in zip("qkv", np.split(sizes, 3), strict=True)
    ]


def table(found: dict[str, Any]) -> str:
    """Cosines by momentum and step, and the spread of sizes by kind and step."""
    steps = [str(step) for step in found["steps"]]
    lines = [
        [name, *(f"{x:.3f}" for x in values)]
        for name, values in found["cosines"].items()
    ]
    cosines = report.markdown_table(
        ["cosine with the gradient of the large batch, after step", *steps], lines
    )
    lines = []
    for step in (steps[0], steps[-1]):
        for kind, sides in found["metric"][step].items():
            cells = [
                (
                    f"{np.mean(x):.2f} ({np.quantile(x, 0.05):.2f} to"
                    f" {np.quantile(x, 0.95):.2f})"
                    if x
                    else ""
                )
                for x in sides.values()
            ]
            lines.append([step, kind, *cells])
    sizes = report.markdown_table(["after step", "layers", "rows", "columns"], lines)
    heads = [
        "after step",
        "layers",
        *(f"{number} steps, {norm}" for number, norm in FORMS),
    ]
    signs = [
        [step, kind, *(f"{c:.3f}, {below:.3f}" for c, below in each)]
        for step, kinds in found["orthogonality"].items()
        for kind, each in kinds.items()
    ]
    title = "Newton-Schulz: cosine with msign, and share of singular values below 1/2"
    return f"{cosines}\n{sizes}\n{title}:\n\n{report.markdown_table(heads, signs)}"


def draw(found: dict[str, Any]) -> Figure:
    """Cosines along the run; relative sizes of rows and columns at the last step, by
    kind.
    """
    figure, (left, middle, right) = report.panels(3, 10.5, 3.2)
    for axes in (left, middle, right):
        frame(axes)
    for name, values in found["cosines"].items():
        left.plot(found["steps"], values, marker="o", markersize=3, label=name)
    left.set(xlabel="step", ylabel="cosine with the true gradient")
    left.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    left.legend(fontsize=7, frameon=False)
    for axes, side in ((middle, "rows"), (right, "columns")):
        for kind, sides in found["metric"][str(found["steps"][-1])].items():
            if sides[side]:
                axes.plot(
                    np.linspace(0, 1, len(sides[side])),
                    np.sort(sides[side]),
                    label=kind,
                )
        axes.set(
            xlabel=f"share of the {side}",
            ylabel="size relative to the matrix",
            yscale="log",
        )
        axes.axhspan(0.5, 2, color="0.93", zorder=0)
        axes.legend(fontsize=7, frameon=False)
    return figure


def main(arguments: Sequence[str]) -> None:
    """The command line."""
    options = tyro.cli(
        Options, args=list(arguments), prog="python -m examples.research.inside"
    )
    found = measure(options)
    line = report.command("inside", options)
    shown = table(found)

    def percentiles(x):
        return np.percentile(x, range(101)).round(3).tolist()

    few = jax.tree.map(
        percentiles,
        found["metric"],
        is_leaf=lambda x: isinstance(x, list) and len(x) > 0,
    )
    result = report.header(line, jax.devices()[0]) | found | {"metric": few}
    page = (
        f"# Inside a run of normpre_h\n\n`{line}`, {result['date']}, jax"
        f" {result['versions']['jax']}.\n\n{shown}\nSizes: root mean square of a row or"
        " column of earlier gradients over that of its matrix; mean, and 5 % to 95 %"
        " quantile. The metric takes ratios of 1/2 to 2 into account"
        " (grey).\n\n![Cosines and sizes](inside.png)\n"
    )
    report.write(
        options.out, "inside", result, page, draw(result), page_name="README.md"
    )
    print(shown)


if __name__ == "__main__":
    sys.exit(command.run(main))
