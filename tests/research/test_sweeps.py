# SPDX-License-Identifier: Apache-2.0
"""Comparisons joined: where known losses are lowest, and what tells sizes apart."""

import json

import numpy as np
import pytest

from examples.research import sweeps
from tests.examples.conftest import refuses

RATES = (1e-4, 4e-4, 1e-3, 5e-3)


def bowl(at, rates=RATES):
    """A parabola in the rate's logarithm."""
    return {rate: 1 + np.log(rate / at) ** 2 for rate in rates}


def comparison(width, losses, seed=0):
    """Runs of ``width``; ``losses`` by optimizer and rate."""
    arms = [
        {"optimizer": name, "learning_rate": rate, "seed": seed, "status": "finished", "best_validation_loss": loss}
        for name, by_rate in losses.items()
        for rate, loss in by_rate.items()
    ]
    arms.append({"optimizer": "muon", "learning_rate": 1.0, "seed": seed, "status": "diverged"})
    config = {"model.width": width, "model.layers": 3, "steps": 10, "batch_size": 4}
    return {"settings": "nano", "config": config, "arms": arms, "command": f"compare {width}", "date": "2026-11-23"}


# Muon's lowest at 2e-2 / width, MuonEq's at 1e-3 whatever the width.
CONTENTS = [comparison(width, {"muon": bowl(2e-2 / width), "muoneq": bowl(1e-3)}) for width in (16, 32)]


def test_the_lowest_loss_is_found_between_the_rates_and_at_an_end_is_told():
    best = {(x.optimizer, x.size): sweeps.lowest(x.losses) for x in sweeps.sweeps(CONTENTS)}
    assert best["muon", "width 16"] == (pytest.approx(2e-2 / 16), "", pytest.approx(1))
    assert best["muon", "width 32"] == (pytest.approx(2e-2 / 32), "", pytest.approx(1))
    assert best["muoneq", "width 32"] == (pytest.approx(1e-3), "", pytest.approx(1))
    assert sweeps.lowest({1e-3: 1, 2e-3: 2, 4e-3: 3}) == (1e-3, "<=", 1)
    assert sweeps.lowest({1e-3: 3, 2e-3: 2, 4e-3: 1}) == (4e-3, ">=", 1)


def test_seeds_of_one_size_are_averaged():
    """Parabolas of one curvature whose lowest are at 1e-3 and 4e-3: that of their mean is at the geometric mean."""
    rates = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    of_seeds = [comparison(16, {"muon": bowl(at, rates)}, seed) for seed, at in enumerate((1e-3, 4e-3))]
    (sweep,) = sweeps.sweeps(of_seeds)
    assert sweeps.lowest(sweep.losses) == (pytest.approx(2e-3), "", pytest.approx(1 + np.log(2) ** 2))
    assert "| 0.002 (0.001, 0.004) | 1.4805 |" in sweeps.table([sweep])


def test_losses_less_those_of_another_and_what_cannot_be_joined():
    found = sweeps.sweeps(CONTENTS, over="muoneq")
    assert [x.optimizer for x in found] == ["muon", "muon"]
    assert found[0].losses[1e-3] == pytest.approx(np.log(16 / 20) ** 2)
    assert "+0.0498" in sweeps.table(found, over="muoneq")
    refuses("one size and seed", sweeps.sweeps, [CONTENTS[0]] * 2)
    refuses("no runs of 'mano': it has muon, muoneq", sweeps.sweeps, CONTENTS, over="mano")


def test_the_report(tmp_path, capsys):
    for i, content in enumerate(CONTENTS):
        (tmp_path / str(i) / "report").mkdir(parents=True)
        (tmp_path / str(i) / "report" / "comparison.json").write_text(json.dumps(content))
    here, out = str(tmp_path / "0"), ["--out", str(tmp_path)]
    sweeps.main([here, str(tmp_path / "1"), *out, "--title", "Widths"])
    report = (tmp_path / "README.md").read_text()
    assert report.startswith("# Widths\n")
    assert capsys.readouterr().out.strip() in report
    assert "| Muon | width 16 |" in report
    assert "diverged | 0.0013 | 1.0000 |" in report
    assert "- `compare 32`" in report
    assert [len(axes.get_lines()) - 1 for axes in sweeps.draw(sweeps.sweeps(CONTENTS)).axes] == [2, 2]
    sweeps.main([here, *out, "--only", "muoneq"])
    assert "Muon |" not in capsys.readouterr().out
    for arguments, line in (
        ([here, *out, "--only", "mano"], "no comparison has runs of 'mano'"),
        ([str(tmp_path / "none"), *out], r"holds no comparison\.json and no report/comparison\.json"),
        (out, "which folders"),
    ):
        refuses(line, sweeps.main, arguments)
