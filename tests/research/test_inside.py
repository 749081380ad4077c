# SPDX-License-Identifier: Apache-2.0
"""What is measured inside a run: a tiny one, end to end, and its numbers on what is
known.
"""

import json

import numpy as np
import pytest

from examples.pretrain import data
from examples.research import inside


def test_a_tiny_run_is_measured(dataset, monkeypatch, tmp_path):
    monkeypatch.setattr(data, "open_corpus", lambda *_: dataset)
    options = [
        "--config",
        "tiny",
        "--steps",
        "2",
        "4",
        "--batches",
        "3",
        "--batch-size",
        "4",
        "--out",
        str(tmp_path),
    ]
    measured, table = [], inside.table
    monkeypatch.setattr(
        inside, "table", lambda found: measured.append(found) or table(found)
    )
    inside.main(options)
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
            np.testing.assert_allclose(
                kinds[kind][side], np.percentile(sizes, range(101)), atol=1e-3
            )
            assert min(sizes) >= 0
            # Two layers: the mean square of each is one.
            assert np.mean(np.square(sizes)) == pytest.approx(1, abs=1e-3)
    assert (tmp_path / "inside.png").exists()
    assert (
        "cosine with the gradient of the large batch"
        in (tmp_path / "README.md").read_text()
    )


def test_a_fused_qkv_has_rows_of_three_kinds():
    sizes = np.arange(6.0)
    rows = dict(inside.parts_of("attention/qkv", sizes, "rows"))
    assert {kind: part.tolist() for kind, part in rows.items()} == {
        "attention/q": [0, 1],
        "attention/k": [2, 3],
        "attention/v": [4, 5],
    }
    assert [kind for kind, _ in inside.parts_of("attention/qkv", sizes, "columns")] == [
        "attention/qkv"
    ]


def test_orthogonality_of_known_singular_values():
    random = np.random.default_rng(0)
    q, r = (np.linalg.qr(random.standard_normal((24, 24)))[0] for _ in range(2))
    values = np.geomspace(1, 1e-3, 24)
    found = inside.orthogonality(
        {"blocks/0/mlp/up/kernel": q * values @ r, "blocks/0/mlp/down/kernel": q}
    )
    for (steps, scale), (cosine, below), (flat, none) in zip(
        inside.FORMS, *found.values(), strict=True
    ):
        s = values / np.sum(values ** (4 if scale == "schatten" else 2)) ** (
            1 / (4 if scale == "schatten" else 2)
        )
        for _ in range(steps):
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        assert cosine == pytest.approx(np.mean(s) / np.mean(s**2) ** 0.5, abs=2e-4)
        assert below == pytest.approx(np.mean(s < 0.5), abs=1e-4)
        assert (flat, none) == (pytest.approx(1, abs=1e-4), 0)
