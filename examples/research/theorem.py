# SPDX-License-Identifier: Apache-2.0
"""The paper's Theorem 1, Corollary 1 and Lemmas 1 to 3, held against actual runs in
float64.

``python -m examples.research.theorem`` lets NormPre-G (exact ``msign``), NormPre-L
(exact) and NormPre-L (sketch), as the library has them, without momentum, RMS scaling
and weight decay and in the row orientation, minimise two functions of one matrix: least
squares, and a network of two layers of which the first is trained. The learning rate is
``C / sqrt(T + 1)`` with the ``C`` that makes the bound least. Every inequality of the
analysis is asserted on the matrices of every step; the bound stands beside the least
gradient norm that was seen, where the condition ``nu gamma' chi <= 1 - epsilon`` held.
It does where rows are short; some of the problems are made so that it does not.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from matplotlib.figure import Figure
from rich.console import Console

from examples.research import command, report
from examples.research.inequalities import (
    COROLLARY,
    LEMMAS,
    THEOREM,
    Step,
    slacks,
    tolerance,
)
from normpre_optax import (
    MatrixDims,
    precondition_globally,
    precondition_locally,
    scale_by_normpre,
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Hold the convergence theorem against actual runs."""

    horizons: tuple[int, ...] = (10, 30, 100, 300, 1000)  # Numbers of steps, T + 1.
    rows: int = 8  # m, the outputs of the trained matrix; at most ``columns``.
    columns: int = 32  # n, its inputs.
    rank: int = 6  # Modes that NormPre-L may clip.
    oversample: int = 1  # Further directions of the sketch.
    power_iterations: int = 4  # Passes that sharpen the sketch.
    seed: int = 0  # Of the problems and of the sketch.
    out: Path = Path("docs/results/theorem")  # Folder for the reports.


class Problem(NamedTuple):
    """A function of one matrix.

    Attributes:
        loss: the function.
        start: ``W_0``.
        smoothness: ``L``, or a number above it.
        infimum: ``L_inf``, or a number below it.
    """

    loss: Callable[[jax.Array], jax.Array]
    start: np.ndarray
    smoothness: float
    infimum: float


def _rows(random: np.random.Generator, m: int, n: int, length: float) -> np.ndarray:
    x = random.standard_normal((m, n))
    return length * x / np.linalg.norm(x, axis=1, keepdims=True)


def least_squares(length: float, m: int, n: int, seed: int) -> Problem:
    """``||W A - B||_F^2 / 2N`` with noisy targets of a matrix whose rows are so long,
    as those of the start are.
    """
    random = np.random.default_rng(seed)
    count = 8 * n
    a = random.standard_normal((n, count))
    b = _rows(random, m, n, length) @ a + 0.1 * length * random.standard_normal(
        (m, count)
    )
    best = b @ np.linalg.pinv(a)
    return Problem(
        lambda w: jnp.sum((w @ a - b) ** 2) / (2 * count),
        _rows(random, m, n, length),
        float(np.linalg.norm(a, 2) ** 2 / count),
        float(np.sum((best @ a - b) ** 2) / (2 * count)),
    )


def two_layers(length: float, m: int, n: int, seed: int) -> Problem:
    """``||V tanh(W A) - B||_F^2 / 2N`` over W, with targets that another W reaches.

    V is fixed, because the loss of both together is not smooth in the theorem's sense.
    With ``|tanh'| <= 1`` and ``|tanh''| <= 4 / 27^(1/2)`` the Hessian is at most
    ``||V||^2 ||A A^T|| / N``, from the outputs' first derivatives, plus that of the
    second ones: for sample i and output neuron j at most ``4 / 27^(1/2) |(V^T r_i)_j|
    a_i a_i^T``, where the residual ``r_i`` is no longer than the outputs and targets
    can be.
    """
    random = np.random.default_rng(seed)
    count = 8 * n
    a = random.standard_normal((n, count))
    v = np.linalg.qr(random.standard_normal((m, m)))[0]
    b = v @ np.tanh(_rows(random, m, n, length) @ a)
    residual = np.sqrt(m) * np.linalg.norm(v, 2) + np.linalg.norm(b, axis=0)
    curvature = 4 / math.sqrt(27) * np.linalg.norm(v, axis=0).max() * residual
    first = np.linalg.norm(v, 2) ** 2 * np.linalg.norm(a, 2) ** 2 / count
    second = np.linalg.norm(a * np.sqrt(curvature), 2) ** 2 / count
    return Problem(
        lambda w: jnp.sum((v @ jnp.tanh(w @ a) - b) ** 2) / (2 * count),
        _rows(random, m, n, length),
        float(first + second),
        0.0,
    )


