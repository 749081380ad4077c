# SPDX-License-Identifier: Apache-2.0
"""What is measured inside a run: a tiny one, end to end.

And its numbers on what is known.
"""

import json

import numpy as np
import pytest

from examples.pretrain import data
from examples.research import inside


def test_a_tiny_run_is_measured(dataset, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "open_corpus", lambda *_: dataset)
    measured = []
    table = inside.table

    def recorded(found):
        measured.append(found)
        return table(found)

    monkeypatch.setattr(inside, "table", recorded)
    options = "--config tiny --steps 2 4 --batches 3 --batch-size 4"
    inside.main([*options.split(), "--out", str(tmp_path)])
    found = json.loads((tmp_path / "inside.json").read_text())
    assert found["steps"] == [2, 4]
    for name, values in found["cosines"].items():
        assert len(values) == 2, name
        assert 0 < max(values) <= 1, name
    assert found["orthogonality"]["4"].keys() >= {"mlp/up", "attention/key"}
    kinds = found["metric"]["4"]
    assert {"mlp/up", "mlp/down", "attention/out"} <= kinds.keys()
    for kind, sides in measured[0]["metric"]["4"].items():
        for side, sizes in sides.items():
            if not sizes:
                continue
            expected = np.percentile(sizes, range(101))
            np.testing.assert_allclose(kinds[kind][side], expected, atol=1e-3)
            assert min(sizes) >= 0
            # Two layers: the mean square of each is one.
            assert np.mean(np.square(sizes)) == pytest.approx(1, abs=1e-3)
    assert (tmp_path / "inside.png").exists()
    page = (tmp_path / "README.md").read_text()
    assert "cosine with the gradient of the large batch" in page


def test_a_fused_qkv_has_rows_of_three_kinds():
    sizes = np.arange(6.0)
    rows = dict(inside.parts_of("attention/qkv", sizes, "rows"))
    assert {kind: part.tolist() for kind, part in rows.items()} == {
        "attention/q": [0, 1],
        "attention/k": [2, 3],
        "attention/v": [4, 5],
    }
    columns = dict(inside.parts_of("attention/qkv", sizes, "columns"))
    assert list(columns) == ["attention/qkv"]


def test_orthogonality_of_known_singular_values():
    random = np.random.default_rng(0)
    q, _ = np.linalg.qr(random.standard_normal((24, 24)))
    r, _ = np.linalg.qr(random.standard_normal((24, 24)))
    values = np.geomspace(1, 1e-3, 24)
    matrices = {"blocks/0/mlp/up/kernel": q * values @ r, "blocks/0/mlp/down/kernel": q}
    decaying, orthogonal = inside.orthogonality(matrices).values()
    rows = zip(inside.FORMS, decaying, orthogonal, strict=True)
    for (steps, scale), (cosine, below), (flat, none) in rows:
        order = 4 if scale == "schatten" else 2
        s = values / np.sum(values**order) ** (1 / order)
        for _ in range(steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert cosine == pytest.approx(np.mean(s) / np.mean(s**2) ** 0.5, abs=2e-4)
        assert below == pytest.approx(np.mean(s < 0.5), abs=1e-4)
        assert (flat, none) == (pytest.approx(1, abs=1e-4), 0)
