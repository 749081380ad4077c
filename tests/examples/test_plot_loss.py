# SPDX-License-Identifier: Apache-2.0
"""Loss curves from logs."""

import json

import matplotlib.image
import numpy as np
import pytest

from examples.pretrain import plot_loss


@pytest.fixture
def runs(tmp_path):
    for name, floor in (("good", 2.0), ("better", 1.5)):
        (tmp_path / name).mkdir()
        lines = [{"step": 0, "validation_loss": 6.0}]
        for step in range(1, 201):
            lines.append({"step": step, "loss": floor + 4 / step})
            lines += [{"step": step, "validation_loss": floor + 4 / step}] if step % 50 == 0 else []
        (tmp_path / name / "log.jsonl").write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 201, "lo'
        )
    return [tmp_path / "good", tmp_path / "better"]


def test_curves_hold_the_log(runs):
    curves = plot_loss.read_curves(runs[0])
    assert curves.validation_steps.tolist() == [0, 50, 100, 150, 200]
    assert curves.train_steps.tolist() == list(range(1, 201))
    smoothed = curves.smoothed()
    assert smoothed[0] == 6.0
    assert smoothed[1] == 5.0
    np.testing.assert_allclose(smoothed[99], 2 + np.mean([4 / s for s in (97, 98, 99, 100)]))


def test_one_picture_of_several_runs(runs, tmp_path, capsys):
    output = tmp_path / "losses.png"
    assert plot_loss.main([*map(str, runs)]) == 0
    assert capsys.readouterr().out == f"{output}\n"
    pixels = matplotlib.image.imread(output)
    assert pixels.shape[:2] == (960, 1500)
    for colour in plot_loss.COLOURS[:2]:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 500


def test_a_folder_without_a_log_is_one_line(tmp_path, capsys):
    assert plot_loss.main([str(tmp_path)]) == 1
    assert "no losses in" in capsys.readouterr().err