# Of the rows of ``W_0`` and of the matrix that is looked for: the condition weakens
# with their squares.
LENGTHS = (0.05, 0.3, 1.2)

PROBLEMS: dict[str, Callable[[int, int, int], Problem]] = {
    f"{title}, rows {length}": functools.partial(make, length)
    for title, make in (("least squares", least_squares), ("two layers", two_layers))
    for length in LENGTHS
}


class Variant(NamedTuple):
    """A spectral stage of the library, and which inequalities its steps must keep."""

    stage: optax.GradientTransformation
    rank: int | None
    is_sketch: bool


def variants(options: Options) -> dict[str, Variant]:
    """The three that the paper proves something about."""
    local = functools.partial(
        precondition_locally, options.rank, options.oversample, options.power_iterations
    )
    return {
        "G": Variant(precondition_globally(ns_steps=None), None, False),
        "L exact": Variant(local(method="exact"), options.rank, False),
        "L sketch": Variant(local(seed=options.seed), options.rank, True),
    }


def runner(problem: Problem, variant: Variant) -> Callable[[int], list[Step]]:
    """The library's optimizer on a problem, compiled.

    Args:
        problem: what is minimised.
        variant: by which spectral stage.

    Returns:
        ``T + 1`` to the steps of a run, one ``Step`` each.
    """
    tx = scale_by_normpre(
        variant.stage,
        momentum=0.0,
        rms=None,
        orientation="rows",
        matrix_dims=MatrixDims(inputs=1, outputs=0),
    )

    loss = jax.jit(problem.loss)

    @jax.jit
    def step(w, state, rate):
        now, gradient = jax.value_and_grad(problem.loss)(w)
        update, state = tx.update(gradient, state, w)
        return w - rate * update, state, (gradient, w, update, now)

    def run(count: int) -> list[Step]:
        w = jnp.asarray(problem.start)
        rate = math.sqrt(
            2
            * (float(loss(w)) - problem.infimum)
            / (problem.smoothness * max(w.shape) * count)
        )
        state, found = tx.init(w), []
        for _ in range(count):
            w, state, seen = step(w, state, rate)
            found.append(seen)
        found = jax.device_get(found)
        losses = [float(now) for *_, now in found] + [float(loss(w))]
        return [
            Step(
                gradient,
                weight,
                update,
                variant.rank,
                rate,
                losses[t],
                losses[t + 1],
                problem.smoothness,
            )
            for t, (gradient, weight, update, _) in enumerate(found)
        ]

    return run


class Slack(NamedTuple):
    """The least slack of an inequality, and on how many steps it was asserted."""

    least: float
    steps: int

    @classmethod
    def over(cls, parts: Sequence["Slack"]) -> "Slack":
        """Of several runs together."""
        return cls(min(part.least for part in parts), sum(part.steps for part in parts))


def check(steps: Sequence[Step], is_sketch: bool) -> dict[str, Slack]:
    """Asserts every inequality on every step to which it applies.

    The lemmas speak of exact preconditioners: for a sketch they are asserted of the
    update that it stands for.

    Args:
        steps: of a run.
        is_sketch: whether the corollary is meant, not the theorem.

    Returns:
        What was found, by the inequalities' names.

    Raises:
        AssertionError: naming the inequality, the step, and by how much it fails.
    """
    found: dict[str, list[Slack]] = {}
    for t, step in enumerate(steps):
        exact = step.with_exact_update() if is_sketch else step
        for name, value in {
            **slacks(exact, LEMMAS),
            **slacks(step, COROLLARY if is_sketch else THEOREM),
        }.items():
            assert value >= -tolerance(step), (
                f"{name} fails at step {t}: one side is too large by {-value:.2e} of it"
            )
            found.setdefault(name, []).append(Slack(value, 1))
    return {name: Slack.over(parts) for name, parts in found.items()}


