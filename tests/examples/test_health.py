# SPDX-License-Identifier: Apache-2.0
"""Spikes are logged, divergence ends a run; model FLOPs utilization."""

import numpy as np
import pytest

from examples.pretrain import configs, models
from examples.pretrain.config import Diverged
from examples.pretrain.health import WINDOW, Watch
from examples.pretrain.throughput import flops_per_token, peak_flops


def noisy(count: int, level: float, deviation: float = 0.05) -> np.ndarray:
    return level + deviation * np.random.default_rng(0).standard_normal(count)


def see_all(losses, watch: Watch | None = None, start: int = 1) -> list[tuple[int, str]]:
    watch = watch or Watch(0.5)
    events = ((step, watch.see(step, float(loss))) for step, loss in enumerate(losses, start))
    return [(step, event) for step, event in events if event]


def test_a_spike_is_logged_once_and_by_a_resumed_run_too():
    losses = noisy(300, 3.0)
    losses[150:155] = 4.0
    ((step, event),) = whole = see_all(losses)
    assert step == 151
    assert event.startswith("loss spike: 4.000 after 3.0")
    watch = Watch(0.5)
    assert see_all(losses[:120], watch) == []
    assert see_all(losses[120:], watch, 121) == whole


def test_what_is_no_spike():
    quiet = noisy(300, 3.0, 0.001)
    quiet[150] = 3.4  # hundreds of deviations, less than half a nat
    assert see_all(quiet) == []
    assert see_all(6.0 * np.exp(-np.arange(2000) / 500) + 2 + noisy(2000, 0.0)) == []
    slow_start = np.concatenate([[5.5], noisy(200, 5.8), noisy(200, 5.0)])
    assert see_all(slow_start) == []


@pytest.mark.parametrize(
    ("losses", "reason"),
    [
        ([6.0, 5.0, float("nan")], "the loss became nan at step 3: try a --learning-rate below 0.5"),
        ([6.0, 5.0, float("-inf")], "the loss became -inf at step 3"),
        ([*noisy(1, 8.0), *noisy(200, 3.0), *noisy(200, 5.5)], r"diverged: .* after (2\.9|3\.0)"),  # above its best
        ([5.5, *noisy(2 * WINDOW, 6.3)], "diverged"),  # above its first
    ],
)
def test_divergence(losses, reason):
    with pytest.raises(Diverged, match=reason):
        see_all(losses)


def test_flops():
    kinds = ("NVIDIA H200", "NVIDIA A100-SXM4-80GB", "TPU v5p", "TPU v5 lite", "NVIDIA L40S", "cpu")
    assert [*map(peak_flops, kinds)] == [989e12, 312e12, 459e12, 197e12, 362e12, None]
    config = configs.load("gpt2_small").model
    hidden, table, norms = 12 * 12 * 768**2, 50_304 * 768, 25 * 768
    expected = 6 * (hidden + table + norms) + 12 * 12 * 1024 * 768  # six per weight, and attention
    assert flops_per_token(config, models.shapes(config, 50_304)) == expected
