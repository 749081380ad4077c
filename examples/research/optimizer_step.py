# SPDX-License-Identifier: Apache-2.0
"""Time, compile time and memory of one optimizer step on the matrices of a real model.

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
    """Muon written plainly: five Newton-Schulz iterations for each leaf by itself."""

    def orthogonalize(x: jax.Array) -> jax.Array:
        if x.shape[0] > x.shape[1]:
            return orthogonalize(x.T).T
        y = x / jnp.linalg.norm(x)
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        return y

    def orthogonalize_all(updates, params=None):
        return jax.tree.map(orthogonalize, updates)

    return optax.chain(
        optax.trace(0.95, nesterov=True),
        optax.stateless(orthogonalize_all),
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
    """The step as a jitted function, and the shapes of its arguments.

    These are gradients, state and parameters, all donated.
    """

    def step(grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    arguments = (params, jax.eval_shape(tx.init, params), params)
    return jax.jit(step, donate_argnums=(0, 1, 2)), arguments


def compiled(tx: optax.GradientTransformation, params: dict) -> Arm:
    """Compile the step for parameters, or for their shapes."""
    step, arguments = jitted(tx, params)
    start = time.perf_counter()
    with warnings.catch_warnings():  # There are three donated trees for two results.
        warnings.filterwarnings("ignore", "Some donated buffers were not usable")
        found = step.lower(*arguments).compile()
    seconds = time.perf_counter() - start
    temporaries = 0
    if memory := found.memory_analysis():
        temporaries = memory.temp_size_in_bytes
    return Arm(found, seconds, temporaries)


def measure(options: Options, console: Console) -> dict[str, Arm]:
    """Compile all optimizers, then run them in turns."""
    arms = compile_all(options, console)
    if options.compile_only:
        return arms
    grads = jax.tree.map(lambda p: p / 2, matrices(options.model, seed=1))
    for i in range(options.repeats + 1):
        seconds = {name: arm.run(grads) for name, arm in arms.items()}
        if i == 0:
            console.print(f"round {i} of {options.repeats} (not counted)")
            continue
        for name, arm in arms.items():
            arm.seconds.append(seconds[name])
        console.print(f"round {i} of {options.repeats}")
    return arms


def compile_all(options: Options, console: Console) -> dict[str, Arm]:
    """Every optimizer, with parameters and state if it is to run."""
    params: Any
    if options.compile_only:
        params = jax.eval_shape(lambda: matrices(options.model))
    else:
        params = matrices(options.model)
    arms = {}
    for name in options.optimizers:
        tx = KNOWN[name](RATE)
        arm = compiled(tx, params)
        console.print(f"{name}: compiled in {arm.compile_s:.1f} s")
        if not options.compile_only:
            arm.params = jax.tree.map(jnp.copy, params)  # a step donates them
            arm.state = jax.jit(tx.init)(params)
        arms[name] = arm
    return arms


def summary(options: Options, arms: dict[str, Arm]) -> dict:
    """Medians and ratios, with what is needed to measure them again."""
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
            row |= times_of(arm, arms, size)
        rows[name] = row
    command = report.command("optimizer_step", options)
    return report.header(command, jax.devices()[0]) | {
        "matrices": len(leaves),
        "parameter_bytes": size,
        "rows": rows,
    }


def times_of(arm: Arm, arms: dict[str, Arm], size: int) -> dict[str, float]:
    """Milliseconds, ratios to others in the same round, and bytes of state.

    Args:
        arm: one that has run.
        arms: all of them, by name.
        size: bytes of the parameters.
    """
    state = sum(x.nbytes for x in jax.tree.leaves(arm.state))
    row = {
        "state_per_parameter_byte": state / size,
        "median_ms": 1e3 * statistics.median(arm.seconds),
        "min_ms": 1e3 * min(arm.seconds),
        "max_ms": 1e3 * max(arm.seconds),
    }
    for other in ("adamw", BASELINE, "clean_muon"):
        if other in arms:
            pairs = zip(arm.seconds, arms[other].seconds, strict=True)
            row[f"over_{other}"] = statistics.median(a / b for a, b in pairs)
    return row


def markdown(result: dict) -> str:
    """The report as a table."""
    machine = result["machine"]
    versions = result["versions"]

    def two_digits(key):
        return lambda row: f"{row[key]:.2f}"

    def ratio(other):
        return lambda row: f"{row[f'over_{other}']:.3g}"

    def extremes(row):
        return f"{report.number(row['min_ms'])} to {report.number(row['max_ms'])}"

    columns = {
        "ms": lambda row: report.number(row["median_ms"]),
        "fastest to slowest": extremes,
        "/ optax Muon": ratio(BASELINE),
        "/ clean Muon": ratio("clean_muon"),
        "/ AdamW": ratio("adamw"),
        "compile s": lambda row: f"{row['compile_s']:.1f}",
        "compile / optax Muon": two_digits("compile_over_optax_muon"),
        "state / weights": two_digits("state_per_parameter_byte"),
        "temporaries / weights": two_digits("temporaries_per_parameter_byte"),
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
    """Median milliseconds as bars on a logarithmic axis."""
    names = list(result["rows"])
    medians = [result["rows"][name]["median_ms"] for name in names]
    colors = ["#999999"] * len(names)
    for place, name in enumerate(names):
        if name.startswith("normpre"):
            colors[place] = "#0072B2"
    figure = Figure(figsize=(6, 0.4 * len(names) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    bars = axes.barh(names, medians, color=colors)
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
    page = markdown(result)
    if options.compile_only:
        report.write(options.out, f"{name}_compile", result, page)
    else:
        report.write(options.out, name, result, page, plot(result))
    console.print(page, soft_wrap=True)


if __name__ == "__main__":
    main(tyro.cli(Options, prog="python -m examples.research.optimizer_step"))