def summary(problem: Problem, steps: Sequence[Step], is_sketch: bool) -> dict:
    """The constants of a run as the theorem takes them, the condition, the bound, and
    what was measured.

    Args:
        problem: what was minimised.
        steps: of the run.
        is_sketch: whether the corollary is meant, not the theorem.

    Returns:
        Numbers by name; ``bound`` is None where the condition fails.
    """
    gamma = min(step.gamma for step in steps)
    gamma_prime = max(step.gamma_prime for step in steps)
    epsilon = 1 - max(step.nu * step.chi for step in steps) * gamma_prime
    delta = max(step.delta for step in steps) if is_sketch else 0.0
    lost = delta * max(float(step.values[0]) for step in steps)
    rate = epsilon * gamma - lost
    gap, side = steps[0].loss - problem.infimum, steps[0].side
    holds = epsilon > 0 and rate > 0
    c = steps[0].learning_rate * math.sqrt(len(steps))
    constant = gap * side**0.5 / c + problem.smoothness * c * side**1.5 / 2
    return {
        "steps": len(steps),
        "gamma": gamma,
        "gamma_prime": gamma_prime,
        "nu": max(step.nu for step in steps),
        "chi": max(step.chi for step in steps),
        "epsilon": epsilon,
        "steps_with_epsilon": sum(step.epsilon > 0 for step in steps),
        "delta": delta,
        "delta_lambda_1": lost,
        "holds": holds,
        "bound": constant / (rate * math.sqrt(len(steps))) if holds else None,
        "measured": min(float(np.linalg.norm(step.gradient)) for step in steps),
        "first": float(np.linalg.norm(steps[0].gradient)),
        "longest_row": max(
            float(np.linalg.norm(step.weight, axis=1).max()) for step in steps
        ),
    }


def measure(options: Options, console: Console) -> tuple[list[dict], dict[str, Slack]]:
    """All runs; the rows of the report, and what was found of every inequality over all
    of them.
    """
    if options.rows > options.columns:
        raise SystemExit(
            f"the row orientation needs rows <= columns, got {options.rows} and"
            f" {options.columns}"
        )
    rows: list[dict] = []
    found: dict[str, list[Slack]] = {}
    for title, make in PROBLEMS.items():
        problem = make(options.rows, options.columns, options.seed)
        for name, variant in variants(options).items():
            run = runner(problem, variant)
            for count in options.horizons:
                steps = run(count)
                for inequality, seen in check(steps, variant.is_sketch).items():
                    found.setdefault(inequality, []).append(seen)
                row = {
                    "problem": title,
                    "variant": name,
                    **summary(problem, steps, variant.is_sketch),
                }
                assert row["bound"] is None or row["measured"] <= row["bound"], (
                    f"the bound is broken: {row}"
                )
                rows.append(row)
            console.print(
                f"{title}, {name}: holds"
                f" {[row['holds'] for row in rows[-len(options.horizons) :]]}"
            )
    return rows, {inequality: Slack.over(parts) for inequality, parts in found.items()}


