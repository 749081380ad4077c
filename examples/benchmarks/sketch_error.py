# SPDX-License-Identifier: Apache-2.0
"""How far the sketch of NormPre-L is from exact clipping in a real training run, cold and warm-started.

``python -m examples.benchmarks.sketch_error`` trains the small language model of ``examples.pretrain`` with exact
clipping. Beside it run NormPre-L's directions with several sketches, on the same gradients and weights; their distance
from the exact direction is noted at every step: ``||T - T_exact|| / ||T_exact - Psi||``, the error as a share of what
clipping changes. 0 is exact, 1 is as good as not clipping at all.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.progress import track

from examples.benchmarks import report
from examples.pretrain import data
from examples.pretrain.config import Config
from examples.pretrain.evaluate import token_losses
from examples.pretrain.train import initialise, schedule
from normpre_optax import default_matrix_dims, normpre_l, precondition_locally, scale_by_normpre

matplotlib.use("Agg")
import matplotlib.pyplot as plt


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure the error of the sketch while a model trains."""

    steps: int = 400
    """Updates."""
    rank: int = 32
    """Modes that are clipped."""
    oversample: int = 8
    """Further directions of the sketch."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    out: Path = Path("docs/results")
    """Folder for the reports."""


def arms(options: Options) -> Mapping[str, optax.GradientTransformation]:
    """The sketches that are compared, as ``precondition_locally`` makes them."""
    make = functools.partial(precondition_locally, options.rank, options.oversample)
    return {f"cold, p = {p}": make(power_iterations=p) for p in (0, 1, 2)} | {
        f"warm, p = {p}": make(power_iterations=p, warm_start=True) for p in (0, 1)
    }


def measure(options: Options, console: Console) -> dict[str, np.ndarray]:
    """For each arm the errors ``(steps,)``, root mean squares over the model's matrices."""
    config = Config(steps=options.steps, learning_rate=options.learning_rate)
    dataset = data.open_corpus(config.data, console.print)
    batches = data.training_batches(
        dataset, context=config.model.context, batch_size=config.batch_size, seed=config.seed
    )
    graphdef, params = initialise(config, dataset)

    exact = precondition_locally(options.rank, method="exact")
    stages = {"none": optax.identity(), "exact": exact, **arms(options)}
    is_matrix = jax.tree_util.tree_map_with_path(
        lambda path, x: default_matrix_dims(jax.tree_util.keystr(path, simple=True, separator="/"), x) is not None,
        params,
    )
    directions = {name: optax.masked(scale_by_normpre(s, rms=None), is_matrix) for name, s in stages.items()}
    tx = optax.chain(
        optax.clip_by_global_norm(config.clip_norm),
        normpre_l(schedule(config), rank=options.rank, method="exact"),
    )
    matrices = [i for i, yes in enumerate(jax.tree.leaves(is_matrix)) if yes]

    @jax.jit
    def step(params, state, states, tokens):
        loss, grads = jax.value_and_grad(lambda p: token_losses(graphdef, p, tokens).mean())(params)
        found = {name: d.update(grads, states[name], params) for name, d in directions.items()}
        leaves = {name: [jax.tree.leaves(new)[i] for i in matrices] for name, (new, _) in found.items()}

        def distance(a: str, b: str) -> jax.Array:
            return jnp.stack([jnp.linalg.norm(x - y) for x, y in zip(leaves[a], leaves[b], strict=True)])

        change = distance("exact", "none")
        share = {name: distance(name, "exact") / change for name in stages if name not in ("none", "exact")}
        errors = {name: jnp.sqrt(jnp.mean(x**2)) for name, x in share.items()}
        updates, state = tx.update(grads, state, params)
        states = {name: new for name, (_, new) in found.items()}
        return optax.apply_updates(params, updates), state, states, errors, loss

    state, states = tx.init(params), {name: d.init(params) for name, d in directions.items()}
    rows = []
    for _ in track(range(options.steps), console=console, description="training"):
        params, state, states, errors, _ = step(params, state, states, next(batches))
        rows.append(errors)
    return {name: np.asarray([row[name] for row in jax.device_get(rows)]) for name in arms(options)}


def plot(errors: dict[str, np.ndarray], file: Path) -> None:
    """Errors over the run, smoothed over ten steps."""
    figure, axes = plt.subplots(figsize=(6, 3.6), layout="constrained")
    for name, values in errors.items():
        smooth = np.convolve(values, np.ones(10) / 10, mode="valid")
        axes.plot(np.arange(len(smooth)) + 10, smooth, label=name, linestyle="--" if name.startswith("cold") else "-")
    axes.set(yscale="log", xlabel="step", ylabel="error / change by exact clipping")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2)
    figure.savefig(file, dpi=150)
    plt.close(figure)


def markdown(result: dict) -> str:
    """The report as a table."""
    lines = [
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax {result['versions']['jax']}. "
        "Error of NormPre-L's update as a share of what exact clipping changes; medians of the first 20 steps and of "
        "the last half.",
        "",
        "| sketch | products with Psi | first steps | last half |",
        "|---|---|---|---|",
    ]
    for name, row in result["rows"].items():
        lines.append(f"| {name} | {row['products']} | {row['first']:.3f} | {row['last']:.3f} |")
    return "\n".join(lines) + "\n"


def main(options: Options) -> None:
    """Measure, print, write."""
    console = Console(highlight=False)
    errors = measure(options, console)
    rows = {
        name: {
            "products": 3 + 2 * int(name[-1]),
            "first": float(np.median(values[:20])),
            "last": float(np.median(values[len(values) // 2 :])),
        }
        for name, values in errors.items()
    }
    command = f"python -m examples.benchmarks.sketch_error --steps {options.steps} --rank {options.rank}"
    result = report.header(command, jax.devices()[0]) | {
        "rows": rows,
        "errors": {name: [round(float(x), 5) for x in values] for name, values in errors.items()},
    }
    file = report.write(options.out, f"sketch_error_rank{options.rank}", result, markdown(result))
    plot(errors, file.with_suffix(".png"))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.benchmarks.sketch_error"))
