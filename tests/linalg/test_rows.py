# SPDX-License-Identifier: Apache-2.0
"""Row norms, unit rows and the tangent stage against the reference, and at the edges of the number range."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.rows import (
    TANGENT_MODES,
    row_norms,
    scaled_rows,
    tangent_factors,
    tangent_rows,
    unit_rows,
)
from normpre_optax.platforms import on
from tests import reference
from tests.cases import EPS32, EPS64, gaussian


def unit_tangent_rows(m, w, mode="relaxed", radius=1.0, axis=-1):
    """``unit_rows(tangent_rows(m, w, ...))`` as the optimizers make it: two numbers a row, then what they make."""
    w = None if mode == "none" else w
    return scaled_rows(m, w, tangent_factors(m, w, mode, radius, axis))


SHAPES = [(3, 8), (8, 3), (5, 5), (1, 6), (6, 1), (1, 1)]
MODES = ["relaxed", "bounded", "strict", "none"]


@pytest.mark.parametrize("shape", SHAPES)
def test_row_norms_and_unit_rows_agree_with_the_reference(x64, shape):
    x = gaussian(shape)
    # A sum of n squares, a root and a division: n + 3 roundings at the very most.
    np.testing.assert_allclose(row_norms(jnp.asarray(x)), reference.row_norms(x), rtol=16 * EPS64)
    np.testing.assert_allclose(unit_rows(jnp.asarray(x)), reference.unit_rows(x), rtol=16 * EPS64)


@pytest.mark.parametrize("scale", [1e-35, 1e-30, 1e-20, 1.0, 1e20, 1e30, 1e37])
def test_rows_are_measured_where_their_squares_leave_float32(scale):
    # Entries of 0.1 to 1 times the scale: all normal numbers (above 1.2e-38), which XLA's CPU code never flushes.
    x = np.random.default_rng(0).uniform(0.1, 1, (4, 7)).astype(np.float32)
    rows = jnp.asarray(x * np.float32(scale))
    exact = np.asarray(rows, np.float64)
    np.testing.assert_allclose(row_norms(rows), reference.row_norms(exact), rtol=8 * EPS32)
    np.testing.assert_allclose(unit_rows(rows), reference.unit_rows(exact), rtol=8 * EPS32)


def test_rows_of_very_different_length_do_not_see_each_other():
    x = gaussian((3, 5))
    scaled = x * np.array([[1e-30], [1.0], [1e30]])
    np.testing.assert_allclose(unit_rows(jnp.asarray(scaled, jnp.float32)), reference.unit_rows(x), rtol=8 * EPS32)


def test_zero_rows_stay_zero_and_bad_rows_stay_visible():
    x = jnp.array([[0.0, 0.0], [jnp.nan, 1.0], [jnp.inf, 1.0], [3.0, 4.0]])
    out = np.asarray(unit_rows(x))
    assert (out[0] == 0).all()
    assert np.isnan(out[1]).all()
    assert not np.isfinite(out[2]).all()
    np.testing.assert_allclose(out[3], [0.6, 0.8], rtol=4 * EPS32)
    assert np.asarray(row_norms(x))[0, 0] == 0
    assert np.isnan(np.asarray(row_norms(x))[1, 0])


@pytest.mark.parametrize("radius", [1.0, 0.5, 3.0])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tangent_agrees_with_the_reference(x64, shape, mode, radius):
    # Rows of w on both sides of every radius above, so that `bounded` takes both of its branches.
    m, w = gaussian(shape), np.linspace(0.2, 2.0, shape[0])[:, None] * reference.unit_rows(gaussian(shape, 1))
    expected = reference.tangent_rows(m, w, mode, radius, EPS64)
    got = tangent_rows(jnp.asarray(m), jnp.asarray(w), mode, radius)
    # |x - exact| <= a few eps (|m| + |<m, w> w| / c^2), and the second is at most 16 |m| here (|w| <= 2, c = 1/2).
    np.testing.assert_allclose(got, expected, rtol=0, atol=64 * 17 * EPS64 * np.abs(m).max())


def test_the_bounded_mode_takes_both_branches():
    m = np.ones((2, 2))
    w = np.array([[0.5, 0.0], [2.0, 0.0]])
    # Row 0 keeps 1 - 0.25 of its radial part (1, 0); row 1 keeps none, where `relaxed` would turn it round to -3.
    np.testing.assert_allclose(tangent_rows(jnp.asarray(m), jnp.asarray(w), "bounded"), [[0.75, 1.0], [0.0, 1.0]])
    np.testing.assert_allclose(tangent_rows(jnp.asarray(m), jnp.asarray(w), "relaxed"), [[0.75, 1.0], [-3.0, 1.0]])


@pytest.mark.parametrize("mode", MODES)
def test_zero_weights_leave_the_momentum_alone(mode):
    m = jnp.asarray(gaussian((4, 6)), jnp.float32)
    # Dividing by the largest entry and multiplying by it again may cost two roundings.
    np.testing.assert_allclose(tangent_rows(m, jnp.zeros_like(m), mode), m, rtol=2 * EPS32)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_tangent_commutes_with_the_scale_of_the_momentum(mode, scale):
    m, w = (jnp.asarray(gaussian((4, 6), seed), jnp.float32) for seed in (0, 1))
    scaled = tangent_rows(m * jnp.float32(scale), w, mode) / jnp.float32(scale)
    # |w|^2 is up to about 10 here: 1 + |w|^2 times a few roundings of |m|.
    np.testing.assert_allclose(scaled, tangent_rows(m, w, mode), rtol=0, atol=50 * EPS32 * float(jnp.abs(m).max()))


def test_rounding_noise_of_a_radial_row_counts_as_zero():
    w = reference.unit_rows(gaussian((64, 16)))
    m = gaussian((64, 1), 1) * w  # parallel to w: nothing but rounding is left
    for mode in ("strict", "relaxed", "bounded"):
        assert not np.any(tangent_rows(jnp.asarray(m, jnp.float32), jnp.asarray(w, jnp.float32), mode))


@pytest.mark.parametrize(("size", "zero"), [(2.0, True), (64.0, False)])
def test_the_line_between_noise_and_signal_is_at_eight_epsilon(size, zero):
    # m is w plus an orthogonal part of `size` epsilons, all exactly representable.
    w, m = jnp.array([[1.0, 0.0]]), jnp.array([[1.0, size * EPS32]])
    assert bool(jnp.all(tangent_rows(m, w, "strict") == 0)) == zero


def test_one_bad_row_spoils_no_other():
    m = gaussian((3, 5)).astype(np.float32)
    w = gaussian((3, 5), 1).astype(np.float32)
    bad = m.copy()
    bad[1, 2] = np.nan
    for mode in MODES:
        good, hurt = (np.asarray(tangent_rows(jnp.asarray(x), jnp.asarray(w), mode)) for x in (m, bad))
        np.testing.assert_array_equal(hurt[[0, 2]], good[[0, 2]])
        assert np.isnan(hurt[1]).any()


def test_stacks_are_loops():
    m, w = (jnp.asarray(gaussian((2, 3, 4, 5), seed), jnp.float32) for seed in (0, 1))
    for mode in MODES:
        out = tangent_rows(m, w, mode)
        for i in np.ndindex(2, 3):
            np.testing.assert_allclose(out[i], tangent_rows(m[i], w[i], mode), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(unit_rows(m)[1, 2], unit_rows(m[1, 2]), rtol=4 * EPS32)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("length", [1e-20, 1.0, 1e15, 1e30])
def test_projected_and_normalised_at_once(mode, axis, scale, length):
    """The same as one after the other, for momentum and weights of any size."""
    m, w = (gaussian((6, 8), seed) for seed in (0, 1))
    m[2], w[3] = 0, 0
    m32, w32 = jnp.asarray(scale * m, jnp.float32), jnp.asarray(length * w, jnp.float32)
    # Compiled: XLA writes divisions as it likes.
    got = np.asarray(jax.jit(unit_tangent_rows, static_argnums=(2, 4))(m32, w32, mode, 1.0, axis), np.float64)
    turn = (lambda x: x.T) if axis == -2 else (lambda x: x)
    exact = turn(reference.unit_rows(reference.tangent_rows(*(turn(np.float64(x)) for x in (m32, w32)), mode)))
    # Ten roundings, and what is lost where x is short beside m and its radial part: by less than a factor of ten here.
    np.testing.assert_allclose(got, exact, rtol=0, atol=100 * EPS32)


@pytest.mark.parametrize("mode", ["strict", "relaxed", "bounded"])
def test_normalised_rounding_noise_counts_as_zero(mode):
    w = reference.unit_rows(gaussian((64, 16)))
    m = gaussian((64, 1), 1) * w
    assert not np.any(unit_tangent_rows(jnp.asarray(m, jnp.float32), jnp.asarray(w, jnp.float32), mode))


# A row's factor is one over its length, 5.2e38 for three entries of 3e38: that is below the smallest normal number,
# 1.2e-38, and a CPU flushes it to zero. Up to lengths of 8e37 it is a normal number.
@pytest.mark.parametrize(
    ("f", "size"),
    [
        (unit_rows, 2e-38),
        (unit_rows, 3e38),
        (lambda x: unit_tangent_rows(x, jnp.zeros_like(x)), 2e-38),
        (lambda x: unit_tangent_rows(x, jnp.zeros_like(x)), 8e37 / 3**0.5),
    ],
)
def test_the_largest_and_smallest_normal_numbers_are_measured_too(f, size):
    x = jnp.full((2, 3), size, jnp.float32)
    np.testing.assert_allclose(jax.jit(f)(x), 3**-0.5, rtol=8 * EPS32)


def test_normalised_zero_and_bad_rows():
    w = jnp.ones((3, 2))
    out = np.asarray(unit_tangent_rows(jnp.array([[0.0, 0.0], [jnp.nan, 1.0], [3.0, 1.0]]), w, "strict"))
    assert (out[0] == 0).all()
    assert np.isnan(out[1]).all()
    np.testing.assert_allclose(out[2], [0.5**0.5, -(0.5**0.5)], rtol=8 * EPS32)


ACCELERATORS = ["tpu", "gpu"]


@functools.cache
def program(platform, mode, axis):
    return on(platform, jax.jit(functools.partial(unit_tangent_rows, mode=mode, axis=axis)))


def straight(platform, m, w, mode, axis=-1):
    """``unit_tangent_rows`` in float32 as a device takes it, in float64 to compare."""
    return np.asarray(program(platform, mode, axis)(np.float32(m), np.float32(w)), np.float64)


@pytest.mark.parametrize("platform", ACCELERATORS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("axis", [-1, -2])
def test_accelerators_measure_rows_of_any_scale_in_one_pass(platform, mode, axis):
    """Rows of one matrix from 1e-30 to 1e26, on both sides of where the scale changes; one is zero, one is NaN."""
    scales = np.array([1e-30, 1e-20, 1e-12, 1e-4, 1e-3, 1.0, 1e6, 1e12, 1e20, 1e26, 0.0, np.nan])[:, None]
    m, w = scales * gaussian((12, 8)), gaussian((12, 8), 1)
    w[5] = 0  # and weights that are zero
    turn = (lambda x: x.T) if axis == -2 else (lambda x: x)
    m32, w32 = (np.float32(turn(x)) for x in (m, w))
    got = turn(straight(platform, m32, w32, mode, axis))
    exact = reference.unit_rows(reference.tangent_rows(*(turn(np.float64(x)) for x in (m32, w32)), mode))
    assert (got[10] == 0).all()
    assert np.isnan(got[11]).all()
    # Ten roundings, over the square of the share that is left: 0.4 and more of these rows lies across w.
    np.testing.assert_allclose(got[:11], exact[:11], rtol=0, atol=10 / 0.4**2 * EPS32)


@pytest.mark.parametrize("platform", ACCELERATORS)
@pytest.mark.parametrize("share", [1.0, 0.3, 0.1, 0.03, 0.01, 0.003])
def test_the_length_of_what_accelerators_leave_is_off_by_eps_over_the_share_squared(platform, share):
    """Momentum of length one that lies along w but for ``share``: the difference of sums cancels, and no more."""
    w = reference.unit_rows(gaussian((64, 16)))
    across = reference.unit_rows(reference.tangent_rows(gaussian((64, 16), 1), w, "strict"))
    m32, w32 = np.float32((1 - share**2) ** 0.5 * w + share * across), np.float32(w)
    got = straight(platform, m32, w32, "strict")
    exact = reference.unit_rows(reference.tangent_rows(np.float64(m32), np.float64(w32), "strict"))
    length = np.linalg.norm(got, axis=-1)
    # <m, m> and <m, w>^2 / <w, w> are sums of sixteen products: a few eps, of which x has a share q^2; half in a root.
    assert np.abs(length - 1).max() <= 4 * EPS32 / share**2
    # The direction has lost no more than m did when it was rounded: a few eps over q.
    np.testing.assert_allclose(got / length[:, None], exact, rtol=0, atol=8 * EPS32 / share)


@pytest.mark.parametrize("platform", ACCELERATORS)
def test_what_accelerators_cannot_tell_from_noise_counts_as_zero(platform):
    """Below ``4 sqrt(eps) = 1.4e-3``: half of that is gone, twice of it is there."""
    w = reference.unit_rows(gaussian((64, 16)))
    across = reference.unit_rows(reference.tangent_rows(gaussian((64, 16), 1), w, "strict"))
    for factor, gone in ((0.5, True), (2.0, False)):
        got = straight(platform, w + factor * 4 * EPS32**0.5 * across, w, "strict")
        assert (np.abs(got).max(axis=-1) == 0).all() == gone
        assert (np.abs(got).max(axis=-1) == 0).any() == gone


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
def test_of_momentum_along_weights_of_length_one_only_noise_is_left_and_counts_as_zero(platform):
    """A relaxed tangent keeps ``1 - ||w||^2`` of it, which is rounding."""
    random = np.random.default_rng(0)
    w = np.float32(reference.unit_rows(random.standard_normal((200, 37))))
    m = w * np.float32(random.uniform(0.1, 9, (200, 1)))
    assert not straight(platform, m, w, "relaxed").any()


@pytest.mark.parametrize("platform", ["cpu", "tpu", "gpu"])
@pytest.mark.parametrize("mode", TANGENT_MODES)
def test_rows_of_tiny_momentum_along_the_weights_are_no_longer_than_one(platform, mode):
    """A gradient once along the weights and then none: its momentum decays, and what is left of it is not blown up."""
    random = np.random.default_rng(0)
    w = random.standard_normal((48, 32))
    for size, noise in itertools.product((1e-30, 1e-33, 1e-35, 1e-37), (0, 1e-6, 1e-3)):
        psi = straight(platform, (w + noise * random.standard_normal(w.shape)) * size, w, mode)
        # Beyond rounding, what a difference of numbers 1e6 times as large has lost: some per cent.
        assert np.linalg.norm(psi, axis=-1).max() < 1.1, (size, noise)
