# SPDX-License-Identifier: Apache-2.0
"""One run of a comparison, and what a report needs of its folder."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..config import RunError
from ..logs import read_json, read_lines

Result = dict[str, Any]
LogLine = dict[str, Any]
CURVE_POINTS = 100  # of a training loss in a report


class Arm(NamedTuple):
    """One run of a comparison."""

    optimizer: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Its folder."""
        name = f"{self.optimizer}-lr{self.learning_rate:g}-seed{self.seed}"
        return name.replace("/", ".")

    @property
    def flags(self) -> list[str]:
        """Flags of ``train`` that distinguish it from the others."""
        return [
            "--optimizer",
            self.optimizer,
            "--learning-rate",
            repr(self.learning_rate),
            "--seed",
            str(self.seed),
        ]


def finished(folder: Path) -> Result | None:
    """How the run in ``folder`` ended; None if it has not ended.

    With what figures need of its log: every validation loss, at most 100 means of
    training losses, and row norms.
    """
    try:
        result = read_json(folder / "result.json")
    except (OSError, RunError):
        return None
    if not {"best_validation_loss", "diverged"} & result.keys():
        return None
    status = "finished"
    if "diverged" in result:
        status = "diverged"
    lines = read_lines(folder / "log.jsonl")
    evaluations = [line for line in lines if "validation_loss" in line]
    return {
        "status": status,
        **result,
        "train": training_curve(lines),
        "validation": validation_curve(evaluations),
        "row_norm": row_norm_curve(evaluations),
        "norms": last_norms(evaluations),
    }


def training_curve(lines: list[LogLine]) -> list[list[float]]:
    """Steps and training losses, each the mean over a hundredth of the steps."""
    losses = [(line["step"], line["loss"]) for line in lines if "loss" in line]
    points = np.array(losses).reshape(-1, 2)
    curve: list[list[float]] = []
    for part in np.array_split(points, CURVE_POINTS):
        if len(part):  # a short run has fewer steps than parts
            last_step = int(part[-1, 0])
            curve.append([last_step, round(float(part[:, 1].mean()), 5)])
    return curve


def validation_curve(evaluations: list[LogLine]) -> list[list[float]]:
    """Steps and validation losses."""
    return [[line["step"], round(line["validation_loss"], 6)] for line in evaluations]


def row_norm_curve(evaluations: list[LogLine]) -> list[list[float]]:
    """Steps, mean row norms, and shares of rows with a norm above one."""
    curve = []
    for line in evaluations:
        norm = round(line["row_norm"], 5)
        beyond = round(line["rows_beyond_1"], 5)
        curve.append([line["step"], norm, beyond])
    return curve


def last_norms(evaluations: list[LogLine]) -> dict[str, float]:
    """All norms at the end of a run."""
    if not evaluations:
        return {}
    return {
        name: round(value, 4)
        for name, value in evaluations[-1].items()
        if "_norm" in name or "beyond" in name
    }
