# SPDX-License-Identifier: Apache-2.0
"""A law for the learning rate is found in losses that follow one."""

import json
import math

import pytest

from examples.research import rate_law
from examples.research.rate_law import Law, Point

TRUE = Law(1.2, steps=0.6, tokens=0.13, width=0.2)
SIZES = [
    (200, 1_024, 64),
    (3_000, 1_024, 64),
    (750, 16_384, 64),
    (750, 4_096, 256),
    (12_000, 65_536, 768),
]
CURVATURE = 0.02


def losses(best, rates):
    """Losses of two seeds, 0.01 apart, on a parabola."""
    found = {}
    for rate in rates:
        loss = 1.5 + CURVATURE * math.log2(rate / best) ** 2
        found[rate] = [loss - 0.005, loss + 0.005]
    return found


def point(sizes, held_out=False):
    rate = TRUE.rate(*sizes)
    tried = losses(rate, [0.4 * rate, 0.8 * rate, 1.6 * rate])
    return Point(*sizes, 3, held_out, "a report", tried)


def test_a_parabola_finds_the_best_rate_its_loss_and_what_a_factor_costs():
    found = rate_law.best(losses(0.013, [0.004, 0.008, 0.016, 0.032, 0.064]))
    assert found.rate == pytest.approx(0.013)
    assert found.loss == pytest.approx(1.5)
    assert found.above(0.026) == pytest.approx(CURVATURE)
    assert found.is_inside


def test_a_best_rate_beyond_the_sweep_is_said():
    found = rate_law.best(losses(0.1, [0.004, 0.008, 0.016]))
    assert found.rate == pytest.approx(0.1)
    assert not found.is_inside


@pytest.mark.parametrize(
    ("tried", "message"),
    [
        ({0.1: [1.0], 0.2: [0.9]}, "needs three learning rates"),
        ({0.1: [1.0], 0.2: [1.1], 0.4: [1.0]}, "have no lowest point"),
    ],
)
def test_a_sweep_without_a_best_rate_is_an_error(tried, message):
    with pytest.raises(ValueError, match=message):
        rate_law.best(tried)


def test_the_law_of_the_points_is_found_without_those_held_out():
    points = [point(sizes) for sizes in SIZES]
    wrong = point(SIZES[0], held_out=True)._replace(losses=losses(1.0, [0.5, 1.0, 2.0]))
    points.append(wrong)
    found = [rate_law.best(one.losses) for one in points]
    law = rate_law.fit(points, found)
    assert law == pytest.approx(TRUE)
    *fitted, held_out = rate_law.compare(points, found, law)
    assert [row.above for row in fitted] == pytest.approx([0.0] * 5)
    ratio = math.log2(TRUE.rate(*SIZES[0]))
    assert held_out.above == pytest.approx(CURVATURE * ratio**2)


def test_points_that_vary_one_size_only_give_no_law():
    points = [point((steps, 1_024, 64)) for steps in (200, 400, 800, 1_600)]
    found = [rate_law.best(one.losses) for one in points]
    with pytest.raises(ValueError, match="do not vary steps, tokens and width"):
        rate_law.fit(points, found)


def test_the_law_of_marin_is_the_published_one():
    steps, tokens, width = 10_000, 524_288, 768
    published = 0.286 * (steps * tokens) ** -0.395 * width**-0.15 * tokens**0.5
    assert rate_law.MARIN.rate(steps, tokens, width) == pytest.approx(published)


def test_the_law_through_a_measured_point_has_its_rate_there():
    other = rate_law.hyperp(TRUE)
    here = rate_law.KNOWN_POINT
    assert other.rate(*here) == pytest.approx(TRUE.rate(*here))
    assert other.steps == rate_law.HYPERP_STEPS


def test_the_report_has_every_point(tmp_path):
    entries = []
    for sizes in SIZES:
        one = point(sizes, held_out=sizes == SIZES[3])
        entry = one._asdict() | {"optimizer": "normpre_h"}
        entries.append(entry)
    # Those of other optimizers are not read.
    entries.append(entries[0] | {"optimizer": "muon", "steps": 7})
    # Four points are enough, without the one held out.
    file = tmp_path / "points.json"
    file.write_text(json.dumps(entries))
    rate_law.main(["--points", str(file), "--out", str(tmp_path)])
    text = (tmp_path / "normpre_h.md").read_text()
    assert "Fitted to 4 settings: `1.2 S^-0.600 B^0.130 d^-0.200`" in text
    assert "At 1 held-out settings, the law's rate costs at most 0.0000 nats" in text
    assert "| 750, held out | 4,096 | 256 | 3 | 2 |" in text
    assert "| 7 |" not in text
    result = json.loads((tmp_path / "normpre_h.json").read_text())
    assert len(result["settings"]) == 5
    assert (tmp_path / "normpre_h.png").stat().st_size > 10_000
