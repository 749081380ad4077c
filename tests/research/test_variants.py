# SPDX-License-Identifier: Apache-2.0
"""Variants of normpre_h differ from it only in what their options say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from examples.research.variants import (
    NORMS,
    falling,
    following,
    muon_falling_hyperball,
    normpre_h_variant,
    scale_by_soap,
    soap_hyperball,
)
from tests import cases

SHAPES = {"layers": [{"up": (6, 12), "down": (12, 6)}], "bias": (3,)}


@functools.cache
def path(make, **options):
    """Parameters after five steps."""
    options.setdefault("adam_learning_rate", 0.01)
    tx = make(0.02, **options)
    params = cases.numbers(SHAPES)
    state = tx.init(params)
    update = cases.updater(tx)
    for seed in range(5):
        updates, state = update(cases.numbers(SHAPES, seed + 1), state, params)
        params = optax.apply_updates(params, updates)
    return params


def distance(**options):
    """From normpre_h, relative to the length of the path."""
    return apart(path(npo.normpre_h), path(normpre_h_variant, **options))


def apart(own, other):
    """How far two paths end apart, relative to the length of the first."""
    difference = optax.tree.norm(optax.tree.sub(own, other))
    walked = optax.tree.norm(optax.tree.sub(own, cases.numbers(SHAPES)))
    return difference / walked


@pytest.mark.parametrize(
    "options",
    [{}, {"frozen_after": 9}, {"onset": 0, "ramp": 4.0}, {"statistic": "gradient"}],
)
def test_defaults_are_normpre_h(options):
    assert distance(**options) < 1e-5


OTHERS = [
    {"sides": "before"},
    {"sides": "after"},
    {"statistic": "momentum"},
    {"statistic": "residual"},
    {"frozen_after": 2},
    {"radial": False},
    {"ramp": 0.0},
    {"clip": 1.2},
    {"decay": 0.5},
    {"gradient_share": 0.3},
    {"norms": "ones"},
    {"norms": "keep"},
]


@pytest.mark.parametrize("options", OTHERS)
def test_every_option_has_an_effect(options):
    assert distance(**options) > 1e-3


def test_norms_by_shape_are_those_by_role_where_writers_are_not_square():
    assert distance(norms="unequal") < 1e-5


def test_norms_by_shape_of_a_block():
    square = ("query", "out")
    params = {name: jnp.ones((4, 4)) for name in square}
    params |= {"up": jnp.ones((4, 16)), "down": jnp.ones((16, 4))}
    tree = {"layers": [params, params], "wte": jnp.ones((9, 4))}
    unequal = NORMS["unequal"](tree)["layers"][1]
    assert unequal == {"query": 1.0, "out": 1.0, "up": 1.0, "down": 2**0.5}
    width = NORMS["width"](tree)["layers"][1]
    assert width["up"] == 1.0
    assert width["query"] == width["out"] == pytest.approx(6**-0.5)
    assert width["down"] == pytest.approx((4 / 6) ** 0.5)


def test_norms_with_a_wrong_number_of_writers():
    layers = [{"up": jnp.ones((4, 16)), "down": jnp.ones((16, 4))}] * 2
    tree = {"layers": layers, "wte": jnp.ones((9, 4))}
    factors = {"half_k": 0.5, "twice_k": 2, "k_times_32": 32}
    for name, factor in factors.items():
        first = NORMS[name](tree)["layers"][0]
        assert first == {"up": 1.0, "down": pytest.approx((2 / factor) ** 0.5)}


def test_a_weight_that_ends_where_it_starts_is_constant():
    assert distance(last_slow_weight=0.56, steps=5) < 1e-5


def test_a_weight_that_falls_has_an_effect():
    """Without the ramp, after which the slow average has no share in five steps."""
    constant = path(normpre_h_variant, ramp=0.0)
    falls = path(normpre_h_variant, ramp=0.0, last_slow_weight=0.1, steps=5)
    assert apart(constant, falls) > 1e-3


def test_a_weight_falls_linearly_after_a_share_of_the_run():
    weight = falling(0.9, 0.3, 0.25, 100)
    found = [float(weight(t)) for t in (0, 25, 50, 100, 200)]
    np.testing.assert_allclose(found, [0.9, 0.9, 0.7, 0.3, 0.3], rtol=1e-6)


def test_a_weight_follows_the_learning_rate():
    def rate(t):
        return 0.02 * (1 - t / 100)

    weight = following(rate, 0.9, 0.3, 100)
    found = [float(weight(t)) for t in (0, 50, 100)]
    np.testing.assert_allclose(found, [0.9, 0.6, 0.3], rtol=1e-6)


def test_muon_with_a_momentum_that_does_not_fall_is_muon():
    """Newton-Schulz divides by the norm, so that a momentum times 1 - b is the same."""
    own = path(npo.muon, norm_control="hyperball", adam_learning_rate=0.01)
    options = {"momentum": 0.95, "last_momentum": 0.95, "steps": 5}
    other = path(muon_falling_hyperball, adam_learning_rate=0.01, **options)
    assert apart(own, other) < 1e-5


def test_muon_with_a_falling_momentum_needs_the_steps_of_the_run():
    with pytest.raises(ValueError, match="needs steps="):
        muon_falling_hyperball(0.02, 0.01)


@pytest.mark.parametrize("shape", [(4, 6), (6, 4)])
def test_soap_is_adam_in_the_eigenbases_of_one_gradient(shape):
    """In the first step, the gradient's own bases diagonalize it.

    Off the diagonal, rounding is divided by rounding. In float32 that is up to 1e4,
    which turned bases of 1e-6 carry to the diagonal, differently on every processor. In
    float64, epsilon (1e-12) hides it. Singular values 4 to 1 keep the bases exact.
    """
    left, _, right = np.linalg.svd(cases.gaussian(shape), full_matrices=False)
    with jax.enable_x64(True):
        g = jnp.asarray(left * np.array([4.0, 3.0, 2.0, 1.0]) @ right)
        tx = scale_by_soap()
        u, _ = jax.jit(tx.update)({"kernel": g}, tx.init({"kernel": g}))
    signs = left.T @ np.asarray(u["kernel"]) @ right.T  # of the singular values
    np.testing.assert_allclose(np.diag(signs), 1, atol=1e-9)


def test_soap_runs_under_hyperball():
    new = path(soap_hyperball)["layers"][0]
    np.testing.assert_allclose(jnp.linalg.norm(new["up"]), 12**0.5, rtol=1e-5)
