# SPDX-License-Identifier: Apache-2.0
"""The tables and paragraphs of a report, in Markdown."""

import math
import warnings
from collections.abc import Sequence

import numpy as np

from ..configs import with_rates_of_hyperball
from ..flat import from_dict
from ..names import is_relative
from .results import (
    Content,
    Run,
    best_runs,
    label,
    learning_rate_of,
    loss_of,
    mean_loss,
    of_seeds,
    optimizers,
    paired,
    step_of,
    swept,
)

LOSSES = (
    "Best validation loss in nats per token at each optimizer's best learning rate:"
    " mean and sample standard deviation over seeds, of which the first chose the"
    " learning rates; mean norms of the hidden matrices' rows and columns at the end,"
    " first seed. If the best is the smallest or largest tried, the optimum may lie"
    " beyond."
)
STEPS = (
    "Steps are where the mean loss first falls to the other's, interpolated. The"
    " learning rate is still high there, so a run of so many steps would end lower."
)


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    ruler = ["---"] * len(heads)
    return "".join(f"| {' | '.join(row)} |\n" for row in (heads, ruler, *rows))


def losses_table(content: Content) -> str:
    """Best validation loss at the best learning rate; bold: the lowest.

    Mean and sample standard deviation over seeds, with the norms of the hidden
    matrices' rows and columns at the end, of the first seed.
    """
    runs = best_runs(content)
    least = min(map(mean_loss, runs.values()), default=0.0)
    rows = [
        losses_row(name, arms, swept(content, name), least)
        for name, arms in runs.items()
    ]
    heads = [
        "optimizer",
        "learning rate",
        "of the AdamW group",
        "validation loss",
        "deviation",
        "seeds",
        "row norm",
        "column norm",
    ]
    text = table(heads, rows)
    seeds = {frozenset(of_seeds(arms)) for arms in runs.values()}
    if len(seeds) > 1:
        text += "\nRuns are missing: these means are of different seeds.\n"
    for name, arms in runs.items():
        text += beyond_the_sweep(content, name, learning_rate_of(arms[0]))
    return text


def beyond_the_sweep(content: Content, name: str, best: float) -> str:
    """A line on the rule by length, if it lies beyond an end that is the best.

    Of optimizers under Hyperball, which the rule is for.
    """
    end = end_of_range(best, [learning_rate_of(arm) for arm in swept(content, name)])
    if not end or not is_relative(name):
        return ""
    rule = rule_by_length(content)
    below = end == "smallest" and rule < best
    above = end == "largest" and rule > best
    if not below and not above:
        return ""
    return (
        f"\n{label(name)}: the best learning rate, {best:g}, is the {end} tried, and"
        f" the rule by length (`learning_rate_by_length`), {rule:g}, lies beyond it.\n"
    )


