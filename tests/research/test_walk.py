# SPDX-License-Identifier: Apache-2.0
"""The random walk's lengths, against walks that are walked; the coordinate check's table; their figures."""

import json

import numpy as np
import pytest

from examples.pretrain import configs
from examples.pretrain.config import to_dict
from examples.research import coordinates, walk
from tests.examples.conftest import refuses


def test_a_walk_of_many_entries_gets_as_far():
    """40,000 walks with updates of the same correlation, rates that rise and fall, and decay."""
    rng, rms, decay, momentum = np.random.default_rng(0), 0.2, 0.5, 0.9
    rates = 0.05 * np.concatenate([np.linspace(0.1, 1, 30), np.linspace(1, 0.1, 170)])
    w, u = rng.normal(0, 0.03, 40_000), rng.normal(0, rms, 40_000)
    seen = [w.std()]
    for rate in rates:
        w = (1 - rate * decay) * w - rate * u
        u = momentum * u + rng.normal(0, rms * np.sqrt(1 - momentum**2), w.size)
        seen.append(w.std())
    found = walk.walk(0.03, rates, rms=rms, decay=decay, momentum=momentum)
    # A standard deviation over 40,000 is known to 0.35 percent.
    np.testing.assert_allclose(found, seen, rtol=0.015)


def test_the_walks_report(tmp_path, capsys):
    config = configs.parse(["--config", "nano", "--steps", "20", "--warmup-steps", "2", "--model.hidden-std", "0.02"])
    kinds = {kind.name: kind for kind in walk.kinds(config)}
    assert kinds["mlp/up"] == walk.Kind("mlp/up", 64, 256, 0.02)
    assert kinds["mlp/down"] == walk.Kind("mlp/down", 256, 64, pytest.approx(0.02 / np.sqrt(6)))
    assert kinds["attention/qkv"] == walk.Kind("attention/qkv", 64, 192, 0.02)
    norms = {f"{side}_norm/{name}": 0.5 for side in ("row", "column") for name in kinds}
    arm = {"learning_rate": 4e-3, "seed": 0, "status": "finished", "norms": norms}
    arm["row_norm"] = [[0, 0.1, 0.0], [20, 0.5, 0.0]]
    content = {"settings": "nano", "command": "compare nano", "date": "2026-11-23", "config": to_dict(config)}
    content["arms"] = [arm | {"optimizer": walk.FREE}, arm | {"optimizer": walk.TANGENT}]
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    walk.main([str(tmp_path), "--out", str(tmp_path)])
    report = (tmp_path / "walk.md").read_text()
    assert capsys.readouterr().out.strip() in report
    assert "| 0.004 | mlp/up | 0.16 | 0.17 | 0.50 | 0.50 | 0.32 |" in report
    (axes,) = walk.draw(content).axes
    assert [line.get_label() for line in axes.get_lines()] == ["random walk", "no tangent", "with tangent"]
    refuses("no finished run of normpre_g,tangent=none", walk.arms_of, content | {"arms": content["arms"][1:]})


def test_the_coordinate_checks_exponent_of_the_width():
    steps = [0.1, 0.2, 0.3, 0.4]
    grows = {str(width): [x * width / 64 for x in steps] for width in (64, 128, 256)}
    content = {"moves": {"AdamW": grows, "NormPre-H": dict.fromkeys(grows, steps)}}
    assert coordinates.table(content).splitlines()[2:] == [
        "| AdamW | 0.400 | 0.800 | 1.600 | +1.00 |",
        "| NormPre-H | 0.400 | 0.400 | 0.400 | +0.00 |",
    ]
    panels = coordinates.draw(content).axes
    assert [axes.get_title() for axes in panels] == list(content["moves"])
    assert [len(axes.get_lines()) for axes in panels] == [4, 4]


@pytest.mark.slow
def test_a_step_that_changes_nothing_moves_nothing(dataset):
    """A rate near zero: the streams of two programs, compared by the code that compares any."""
    flags = "--config tiny --optimizer normpre_g --model.family gpt2 --learning-rate 1e-30 --steps 2 --warmup-steps 0"
    flags += " --weight-decay 0"
    assert coordinates.moves(configs.parse(flags.split()), dataset) == [0.0, 0.0]
