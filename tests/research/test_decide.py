# SPDX-License-Identifier: Apache-2.0
"""Tuning on some seeds and deciding on others.

Losses are from a formula instead of runs.
"""

import json
import math
from types import SimpleNamespace

import pytest

from examples.pretrain.compare.study import Study
from examples.pretrain.names import is_relative, split_name
from examples.research import command, decide
from tests import cases

HYPERBALL = "muon,norm_control=hyperball"


def formula(arm, steps):
    """The loss of an arm after some steps.

    It is lowest at a learning rate of 6.4e-2, 4e-3 for the AdamW group, and a weight
    decay of 0.03.
    """
    settings = split_name(arm.optimizer)[1]
    distances = [
        arm.learning_rate / 6.4e-2,
        float(settings["adam_learning_rate"]) / 4e-3,
    ]
    if not is_relative(arm.optimizer):
        distances.append(float(settings.get("weight_decay", 0.1)) / 0.03)
    loss = 2 + sum(0.1 * math.log(x) ** 2 for x in distances)
    if "normpre_h" in arm.optimizer:
        loss -= 0.05
    return loss - 0.2 * math.log(steps / 1500) + 0.01 * math.sin(arm.seed)


FACTS = {
    "settings": "nano",
    "command": "decide",
    "date": "",
    "machine": {"kind": "cpu", "cores": 1},
    "config": {
        "steps": 1500,
        "batch_size": 16,
        "model.context": 64,
        "model.family": "gpt2",
        "model.layers": 3,
        "model.width": 64,
    },
    "parameters": 1,
    "text": {"source": "text"},
    "versions": {"python": "3", "jax": "0"},
}


@pytest.fixture
def ran(monkeypatch, tmp_path):
    """The arms that ran; the folder of a study."""
    arms = []

    def run(self, wanted):
        flags = self.config_flags
        steps = self.config.steps
        if "--steps" in flags:
            steps = int(flags[flags.index("--steps") + 1])
        for arm in wanted:
            arms.append((arm, steps))
            self.results[arm] = {
                "status": "finished",
                "validation_loss": formula(arm, steps),
                "train_seconds": 1.0,
            }

    monkeypatch.setattr(Study, "run", run)
    monkeypatch.setattr(Study, "facts", lambda self, line: FACTS)
    monkeypatch.setattr(
        "examples.pretrain.data.open_corpus",
        lambda *_: SimpleNamespace(manifest={"fingerprint": "text"}),
    )
    return arms


def test_options_are_tuned_one_after_the_other_and_seeds_decide(ran, tmp_path):
    fixed = "muoneq,norm_control=hyperball,adam_learning_rate=4e-3,learning_rate=6.4e-2"
    arguments = ["--seeds", "41-44", "--runs-folder", str(tmp_path), "--optimizers"]
    decide.main([*arguments, f"{HYPERBALL}; normpre_h; muon; {fixed}"])
    best = "adam_learning_rate=0.004"
    for seed in range(41, 45):
        for name in (
            f"{HYPERBALL},{best}",
            f"normpre_h,{best}",
            f"muon,{best},weight_decay=0.03",
        ):
            arm = decide.Arm(name, 6.4e-2, seed)
            assert (arm, 1500) in ran, "extended beyond the first three"
    seeds_of_fixed = {arm.seed for arm, _ in ran if "muoneq" in arm.optimizer}
    assert seeds_of_fixed == {41, 42, 43, 44}, "is not tuned"
    assert {steps for _, steps in ran} == {1350, 1500, 1650}
    found = json.loads((tmp_path / "decide-nano/report/decision.json").read_text())
    rows = {row["optimizer"]: row for row in found["rows"]}
    assert len(rows) == 4
    less = rows["NormPre-H, adam_learning_rate=0.004"]["less"]
    assert less == pytest.approx([-0.05] * 4)
    page = (tmp_path / "decide-nano/report/README.md").read_text()
    # A loss of 0.2 log(steps) falls by 0.05 in exp(0.25) = 1.284 times the steps.
    assert "| -0.0500 ± 0.0000 |" in page
    assert "+28.4%" in page


def test_an_optimizer_that_always_diverges_is_reported(ran, tmp_path, monkeypatch):
    own = formula

    def diverges(arm, steps):
        return math.inf if arm.optimizer.startswith("muon") else own(arm, steps)

    monkeypatch.setitem(globals(), "formula", diverges)
    arguments = ["--seeds", "41-41", "--runs-folder", str(tmp_path), "--optimizers"]
    decide.main([*arguments, f"normpre_h; {HYPERBALL}"])
    rates = {arm.learning_rate for arm, _ in ran if "muon" in arm.optimizer}
    assert rates == {8e-3, 1.6e-2, 3.2e-2}, "not extended"
    page = (tmp_path / "decide-nano/report/README.md").read_text()
    assert "| +inf |" in page
    assert "± nan" not in page
    assert "| nan |" not in page


@cases.rows(
    "flag value said",
    ("--seeds", "2-4", "seeds 0 to 2 are for tuning"),
    ("--seeds", "48-41", "write first-last"),
    ("--seeds", "41-43-45", "write first-last"),
    ("--weight-decay", "0.3", "--weight-decay is what `decide` sets itself"),
    ("--optimizers", ";", "name each optimizer once, at least one"),
    ("--optimizers", "muon; muon", "name each optimizer once, at least one"),
    ("--optimizers", "muon; normpre_hh", "--optimizer must be one of adamw"),
    (
        "--optimizers",
        "muon,weight_decay=0.05",
        "muon,weight_decay=0.05 is tuned, also its weight_decay",
    ),
    ("--seeds", "x", "--seeds must be numbers with '-' between them, got 'x'"),
    (
        "--learning-rates",
        "8e-3;1",
        "--learning-rates must be numbers with ',' between them, got '8e-3;1'",
    ),
)
def test_what_is_refused(ran, capsys, flag, value, said):
    assert command.run(decide.main, ["--optimizers", HYPERBALL, flag, value]) != 0
    assert said in capsys.readouterr().err