def rule_by_length(content: Content) -> float:
    """The default learning rate of the runs under Hyperball."""
    config = from_dict(content["config"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of lengths that the rule was not measured at
        return with_rates_of_hyperball(config, config.steps).learning_rate


def losses_row(
    name: str, arms: Sequence[Run], tried: Sequence[Run], least: float
) -> list[str]:
    """The row of one optimizer, whose ``arms`` are the seeds at its best rate."""
    best = arms[0]["learning_rate"]
    rates = [arm["learning_rate"] for arm in tried]
    rate = f"{best:g}"
    if end := end_of_range(best, rates):
        rate += f" ({end})"
    group = arms[0].get("adam_learning_rate", best)
    mean = f"{mean_loss(arms):.4f}"
    if mean_loss(arms) == least:
        mean = f"**{mean}**"
    deviation = ""
    if len(arms) > 1:
        deviation = f"{np.std([loss_of(arm) for arm in arms], ddof=1):.4f}"
    norms = ["", ""]
    if found := arms[0].get("norms"):
        norms = [f"{found[name]:.2f}" for name in ("row_norm", "column_norm")]
    return [
        label(name),
        rate,
        f"{group:g}",
        mean,
        deviation,
        str(len(arms)),
        *norms,
    ]


def end_of_range(best: float, rates: Sequence[float]) -> str:
    """The end that the best of several learning rates is at; "" if it is at none."""
    if len(rates) == 1:
        return ""
    if best == rates[0]:
        return "smallest"
    if best == rates[-1]:
        return "largest"
    return ""


def differences_table(content: Content) -> str:
    """By how much the best optimizer is ahead over common seeds.

    And at which step it has another's loss.
    """
    runs = best_runs(content)
    best = min(runs, key=lambda name: mean_loss(runs[name]), default="")
    rows = []
    for name in runs:
        if name != best:
            others, own = paired(runs[name], runs[best])
            steps = content["config"]["steps"]
            row = [label(name), gain(others, own), step_reached(others, own, steps)]
            rows.append(row)
    if not rows:
        return ""
    heads = ["optimizer", f"{label(best)} is ahead by", "and has its loss at step"]
    return f"{table(heads, rows)}\n{STEPS}\n"


def gain(others: Sequence[Run], own: Sequence[Run]) -> str:
    """By how much ``own`` losses are lower than those of the same seeds, with error."""
    ahead = [loss_of(a) - loss_of(b) for a, b in zip(others, own, strict=True)]
    if not ahead:
        return ""
    mean = f"{np.mean(ahead):.4f}"
    if len(ahead) == 1:
        return mean
    error = np.std(ahead, ddof=1) / len(ahead) ** 0.5
    return f"{mean} ± {error:.4f}"


def step_reached(others: Sequence[Run], own: Sequence[Run], steps: int) -> str:
    """The step, of ``steps``, at which ``own`` runs have the others' mean loss."""
    if not own:
        return ""
    step = step_of(mean_loss(others), own)
    if math.isnan(step):
        return "not reached, or a log is damaged"
    return f"{step:,.0f} ({1 - step / steps:.0%} fewer)"


def runs_table(content: Content) -> str:
    """Best validation loss of every run, by learning rate, and why runs failed."""
    order = optimizers(content)
    arms = sorted(content["arms"], key=lambda arm: order.index(arm["optimizer"]))
    cells: dict[tuple[str, str], dict[float, str]] = {}
    for arm in arms:
        ending = arm["status"]
        if ending == "finished":
            ending = f"{loss_of(arm):.4f}"
        row = cells.setdefault((label(arm["optimizer"]), str(arm["seed"])), {})
        row[arm["learning_rate"]] = ending
    rates = sorted({arm["learning_rate"] for arm in arms})
    heads = ["optimizer", "seed", *(f"{rate:g}" for rate in rates)]
    rows = []
    for run, found in cells.items():
        losses = [found.get(rate, "") for rate in rates]
        rows.append([*run, *losses])
    text = table(heads, rows)
    for arm in content["arms"]:
        if arm["status"] == "failed":
            run = f"{label(arm['optimizer'])}, seed {arm['seed']}"
            text += f"\n{run}, failed: {arm['reason']}\n"
    return text


def setting(content: Content) -> str:
    """Command, model, budget, machine and versions of a report, in a paragraph."""
    config = content["config"]
    machine = content["machine"]
    versions = content["versions"]
    batch = config["batch_size"]
    context = config["model.context"]
    tokens = config["steps"] * batch * context
    text = content["text"]["source"]
    if passes := content["text"].get("passes"):  # None before version 0.3
        text += f", {passes:.2g} passes over it"
    return (
        f"`{content['command']}`, {content['date']}. {content['parameters']:,}"
        f" parameters ({config['model.family']}, {config['model.layers']} layers, width"
        f" {config['model.width']}), {config['steps']:,} steps of {batch} x {context}"
        f" tokens ({tokens:,}) of {text}. {machine['kind']}, {machine['cores']} core(s)"
        f" a run, Python {versions['python']}, jax {versions['jax']}.\n"
    )


def markdown(content: Content) -> str:
    """The report, without figures."""
    differences = "Differences over common seeds, mean ± standard error"
    parts = {
        f"# Comparison: {content['settings']}": setting(content),
        "## Validation loss": f"{LOSSES}\n\n{losses_table(content)}",
        f"## {differences}": differences_table(content),
        "## Every run, by learning rate": runs_table(content),
    }
    return "\n".join(f"{heading}\n\n{part}" for heading, part in parts.items() if part)
