# SPDX-License-Identifier: Apache-2.0
"""What tables and plots select from the content of a ``comparison.json``."""

import itertools
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from ..optimizers import LABELS

Content = dict[str, Any]
Run = dict[str, Any]  # an arm and its result
NO_POINTS = np.empty((0, 2))

# Those of the paper are distinguishable with every common color blindness (Okabe and
# Ito); the others have the rest of that palette and of Paul Tol's.
COLORS = {
    "adamw": "#000000",
    "normpre_h": "#9933FF",
    "normpre_g": "#D55E00",
    "normpre_l": "#009E73",
    "muon": "#0072B2",
    "mano": "#E69F00",
    "rmnp": "#56B4E9",
    "muoneq": "#332288",
    "muon_plus": "#44AA99",
    "normuon": "#CC79A7",
    "adamuon": "#882255",
    "moga": "#AA4499",
    "swan": "#777777",
}
SPARE_COLORS = ("#CC6677", "#88CCEE", "#661100", "#6699CC")  # of later optimizers
LAST = ("normpre_g", "normpre_l")  # of tables and plots: the paper's


def _names() -> dict[str, tuple[str, str]]:
    """Label and color of every optimizer of the program, in the order of tables."""
    spare = itertools.cycle(SPARE_COLORS)
    first = [name for name in LABELS if name not in LAST]
    names = {}
    for name in (*first, *LAST):
        color = COLORS.get(name) or next(spare)
        names[name] = (LABELS[name], color)
    return names


NAMES = _names()


def base_name(optimizer: str) -> str:
    """``normpre_l`` of ``normpre_l,rank=8``."""
    return optimizer.partition(",")[0]


def label(optimizer: str) -> str:
    """``normpre_l,rank=8,tangent=none`` as ``NormPre-L, rank=8, tangent=none``."""
    base, *settings = optimizer.split(",")
    if base in NAMES:
        base = NAMES[base][0]
    return ", ".join((base, *settings))


def optimizers(content: Content) -> list[str]:
    """Names of optimizers in the order of ``NAMES``.

    Those of one optimizer are side by side, the one without settings first.
    """
    present = dict.fromkeys(arm["optimizer"] for arm in content["arms"])
    others = {base_name(name) for name in present} - NAMES.keys()
    order = [*NAMES, *sorted(others)]

    def place(name: str) -> tuple[int, bool]:
        return order.index(base_name(name)), "," in name

    return sorted(present, key=place)


def first_seed(content: Content) -> int:
    """The seed with which the learning rates were chosen."""
    return min(arm["seed"] for arm in content["arms"])


def swept(content: Content, optimizer: str) -> list[Run]:
    """Arms of the first seed, by learning rate."""
    seed = first_seed(content)
    arms = [
        arm
        for arm in content["arms"]
        if arm["optimizer"] == optimizer and arm["seed"] == seed
    ]
    return sorted(arms, key=learning_rate_of)


def swept_and_finished(content: Content, optimizer: str) -> list[Run]:
    """Arms of the first seed that finished, by learning rate."""
    return [arm for arm in swept(content, optimizer) if is_finished(arm)]


def is_finished(arm: Run) -> bool:
    """Whether an arm neither diverged nor failed."""
    return arm["status"] == "finished"


def learning_rate_of(arm: Run) -> float:
    """Peak learning rate of an arm."""
    return arm["learning_rate"]


def loss_of(arm: Run) -> float:
    """Best validation loss of an arm that finished."""
    return arm["best_validation_loss"]


def best_runs(content: Content) -> dict[str, list[Run]]:
    """Arms (seeds) of each optimizer at its best learning rate, of those that finished.

    The best learning rate is that of the lowest loss with the first seed.
    """
    found = {}
    for name in optimizers(content):
        tried = swept_and_finished(content, name)
        if not tried:
            continue
        best = learning_rate_of(min(tried, key=loss_of))
        found[name] = [
            arm
            for arm in content["arms"]
            if arm["optimizer"] == name
            and is_finished(arm)
            and learning_rate_of(arm) == best
        ]
    return found


def curves(arms: Sequence[Run], losses: Literal["validation", "train"]) -> np.ndarray:
    """Steps and losses of arms, (arms, points, 2); no points if a log was damaged."""
    found = [arm.get(losses, ()) for arm in arms]
    lengths = {len(curve) for curve in found}
    if len(lengths) > 1:
        found = [NO_POINTS for _ in arms]
    return np.array(found).reshape(len(arms), -1, 2)


def mean_loss(arms: Sequence[Run]) -> float:
    """Mean of the best validation losses."""
    return float(np.mean([loss_of(arm) for arm in arms]))


def step_of(loss: float, arms: Sequence[Run]) -> float:
    """Step at which the mean validation loss of arms falls to ``loss``, interpolated.

    NaN if it never does, or if that is unknown.
    """
    steps, losses = curves(arms, "validation").mean(0).T
    if not len(steps):
        return math.nan
    # `interp` needs ascending losses: the lowest so far, from the last to the first.
    lowest = np.minimum.accumulate(losses)[::-1]
    return float(np.interp(loss, lowest, steps[::-1], left=math.nan))


def paired(*optimizers: Sequence[Run]) -> list[list[Run]]:
    """The arms of each optimizer with the seeds that all have, in the same order."""
    by_seed = [of_seeds(arms) for arms in optimizers]
    common = sorted(set.intersection(*map(set, by_seed)))
    pairs = []
    for found in by_seed:
        pairs.append([found[seed] for seed in common])
    return pairs


def of_seeds(arms: Sequence[Run]) -> dict[int, Run]:
    """Arms by their seeds."""
    return {arm["seed"]: arm for arm in arms}
