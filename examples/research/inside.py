# SPDX-License-Identifier: Apache-2.0
"""What the metric and the momenta of ``normpre_h`` do in a run.

    python -m examples.research.inside --out FOLDER

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
from collections.abc import Callable, Mapping, Sequence
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
from examples.pretrain.config import Config
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


# --- Measuring
# ------------------------------------------------------------------------------------


def measure(options: Options) -> dict[str, Any]:
    """Train, and measure after the steps.

    Returns:
        Cosines by momentum; relative sizes and orthogonality by step and kind of layer.
    """
    config = config_of(options)
    dataset = data.open_corpus(config, Console())
    trainer = Trainer(config, dataset)
    others = data.training_batches(
        dataset,
        context=config.model.context,
        batch_size=options.batch_size,
        seed=options.seed + 1,
    )
    hidden = _Hidden(trainer)
    transformations = MOMENTA | {"orthogonalized": ORTHOGONALIZED}
    states = {}
    for name, tx in transformations.items():
        states[name] = tx.init(hidden.of(trainer.state.params))
    update = updates_of(transformations)
    cosines: dict[str, list[float]] = {name: [] for name in MOMENTA}
    metrics: dict[str, Any] = {}
    signs: dict[str, Any] = {}
    for step in track(range(1, max(options.steps) + 1), "training"):
        tokens = trainer.layout.batch(next(trainer.batches), config.batch_size)
        params = trainer.state.params
        momenta, states = update(states, hidden.gradient(params, tokens))
        if step in options.steps:
            batches = [next(others) for _ in range(options.batches)]
            truth = hidden.mean_gradient(params, batches)
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


def config_of(options: Options) -> Config:
    """The configuration of the run."""
    config = configs.load(options.config)
    model = config.model
    if options.width:
        model = dataclasses.replace(
            model,
            width=options.width,
            heads=options.width // 64,
            mlp_width=4 * options.width,
        )
    return dataclasses.replace(
        config,
        learning_rate=1.6e-2,
        batch_size=options.batch_size,
        seed=options.seed,
        optimizer="normpre_h",
        model=model,
    )


class _Hidden:
    """Gradients of the hidden matrices of a model, by name."""

    def __init__(self, trainer: Trainer) -> None:
        self.names = hidden_matrices(trainer.state.params)
        loss_and_grads = loss_and_gradients(trainer.graphdef)

        @jax.jit
        def all_gradients(params, tokens):
            _, gradients = loss_and_grads(params, tokens)
            return gradients

        self.all_gradients = all_gradients

    def of(self, tree: Any) -> dict[str, jax.Array]:
        """The hidden matrices in a tree like the parameters."""
        return {name: x for name, x in by_name(tree).items() if name in self.names}

    def gradient(self, params: Any, tokens: np.ndarray) -> dict[str, jax.Array]:
        """Of one batch."""
        return self.of(self.all_gradients(params, tokens))

    def mean_gradient(
        self, params: Any, batches: Sequence[np.ndarray]
    ) -> dict[str, jax.Array]:
        """The mean over batches."""
        gradients = functools.partial(self.all_gradients, params)
        return self.of(mean_of(gradients, batches))


def updates_of(
    transformations: Mapping[str, optax.GradientTransformation],
) -> Callable[[dict[str, Any], Any], tuple[dict[str, Any], dict[str, Any]]]:
    """A compiled function of states and gradients.

    It returns updates and states, by the transformations' names.
    """

    @jax.jit
    def update(states, grads):
        updates = {}
        new = {}
        for name, tx in transformations.items():
            updates[name], new[name] = tx.update(grads, states[name])
        return updates, new

    return update


def mean_of(gradients: Callable[[Any], Any], batches: Sequence[np.ndarray]) -> Any:
    """The mean gradient of some batches."""
    total = gradients(batches[0])
    for tokens in batches[1:]:
        total = jax.tree.map(jnp.add, total, gradients(tokens))
    return jax.tree.map(lambda x: x / len(batches), total)


def cosine(a: Any, b: Any) -> float:
    """Of the angle between two trees."""
    return float(optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b)))


def relative_sizes(state: Any) -> dict[str, dict[str, list[float]]]:
    """Sizes of rows and columns, of all layers of a kind.

    They are root mean squares over that of their matrix.
    """

    def is_metric(x):
        return isinstance(x, MetricState)

    nodes = jax.tree.leaves(state, is_leaf=is_metric)
    (metric,) = [node for node in nodes if is_metric(node)]
    found: dict[str, dict[str, list[float]]] = {}
    for side in ("rows", "columns"):
        for name, squares in by_name(getattr(metric, side)).items():
            sizes = np.sqrt(np.ravel(squares) / np.mean(squares))
            for kind, part in parts_of(kind_of(name), sizes, side):
                sides = found.setdefault(kind, {"rows": [], "columns": []})
                sides[side] += part.round(4).tolist()
    return found


def orthogonality(matrices: dict[str, jax.Array]) -> dict[str, list[list[float]]]:
    """How close every form of Newton-Schulz comes to ``msign``, means by kind.

    Cosine with ``msign``, and share of singular values below 1/2.
    """
    found: dict[str, list] = {}
    for name, x in matrices.items():
        u, _, vt = jnp.linalg.svd(x, full_matrices=False)
        each = []
        for steps, norm in FORMS:
            sign = newton_schulz(x, coefficient_table("muon", steps), norm=norm)
            values = jnp.diag(u.T @ sign @ vt.T)  # the singular vectors are kept
            alignment = jnp.mean(values) / jnp.sqrt(jnp.mean(values**2))
            each.append((alignment, jnp.mean(values < 0.5)))
        found.setdefault(kind_of(name), []).append(each)
    return {kind: np.mean(each, 0).round(4).tolist() for kind, each in found.items()}


def parts_of(kind: str, sizes: np.ndarray, side: str) -> list[tuple[str, np.ndarray]]:
    """Rows of a fused qkv are of three kinds; its columns belong to all of them."""
    if kind != "attention/qkv" or side == "columns":
        return [(kind, sizes)]
    query, key, value = np.split(sizes, 3)
    return [("attention/q", query), ("attention/k", key), ("attention/v", value)]


# --- The report
# ------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Cosines by momentum and step, and the spread of sizes by kind and step."""
    title = "Newton-Schulz: cosine with msign, and share of singular values below 1/2"
    signs = orthogonality_table(found)
    return f"{cosine_table(found)}\n{size_table(found)}\n{title}:\n\n{signs}"


