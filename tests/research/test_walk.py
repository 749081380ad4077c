# SPDX-License-Identifier: Apache-2.0
"""The random walk's lengths, against walks that are walked, and its table and figure."""

import json

import numpy as np
import pytest

from examples.pretrain import configs
from examples.pretrain.config import RunError, to_dict
from examples.research import walk


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


def test_without_updates_weights_decay():
    found = walk.walk(2.0, np.full(3, 0.1), rms=0.0, decay=1.0, momentum=0.9)
    np.testing.assert_allclose(found, 2 * 0.9 ** np.arange(4))


def test_the_sizes_of_every_kind_of_matrix():
    config = configs.parse(["--config", "nano", "--model.hidden-std", "0.06"])
    found = {kind.name: kind for kind in walk.kinds(config)}
    assert found["mlp/up"] == walk.Kind("mlp/up", 64, 256, 0.06)
    assert found["mlp/down"][1:3] == (256, 64)
    assert found["mlp/down"].std == pytest.approx(0.06 / np.sqrt(6))
    assert found["attention/qkv"] == walk.Kind("attention/qkv", 64, 192, 0.06)


@pytest.fixture
def content():
    config = configs.parse(["--config", "nano", "--steps", "20", "--warmup-steps", "2"])
    norms = {f"{side}_norm/{kind.name}": 0.5 for side in ("row", "column") for kind in walk.kinds(config)}
    arm = {"learning_rate": 4e-3, "seed": 0, "status": "finished", "norms": norms}
    arm["row_norm"] = [[0, 0.1, 0.0], [20, 0.5, 0.0]]
    arms = [arm | {"optimizer": walk.FREE}, arm | {"optimizer": walk.TANGENT}]
    told = {"settings": "nano", "command": "compare nano", "date": "2026-11-23"}
    return told | {"config": to_dict(config), "arms": arms}


def test_the_report(content, tmp_path, capsys):
    (tmp_path / "comparison.json").write_text(json.dumps(content))
    walk.main([str(tmp_path), "--out", str(tmp_path)])
    report = (tmp_path / "walk.md").read_text()
    assert capsys.readouterr().out.strip() in report
    assert "| 0.004 | mlp/up | 0.16 | 0.17 | 0.50 | 0.50 | 0.32 |" in report
    (axes,) = walk.draw(content).axes
    assert [line.get_label() for line in axes.get_lines()] == ["random walk", "no tangent", "with tangent"]


def test_a_comparison_without_such_a_run(content):
    with pytest.raises(RunError, match=r"no finished run of normpre_g:matrix\.tangent=none"):
        walk.arms_of(content | {"arms": content["arms"][1:]})
