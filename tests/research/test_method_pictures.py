# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/method.md are drawn, small, and show what the page says."""

import doctest

import numpy as np
import pytest

from examples.research import method_pictures

pytestmark = pytest.mark.slow


def test_the_examples_of_the_module_hold():
    assert doctest.testmod(method_pictures).failed == 0


def test_all_pictures_are_drawn_and_small(tmp_path):
    files = method_pictures.draw(tmp_path / "pictures")
    assert [file.stem for file in files] == list(method_pictures.PICTURES)
    for file in files:
        assert file.read_text().startswith("<?xml")
        assert file.stat().st_size < 150_000


def test_the_plane_shows_every_stage():
    found = method_pictures.stages(*method_pictures.planar(), rank=1)
    values = {name: np.linalg.svd(x, compute_uv=False) for name, x in found.items()}
    lengths = {name: np.linalg.norm(x, axis=1) for name, x in found.items()}
    assert lengths["M"].max() / lengths["M"].min() > 30
    np.testing.assert_allclose(lengths["Psi"], 1, rtol=1e-6)
    assert values["Psi"][0] > 2 > 1 > values["Psi"][1]
    np.testing.assert_allclose(values["G"], 1, rtol=1e-5)
    np.testing.assert_allclose(values["L"], [1, values["Psi"][1]], rtol=1e-5)
    # Muon alone leaves the shortest row an order of magnitude behind; NormPre-G does not.
    assert lengths["Muon"].min() < 0.1 * lengths["Muon"].max()
    assert lengths["G"].min() > 0.5 * lengths["G"].max()
    # Row 5 of W is longer than one: its part of the momentum along W is turned round.
    momentum, weight = method_pictures.planar()
    assert np.linalg.norm(weight[4]) > 1
    assert momentum[4] @ weight[4] > 0 > found["X"][4] @ weight[4]


def test_newton_schulz_and_clipping_do_what_the_bars_show():
    found = method_pictures.spectra()
    assert np.all((found["G"] > 0.6) & (found["G"] < 1.25))
    assert found["Psi"][2] > 1, "a mode above one that the budget leaves alone"
    assert np.linalg.norm(found["M"]) == pytest.approx(np.linalg.norm(found["Psi"]), rel=1e-5)