def cosine_table(found: dict[str, Any]) -> str:
    """Cosines by momentum and step."""
    heads = ["cosine with the gradient of the large batch, after step"]
    heads += [str(step) for step in found["steps"]]
    lines = []
    for name, values in found["cosines"].items():
        lines.append([name, *(f"{value:.3f}" for value in values)])
    return report.markdown_table(heads, lines)


def size_table(found: dict[str, Any]) -> str:
    """The spread of sizes by step and kind."""
    lines = []
    for step in (str(found["steps"][0]), str(found["steps"][-1])):
        for kind, sides in found["metric"][step].items():
            lines.append([step, kind, *map(spread, sides.values())])
    return report.markdown_table(["after step", "layers", "rows", "columns"], lines)


def spread(sizes: Sequence[float]) -> str:
    """Mean, and 5 % to 95 % quantile; nothing without sizes."""
    if not sizes:
        return ""
    low, high = np.quantile(sizes, [0.05, 0.95])
    return f"{np.mean(sizes):.2f} ({low:.2f} to {high:.2f})"


def orthogonality_table(found: dict[str, Any]) -> str:
    """Cosine and share by step and kind, and by form."""
    heads = ["after step", "layers"]
    heads += [f"{number} steps, {norm}" for number, norm in FORMS]
    lines = []
    for step, kinds in found["orthogonality"].items():
        for kind, each in kinds.items():
            cells = [f"{cosine:.3f}, {below:.3f}" for cosine, below in each]
            lines.append([step, kind, *cells])
    return report.markdown_table(heads, lines)


def draw(found: dict[str, Any]) -> Figure:
    """Cosines along the run, and relative sizes by kind at the last step."""
    figure, (left, middle, right) = report.panels(3, 10.5, 3.2)
    for axes in (left, middle, right):
        frame(axes)
    for name, values in found["cosines"].items():
        left.plot(found["steps"], values, marker="o", markersize=3, label=name)
    left.set(xlabel="step", ylabel="cosine with the true gradient")
    left.axhline(0, color="0.7", linewidth=0.8, zorder=0)
    left.legend(fontsize=7, frameon=False)
    last = found["metric"][str(found["steps"][-1])]
    for axes, side in ((middle, "rows"), (right, "columns")):
        for kind, sides in last.items():
            sizes = np.sort(sides[side])
            if len(sizes):
                axes.plot(np.linspace(0, 1, len(sizes)), sizes, label=kind)
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
    result = report.header(line, jax.devices()[0]) | found
    result["metric"] = percentiles(found["metric"])
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


def percentiles(metric: Any) -> Any:
    """The same tree with 101 percentiles for every list of sizes."""

    def is_sizes(x):
        return isinstance(x, list) and len(x) > 0

    def of_sizes(x):
        return np.percentile(x, range(101)).round(3).tolist()

    return jax.tree.map(of_sizes, metric, is_leaf=is_sizes)


if __name__ == "__main__":
    sys.exit(command.run(main))
