# SPDX-License-Identifier: Apache-2.0
"""Loss curves from logs."""

import json

import matplotlib.image
import numpy as np

from examples.pretrain import plot_loss


def test_one_picture_of_several_runs(tmp_path, capsys):
    for name, floor in (("good", 2.0), ("better", 1.5)):
        (tmp_path / name).mkdir()
        lines = [{"step": 0, "validation_loss": 6.0}]
        lines += [{"step": step, "loss": floor + 4 / step} for step in range(1, 201)]
        lines += [{"step": step, "validation_loss": floor + 4 / step} for step in (50, 100, 150, 200)]
        text = "".join(json.dumps(line) + "\n" for line in lines) + '{"step": 201, "lo'  # a killed run's log
        (tmp_path / name / "log.jsonl").write_text(text)
    curves = plot_loss.read_curves(tmp_path / "good")
    assert curves.validation_steps.tolist() == [0, 50, 100, 150, 200]
    assert curves.train_steps.tolist() == list(range(1, 201))
    smoothed = plot_loss.moving_average(curves.train_losses, 4)
    np.testing.assert_allclose(smoothed[[0, 1, 99]], [6, 5, 2 + np.mean([4 / s for s in (97, 98, 99, 100)])])

    assert plot_loss.main([str(tmp_path / "good"), str(tmp_path / "better")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'losses.png'}\n"
    pixels = matplotlib.image.imread(tmp_path / "losses.png")
    for colour in plot_loss.COLOURS[:2]:
        wanted = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        assert (np.abs(pixels[..., :3] - wanted).max(-1) < 0.02).sum() > 500

    assert plot_loss.main([str(tmp_path)]) == 1
    assert "no losses in" in capsys.readouterr().err