def plot(rows: Sequence[dict]) -> Figure:
    """Bound and measured norm over the number of steps; runs without a bound are
    hollow.
    """
    titles = list(dict.fromkeys(row["problem"] for row in rows))
    across = min(len(titles), len(LENGTHS))
    down = math.ceil(len(titles) / across)
    figure = Figure(figsize=(3.4 * across, 3.2 * down), layout="constrained")
    axes = list(figure.subplots(down, across, sharex=True, squeeze=False).flat)[
        : len(titles)
    ]
    styles = {
        "G": ("#CB2DD7", 1.5),
        "L exact": ("#E44628", 4.0),
        "L sketch": ("#1F77B4", 1.2),
    }  # the last two coincide
    for axis, title in zip(axes, titles, strict=True):
        for name, (color, width) in styles.items():
            mine = [
                row
                for row in rows
                if row["problem"] == title and row["variant"] == name
            ]
            count = [row["steps"] for row in mine]
            axis.plot(
                count,
                [row["measured"] for row in mine],
                color=color,
                lw=width,
                label=f"{name}, measured",
            )
            for row in mine:
                face = color if row["holds"] else "white"
                axis.plot(
                    row["steps"],
                    row["measured"],
                    "o",
                    color=color,
                    markerfacecolor=face,
                    markersize=4,
                )
            bounds = [
                math.nan if row["bound"] is None else row["bound"] for row in mine
            ]
            if any(row["holds"] for row in mine):
                axis.plot(
                    count,
                    bounds,
                    "--s",
                    color=color,
                    lw=width,
                    markersize=3,
                    label=f"{name}, bound",
                )
        axis.set(
            xscale="log",
            yscale="log",
            xlabel="steps",
            ylabel="smallest gradient norm",
            title=title,
        )
        low, high = axis.get_ylim()
        if high < 10 * low:
            axis.set_ylim(low / 10, high * 10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=7)
    return figure


def markdown(result: dict) -> str:
    """The report as tables."""
    columns = {
        "variant": lambda row: row["variant"],
        "steps": lambda row: str(row["steps"]),
        "gamma": lambda row: f"{row['gamma']:.3f}",
        "gamma'": lambda row: f"{row['gamma_prime']:.2f}",
        "nu": lambda row: f"{row['nu']:.2g}",
        "chi": lambda row: f"{row['chi']:.2f}",
        "epsilon": lambda row: f"{row['epsilon']:.3g}",
        "steps with epsilon > 0": lambda row: str(row["steps_with_epsilon"]),
        "delta lambda_1": lambda row: (
            f"{row['delta_lambda_1']:.2g}" if row["variant"] == "L sketch" else ""
        ),
        "condition": lambda row: "holds" if row["holds"] else "fails",
        "bound": lambda row: f"{row['bound']:.3g}" if row["holds"] else "",
        "measured": lambda row: f"{row['measured']:.3g}",
        "bound / measured": lambda row: (
            f"{row['bound'] / row['measured']:,.0f}" if row["holds"] else ""
        ),
    }
    slacks = [
        [name, f"{found['steps']:,}", f"{found['least']:.1e}"]
        for name, found in result["slacks"].items()
    ]
    return (
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax"
        f" {result['versions']['jax']}, float64. Constants are the worst over a run's"
        " steps. Where the condition `nu gamma' chi <= 1 - epsilon` (for the sketch"
        " also `delta lambda_1 < epsilon gamma`) fails, the theorem makes no"
        " statement, and there is no bound.\n\n"
        + report.table("problem", columns, result["rows"])
        + f"\nAll inequalities held on all of the {result['steps']:,} steps to which"
        " they apply. Slack is the difference of both sides as a share of the larger"
        " one, the smallest over all steps; an equality has none, up to rounding."
        " `signal`, `one_step` and `corollary_signal` apply where the condition"
        " holds on the step by itself.\n\n"
        + report.markdown_table(["inequality", "steps", "smallest slack"], slacks)
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, assert, print and write."""
    options = tyro.cli(
        Options, args=arguments, prog="python -m examples.research.theorem"
    )
    console = Console(highlight=False)
    with jax.enable_x64(True):
        rows, found = measure(options, console)
    result = report.header(report.command("theorem", options), jax.devices()[0]) | {
        "options": {k: v for k, v in dataclasses.asdict(options).items() if k != "out"},
        "steps": sum(row["steps"] for row in rows),
        "rows": rows,
        "slacks": {name: seen._asdict() for name, seen in found.items()},
    }
    report.write(options.out, "theorem", result, markdown(result), plot(rows))
    console.print(markdown(result), soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command.run(main))
