# SPDX-License-Identifier: Apache-2.0
"""Time, compile time and memory of one optimizer step on the hidden matrices of a real
model.

``python -m examples.research.optimizer_step --model gpt2_small`` measures AdamW,
optax's Muon, a plainly written Muon and optimizers of this library in one process, in
turns (A B C ..., A B C ...), so that a change of the machine's speed affects all alike.
A step is a jitted update and its application with gradients, state and parameters
donated, as in a training step. ``--compile-only`` runs nothing: compile times and
temporaries of models that do not fit into memory.
"""

import dataclasses
import functools
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from examples.research import report
from examples.research.shapes import MODELS, matrices
from normpre_optax import normpre_h, normpre_l, optimizers

RATE = 1e-3
BASELINE = "optax_muon"


def clean_muon(learning_rate: float) -> optax.GradientTransformation:
    """Muon written plainly: for each leaf five Newton-Schulz iterations, without a
    batch axis.
    """

    def orthogonalize(x: jax.Array) -> jax.Array:
        tall = x.shape[0] > x.shape[1]
        y = x.T if tall else x
        y = y / jnp.linalg.norm(y)
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        return y.T if tall else y

    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(
            lambda updates, params=None: jax.tree.map(orthogonalize, updates)
        ),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )


QUARTER = {"rank": 0.25, "relative_threshold": 0.5}
KNOWN: dict[str, Callable[[float], optax.GradientTransformation]] = {
    "adamw": functools.partial(optax.adamw, b2=0.95, weight_decay=0.1),
    BASELINE: functools.partial(optax.contrib.muon, weight_decay=0.1),
    "clean_muon": clean_muon,
    **{name: found.factory for name, found in optimizers().items()},
    "normpre_h": functools.partial(normpre_h, adam_learning_rate=1e-3),
    "normpre_l_products": functools.partial(normpre_l, method="products"),
    "normpre_l_quarter": functools.partial(normpre_l, **QUARTER),
    "normpre_l_quarter_products": functools.partial(
        normpre_l, method="products", **QUARTER
    ),
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Measure one optimizer step."""

    model: str = "gpt2_small"  # Name in ``shapes.MODELS``.
    # Names in ``KNOWN``, in the order of the table.
    optimizers: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME ...")] = (
        *("adamw", BASELINE, "clean_muon"),
        *("muon", "mano", "normpre_g", "normpre_l", "normpre_h"),
    )
    compile_only: bool = False  # Compile, and run nothing.
    # Counted rounds, after one that is not counted. Each round runs every optimizer
    # once.
    repeats: int = 5
    out: Path = Path("docs/results")  # Folder for the reports.


@dataclasses.dataclass
class Arm:
    """One compiled optimizer with its state."""

    step: Callable
    compile_s: float
    temporaries: int
    params: dict = dataclasses.field(default_factory=dict)
    state: optax.OptState | None = None
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self, grads: dict) -> float:
        """Take one step; return its seconds."""
        grads = jax.block_until_ready(jax.tree.map(jnp.copy, grads))
        start = time.perf_counter()
        self.params, self.state = self.step(grads, self.state, self.params)
        jax.block_until_ready(self.params)
        return time.perf_counter() - start


def jitted(tx: optax.GradientTransformation, params: dict) -> tuple[Any, tuple]:
    """Return the step as a jitted function of gradients, state and parameters, all
    donated, and their shapes.
    """

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(step, donate_argnums=(0, 1, 2)), (
        params,
        jax.eval_shape(tx.init, params),
        params,
    )


def compiled(tx: optax.GradientTransformation, params: dict) -> Arm:
    """Compile the step for parameters, or for their shapes."""
    step, arguments = jitted(tx, params)
    start = time.perf_counter()
    with warnings.catch_warnings():  # There are three donated trees for two results.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        found = step.lower(*arguments).compile()
    seconds, memory = time.perf_counter() - start, found.memory_analysis()
    return Arm(found, seconds, memory.temp_size_in_bytes if memory else 0)


def measure(options: Options, console: Console) -> dict[str, Arm]:
    """Compile all optimizers, then run them in turns."""
    params: Any = (
        jax.eval_shape(lambda: matrices(options.model))
        if options.compile_only
        else matrices(options.model)
    )
    arms = {}
    for name in options.optimizers:
        tx = KNOWN[name](RATE)
        arms[name] = compiled(tx, params)
        console.print(f"{name}: compiled in {arms[name].compile_s:.1f} s")
        if not options.compile_only:
            arms[name].params, arms[name].state = (
                jax.tree.map(jnp.copy, params),
                jax.jit(tx.init)(params),
            )
    if options.compile_only:
        return arms
    grads = jax.tree.map(lambda p: p / 2, matrices(options.model, seed=1))
    for i in range(options.repeats + 1):
        seconds = {name: arm.run(grads) for name, arm in arms.items()}
        if i:
            for name, arm in arms.items():
                arm.seconds.append(seconds[name])
        console.print(
            f"round {i} of {options.repeats}" + ("" if i else " (not counted)")
        )
    return arms


def summary(options: Options, arms: dict[str, Arm]) -> dict:
    """Return medians and ratios, with what is needed to measure them again."""
    leaves = jax.tree.leaves(jax.eval_shape(lambda: matrices(options.model)))
    size = sum(4 * x.size for x in leaves)
    rows = {}
    for name, arm in arms.items():
        row = {
            "compile_s": arm.compile_s,
            "temporaries_per_parameter_byte": arm.temporaries / size,
        }
        if BASELINE in arms:
            row["compile_over_optax_muon"] = arm.compile_s / arms[BASELINE].compile_s
        if arm.seconds:
            row |= {
                "state_per_parameter_byte": (
                    sum(x.nbytes for x in jax.tree.leaves(arm.state)) / size
                ),
                "median_ms": 1e3 * statistics.median(arm.seconds),
                "min_ms": 1e3 * min(arm.seconds),
                "max_ms": 1e3 * max(arm.seconds),
            }
            for other in [
                name for name in ("adamw", BASELINE, "clean_muon") if name in arms
            ]:
                pairs = zip(arm.seconds, arms[other].seconds, strict=True)
                row[f"over_{other}"] = statistics.median(a / b for a, b in pairs)
        rows[name] = row
    facts = {"matrices": len(leaves), "parameter_bytes": size, "rows": rows}
    return (
        report.header(report.command("optimizer_step", options), jax.devices()[0])
        | facts
    )


def markdown(result: dict) -> str:
    """Return the report as a table."""
    machine, versions = result["machine"], result["versions"]
    columns = {
        "ms": lambda row: report.number(row["median_ms"]),
        "fastest to slowest": lambda row: (
            f"{report.number(row['min_ms'])} to {report.number(row['max_ms'])}"
        ),
        "/ optax Muon": lambda row: f"{row[f'over_{BASELINE}']:.3g}",
        "/ clean Muon": lambda row: f"{row['over_clean_muon']:.3g}",
        "/ AdamW": lambda row: f"{row['over_adamw']:.3g}",
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "compile / optax Muon": lambda row: f"{row['compile_over_optax_muon']:.2f}",
        "state / weights": lambda row: f"{row['state_per_parameter_byte']:.2f}",
        "temporaries / weights": lambda row: (
            f"{row['temporaries_per_parameter_byte']:.2f}"
        ),
    }
    return (
        f"`{result['command']}`, {result['date']}, {machine['device']}"
        f" ({machine['cores']} cores), jax {versions['jax']}, optax"
        f" {versions['optax']}, {result['matrices']} matrices of"
        f" {result['parameter_bytes'] / 2**20:.3g} MiB. Times are medians, ratios are"
        " medians of each round's ratio.\n\n"
        + report.table("optimizer", columns, result["rows"])
    )


def plot(result: dict) -> Figure:
    """Draw median milliseconds as bars on a logarithmic axis."""
    names = list(result["rows"])
    medians = [result["rows"][name]["median_ms"] for name in names]
    figure = Figure(figsize=(6, 0.4 * len(names) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(
        names,
        medians,
        color=["#0072B2" if n.startswith("normpre") else "#999999" for n in names],
    )
    axes.bar_label(bars, labels=[f"{m:,.0f}" for m in medians], padding=3)
    axes.set(
        xscale="log",
        xlabel="milliseconds per step (median)",
        xlim=(min(medians) / 2, max(medians) * 3),
    )
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def main(options: Options) -> None:
    """Measure, print and write."""
    console = Console(highlight=False)
    unknown = [name for name in options.optimizers if name not in KNOWN]
    if options.model not in MODELS or unknown:
        raise SystemExit(
            f"unknown: {unknown or options.model}; models {sorted(MODELS)}, optimizers"
            f" {[*KNOWN]}"
        )
    result = summary(options, measure(options, console))
    name = f"optimizer_step_{options.model}_{result['machine']['platform']}"
    name += "_compile" if options.compile_only else ""
    figure = None if options.compile_only else plot(result)
    report.write(options.out, name, result, markdown(result), figure)
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.optimizer_step"))
