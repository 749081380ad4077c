# SPDX-License-Identifier: Apache-2.0
"""The pictures of docs/method.md are drawn, small, and show what the page says.

The examples of docstrings hold.
"""

import doctest

import numpy as np
import pytest

from examples.research import diagnostics, method_pictures, monitor

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("module", [diagnostics, method_pictures, monitor])
def test_the_examples_of_docstrings_hold(module):
    found = doctest.testmod(module)
    assert (found.failed, found.attempted > 0) == (0, True)


def test_all_pictures_are_drawn_and_small(tmp_path):
    files = method_pictures.draw(tmp_path / "pictures")
    assert [file.stem for file in files] == list(method_pictures.PICTURES)
    for file in files:
        assert file.read_text().startswith("<?xml")
        assert file.stat().st_size < 150_000


def test_the_pictures_show_what_the_page_says():
    found = method_pictures.stages(*method_pictures.planar(), rank=1)
    values = {name: np.linalg.svd(x, compute_uv=False) for name, x in found.items()}
    lengths = {name: np.linalg.norm(x, axis=1) for name, x in found.items()}
    assert lengths["M"].max() / lengths["M"].min() > 30
    np.testing.assert_allclose(lengths["Psi"], 1, rtol=1e-6)
    assert values["Psi"][0] > 2 > 1 > values["Psi"][1]
    np.testing.assert_allclose(values["G"], 1, rtol=1e-5)
    np.testing.assert_allclose(values["L"], [1, values["Psi"][1]], rtol=1e-5)
    # Muon alone leaves the shortest row an order of magnitude behind; NormPre-G does
    # not.
    assert lengths["Muon"].min() < 0.1 * lengths["Muon"].max()
    assert lengths["G"].min() > 0.5 * lengths["G"].max()
    # Row 5 of W has a norm above one: its part of the momentum along W is reversed.
    momentum, weight = method_pictures.planar()
    assert momentum[4] @ weight[4] > 0 > found["X"][4] @ weight[4]

    bars = method_pictures.spectra()
    assert np.all((bars["G"] > 0.6) & (bars["G"] < 1.25))
    assert bars["Psi"][2] > 1, "a mode above one that the budget leaves alone"
    norm_of_psi = np.linalg.norm(bars["Psi"])
    assert np.linalg.norm(bars["M"]) == pytest.approx(norm_of_psi, rel=1e-5)

    found = method_pictures.metric()
    sizes = {name: np.linalg.norm(x, axis=1) for name, x in found.items()}
    np.testing.assert_allclose(sizes["Muon"], 1, rtol=1e-5)
    large = sizes["gradient"] > np.sqrt(np.mean(sizes["gradient"] ** 2))
    assert sizes["normpre_h"][large].max() < sizes["normpre_h"][~large].min()
