# SPDX-License-Identifier: Apache-2.0
"""The paper's Theorem 1, Corollary 1 and Lemmas 1 to 3, compared with runs in float64.

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
from matplotlib.axes import Axes
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
    """A random matrix whose rows have this norm."""
    x = random.standard_normal((m, n))
    return length * x / np.linalg.norm(x, axis=1, keepdims=True)


def least_squares(length: float, m: int, n: int, seed: int) -> Problem:
    """``||W A - B||_F^2 / 2N`` with noisy targets of a matrix.

    Its rows and those of the start have the norm ``length``.
    """
    random = np.random.default_rng(seed)
    count = 8 * n
    a = random.standard_normal((n, count))
    noiseless = _rows(random, m, n, length) @ a
    b = noiseless + 0.1 * length * random.standard_normal((m, count))
    best = b @ np.linalg.pinv(a)
    return Problem(
        loss=lambda w: jnp.sum((w @ a - b) ** 2) / (2 * count),
        start=_rows(random, m, n, length),
        smoothness=float(np.linalg.norm(a, 2) ** 2 / count),
        infimum=float(np.sum((best @ a - b) ** 2) / (2 * count)),
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
        loss=lambda w: jnp.sum((v @ jnp.tanh(w @ a) - b) ** 2) / (2 * count),
        start=_rows(random, m, n, length),
        smoothness=float(first + second),
        infimum=0.0,
    )


# With the norms of the rows of ``W_0`` and of the matrix that is looked for: the
# condition weakens with their squares.
PROBLEMS: dict[str, Callable[[int, int, int], Problem]] = {
    "least squares, rows 0.05": functools.partial(least_squares, 0.05),
    "least squares, rows 0.3": functools.partial(least_squares, 0.3),
    "least squares, rows 1.2": functools.partial(least_squares, 1.2),
    "two layers, rows 0.05": functools.partial(two_layers, 0.05),
    "two layers, rows 0.3": functools.partial(two_layers, 0.3),
    "two layers, rows 1.2": functools.partial(two_layers, 1.2),
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
        gap = float(loss(w)) - problem.infimum
        rate = math.sqrt(2 * gap / (problem.smoothness * max(w.shape) * count))
        state = tx.init(w)
        seen = []
        for _ in range(count):
            w, state, one = step(w, state, rate)
            seen.append(one)
        seen = jax.device_get(seen)
        losses = [float(now) for *_, now in seen] + [float(loss(w))]
        steps = []
        for t, (gradient, weight, update, _) in enumerate(seen):
            steps.append(
                Step(
                    gradient,
                    weight,
                    update,
                    variant.rank,
                    learning_rate=rate,
                    loss=losses[t],
                    next_loss=losses[t + 1],
                    smoothness=problem.smoothness,
                )
            )
        return steps

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
    """Assert every inequality on every step to which it applies.

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
        if is_sketch:
            exact = step.with_exact_update()
            values = slacks(exact, LEMMAS) | slacks(step, COROLLARY)
        else:
            values = slacks(step, LEMMAS) | slacks(step, THEOREM)
        for name, value in values.items():
            assert value >= -tolerance(step), (
                f"{name} fails at step {t}: one side is too large by {-value:.2e} of it"
            )
            found.setdefault(name, []).append(Slack(value, 1))
    return {name: Slack.over(parts) for name, parts in found.items()}


def summary(problem: Problem, steps: Sequence[Step], is_sketch: bool) -> dict:
    """The constants of a run as the theorem has them, the bound, and what was measured.

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
    delta = 0.0
    if is_sketch:
        delta = max(step.delta for step in steps)
    lost = delta * max(float(step.values[0]) for step in steps)
    rate = epsilon * gamma - lost
    gap = steps[0].loss - problem.infimum
    side = steps[0].side
    c = steps[0].learning_rate * math.sqrt(len(steps))
    constant = gap * side**0.5 / c + problem.smoothness * c * side**1.5 / 2
    holds = epsilon > 0 and rate > 0
    bound = None
    if holds:
        bound = constant / (rate * math.sqrt(len(steps)))
    norms = [float(np.linalg.norm(step.gradient)) for step in steps]
    rows = [float(np.linalg.norm(step.weight, axis=1).max()) for step in steps]
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
        "bound": bound,
        "measured": min(norms),
        "first": norms[0],
        "longest_row": max(rows),
    }


def measure(options: Options, console: Console) -> tuple[list[dict], dict[str, Slack]]:
    """All runs.

    Returns:
        The rows of the report, and what was found of every inequality over all runs.
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
            holds = []
            for count in options.horizons:
                steps = run(count)
                for inequality, seen in check(steps, variant.is_sketch).items():
                    found.setdefault(inequality, []).append(seen)
                row = {"problem": title, "variant": name}
                row |= summary(problem, steps, variant.is_sketch)
                assert row["bound"] is None or row["measured"] <= row["bound"], (
                    f"the bound is broken: {row}"
                )
                holds.append(row["holds"])
                rows.append(row)
            console.print(f"{title}, {name}: holds {holds}")
    return rows, {inequality: Slack.over(parts) for inequality, parts in found.items()}


