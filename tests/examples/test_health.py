# SPDX-License-Identifier: Apache-2.0
"""Spikes are named, divergence ends a run."""

import numpy as np
import pytest

from examples.pretrain.config import Diverged
from examples.pretrain.health import WINDOW, Watch


def noisy(count: int, level: float, deviation: float = 0.05) -> np.ndarray:
    return level + deviation * np.random.default_rng(0).standard_normal(count)


def see_all(watch: Watch, losses, start: int = 1) -> list[tuple[int, str]]:
    events = ((step, watch.see(step, float(loss))) for step, loss in enumerate(losses, start))
    return [(step, event) for step, event in events if event]


def test_a_healthy_run_has_no_events():
    falling = 6.0 * np.exp(-np.arange(2000) / 500) + 2 + noisy(2000, 0.0)
    assert see_all(Watch(1e-3), falling) == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_no_number(value):
    with pytest.raises(Diverged, match=r"the loss became -?(nan|inf) at step 3: try a --learning-rate below 0.5"):
        see_all(Watch(0.5), [6.0, 5.0, value])


def test_a_spike_is_named_once():
    losses = noisy(300, 3.0)
    losses[150:155] = 4.0
    ((step, event),) = see_all(Watch(1e-3), losses)
    assert step == 151
    assert event.startswith("loss spike: 4.000 after 3.0")


def test_a_small_bump_of_a_quiet_loss_is_no_spike():
    losses = noisy(300, 3.0, 0.001)
    losses[150] = 3.4  # hundreds of deviations, less than half a nat
    assert see_all(Watch(1e-3), losses) == []


def test_far_above_its_best():
    losses = np.concatenate([noisy(1, 8.0), noisy(200, 3.0), noisy(200, 5.5)])
    with pytest.raises(Diverged, match=r"diverged: .* after (2\.9|3\.0)"):
        see_all(Watch(1e-3), losses)


def test_above_its_beginning():
    with pytest.raises(Diverged, match="diverged"):
        see_all(Watch(1e-3), np.concatenate([[5.5], noisy(2 * WINDOW, 6.3)]))


def test_a_slow_start_is_no_divergence():
    assert see_all(Watch(1e-3), np.concatenate([[5.5], noisy(200, 5.8), noisy(200, 5.0)])) == []


def test_a_continued_watch_sees_what_the_whole_one_sees():
    losses = noisy(300, 3.0)
    losses[150] = 5.0
    first, second = Watch(1e-3), Watch(1e-3)
    whole = see_all(first, losses)
    assert see_all(second, losses[:120]) == []
    assert see_all(second, losses[120:], 121) == whole
