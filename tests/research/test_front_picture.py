# SPDX-License-Identifier: Apache-2.0
"""The picture of README is drawn from its report."""

import json

import numpy as np
import pytest

from examples.research import front_picture


def test_curves_are_means_of_the_reports_seeds():
    arms = json.loads(front_picture.DATA.read_text())["arms"]
    ends = []
    for line in front_picture.LINES:
        ends.append(front_picture.curve(arms, line)[-1].tolist())
    # As in the table of the report.
    expected = [3.5091, 2.6628, 2.6186]
    np.testing.assert_allclose([loss for _, loss in ends], expected, atol=1e-4)
    assert {step for step, _ in ends} == {1000}


def test_the_steps_saved_are_those_of_the_report():
    """The other's final loss is reached at step 915."""
    arms = json.loads(front_picture.DATA.read_text())["arms"]
    _, of_muon, ours = (front_picture.curve(arms, x) for x in front_picture.LINES)
    assert round(front_picture.step_of(ours, of_muon[-1][1])) == 915


def test_an_arm_that_is_missing_is_named():
    line = front_picture.LINES[0]._replace(learning_rate=1.0)
    with pytest.raises(ValueError, match=r"no adamw at 1\.0"):
        front_picture.curve([], line)


def test_the_picture_is_drawn():
    arms = json.loads(front_picture.DATA.read_text())["arms"]
    figure = front_picture.draw(arms)
    texts = [text.get_text() for text in figure.axes[0].texts]
    assert "the same loss\n85 steps earlier" in texts
    assert {line.text for line in front_picture.LINES} <= {*texts}