# Color and width; the last two coincide.
STYLES = {
    "G": ("#CB2DD7", 1.5),
    "L exact": ("#E44628", 4.0),
    "L sketch": ("#1F77B4", 1.2),
}
ACROSS = 3  # panels beside each other


def plot(rows: Sequence[dict]) -> Figure:
    """Bound and measured norm over the number of steps, a panel for every problem."""
    titles = list(dict.fromkeys(row["problem"] for row in rows))
    across = min(len(titles), ACROSS)
    down = math.ceil(len(titles) / across)
    figure = Figure(figsize=(3.4 * across, 3.2 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, squeeze=False)
    axes = list(panels.flat)[: len(titles)]
    for axis, title in zip(axes, titles, strict=True):
        of_problem = [row for row in rows if row["problem"] == title]
        for name in STYLES:
            draw_runs(axis, [row for row in of_problem if row["variant"] == name], name)
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


def draw_runs(axes: Axes, rows: Sequence[dict], variant: str) -> None:
    """Measured norms and bounds of a variant; runs without a bound are hollow."""
    color, width = STYLES[variant]
    steps = [row["steps"] for row in rows]
    measured = [row["measured"] for row in rows]
    axes.plot(steps, measured, color=color, lw=width, label=f"{variant}, measured")
    bounds = []
    for row in rows:
        face = "white"
        bound = math.nan
        if row["holds"]:
            face = color
            bound = row["bound"]
        bounds.append(bound)
        axes.plot(
            row["steps"],
            row["measured"],
            "o",
            color=color,
            markerfacecolor=face,
            markersize=4,
        )
    if any(row["holds"] for row in rows):
        axes.plot(
            steps,
            bounds,
            "--s",
            color=color,
            lw=width,
            markersize=3,
            label=f"{variant}, bound",
        )


def _where_it_holds(cell: Callable[[dict], str]) -> Callable[[dict], str]:
    """A cell that is empty where the condition fails."""

    def shown(row):
        if row["holds"]:
            return cell(row)
        return ""

    return shown


def _of_the_sketch(row: dict) -> str:
    """``delta lambda_1``, which only a sketch has."""
    if row["variant"] != "L sketch":
        return ""
    return f"{row['delta_lambda_1']:.2g}"


def _condition(row: dict) -> str:
    """Whether it holds, in a word."""
    if row["holds"]:
        return "holds"
    return "fails"


COLUMNS: dict[str, Callable[[dict], str]] = {
    "variant": lambda row: row["variant"],
    "steps": lambda row: str(row["steps"]),
    "gamma": lambda row: f"{row['gamma']:.3f}",
    "gamma'": lambda row: f"{row['gamma_prime']:.2f}",
    "nu": lambda row: f"{row['nu']:.2g}",
    "chi": lambda row: f"{row['chi']:.2f}",
    "epsilon": lambda row: f"{row['epsilon']:.3g}",
    "steps with epsilon > 0": lambda row: str(row["steps_with_epsilon"]),
    "delta lambda_1": _of_the_sketch,
    "condition": _condition,
    "bound": _where_it_holds(lambda row: f"{row['bound']:.3g}"),
    "measured": lambda row: f"{row['measured']:.3g}",
    "bound / measured": _where_it_holds(
        lambda row: f"{row['bound'] / row['measured']:,.0f}"
    ),
}


def markdown(result: dict) -> str:
    """The report as tables."""
    slacks = []
    for name, found in result["slacks"].items():
        slacks.append([name, f"{found['steps']:,}", f"{found['least']:.1e}"])
    return (
        f"`{result['command']}`, {result['date']}, {result['machine']['device']}, jax"
        f" {result['versions']['jax']}, float64. Constants are the worst over a run's"
        " steps. Where the condition `nu gamma' chi <= 1 - epsilon` (for the sketch"
        " also `delta lambda_1 < epsilon gamma`) fails, the theorem makes no"
        " statement, and there is no bound.\n\n"
        + report.table("problem", COLUMNS, result["rows"])
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
    given = dataclasses.asdict(options)
    given.pop("out")
    result = report.header(report.command("theorem", options), jax.devices()[0]) | {
        "options": given,
        "steps": sum(row["steps"] for row in rows),
        "rows": rows,
        "slacks": {name: seen._asdict() for name, seen in found.items()},
    }
    page = markdown(result)
    report.write(options.out, "theorem", result, page, plot(rows))
    console.print(page, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command.run(main))
