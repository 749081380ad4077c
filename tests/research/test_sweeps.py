# SPDX-License-Identifier: Apache-2.0
"""Comparisons joined: where known losses are lowest, and what tells sizes apart."""

import json

import numpy as np
import pytest

from examples.pretrain.config import RunError
from examples.research import sweeps


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


@pytest.fixture
def contents():
    """Parabolas in the rate's logarithm: Muon's lowest at 2e-2 / width, MuonEq's at 1e-3 whatever the width."""
    rates = (1e-4, 4e-4, 1e-3, 5e-3)
    bowl = lambda at: {rate: 1 + np.log(rate / at) ** 2 for rate in rates}  # noqa: E731
    return [comparison(width, {"muon": bowl(2e-2 / width), "muoneq": bowl(1e-3)}) for width in (16, 32)]


def test_the_lowest_of_a_parabola_is_found_between_the_rates(contents):
    best = {(x.optimizer, x.size): sweeps.lowest(x.losses) for x in sweeps.sweeps(contents)}
    assert best["muon", "width 16"] == (pytest.approx(2e-2 / 16), "", pytest.approx(1))
    assert best["muon", "width 32"] == (pytest.approx(2e-2 / 32), "", pytest.approx(1))
    assert best["muoneq", "width 32"] == (pytest.approx(1e-3), "", pytest.approx(1))


@pytest.mark.parametrize(("losses", "beyond"), [((1, 2, 3), "<="), ((3, 2, 1), ">=")])
def test_the_lowest_at_an_end_is_told(losses, beyond):
    found = sweeps.lowest(dict(zip((1e-3, 2e-3, 4e-3), losses, strict=True)))
    assert found == (1e-3 if beyond == "<=" else 4e-3, beyond, 1)


def test_seeds_of_one_size_are_averaged(contents):
    """Parabolas of one curvature whose lowest are at 1e-3 and 4e-3: that of their mean is at the geometric mean."""
    rates = (5e-4, 1e-3, 2e-3, 4e-3, 8e-3)
    of_seeds = [
        comparison(16, {"muon": {rate: np.log(rate / at) ** 2 for rate in rates}}, seed)
        for seed, at in enumerate((1e-3, 4e-3))
    ]
    (sweep,) = sweeps.sweeps(of_seeds)
    assert sweeps.lowest(sweep.losses) == (pytest.approx(2e-3), "", pytest.approx(np.log(2) ** 2))
    assert "| 0.002 (0.001, 0.004) | 0.4805 |" in sweeps.table([sweep])


def test_losses_less_those_of_another(contents):
    found = sweeps.sweeps(contents, over="muoneq")
    assert [x.optimizer for x in found] == ["muon", "muon"]
    assert found[0].losses[1e-3] == pytest.approx(np.log(16 / 20) ** 2)
    assert "+0.0498" in sweeps.table(found, over="muoneq")


def test_what_cannot_be_joined_is_told(contents):
    with pytest.raises(RunError, match="one size and seed"):
        sweeps.sweeps([contents[0]] * 2)
    with pytest.raises(RunError, match="no runs of 'mano': it has muon, muoneq"):
        sweeps.sweeps(contents, over="mano")


def test_one_optimizer_alone(contents, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(json.dumps(contents[0]))
    sweeps.main([str(tmp_path), "--out", str(tmp_path), "--only", "muoneq"])
    assert "Muon |" not in capsys.readouterr().out
    with pytest.raises(RunError, match="no comparison has runs of 'mano'"):
        sweeps.main([str(tmp_path), "--out", str(tmp_path), "--only", "mano"])
    with pytest.raises(RunError, match=r"holds no comparison\.json and no report/comparison\.json"):
        sweeps.main([str(tmp_path / "none"), "--out", str(tmp_path)])
    with pytest.raises(RunError, match="which folders"):
        sweeps.main(["--out", str(tmp_path)])


def test_the_report(contents, tmp_path, capsys):
    for i, content in enumerate(contents):
        (tmp_path / str(i) / "report").mkdir(parents=True)
        (tmp_path / str(i) / "report" / "comparison.json").write_text(json.dumps(content))
    sweeps.main([str(tmp_path / "0"), str(tmp_path / "1"), "--out", str(tmp_path), "--title", "Widths"])
    report = (tmp_path / "README.md").read_text()
    assert report.startswith("# Widths\n")
    assert capsys.readouterr().out.strip() in report
    assert "| Muon | width 16 |" in report
    assert "diverged | 0.0013 | 1.0000 |" in report
    assert "- `compare 32`" in report
    figure = sweeps.draw(sweeps.sweeps(contents))
    assert [len(axes.get_lines()) - 1 for axes in figure.axes] == [2, 2]  # and the dashed one
    assert (tmp_path / "sweeps.png").exists()
