# SPDX-License-Identifier: Apache-2.0
"""Unit rows and the tangent against the reference.

For rows along any axes, and at the limits of what is promised.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg import rows
from tests import reference
from tests.cases import EPS32, EPS64, equations, gaussian, quick_jit

every_tangent = pytest.mark.parametrize("tangent", rows.TANGENTS)


def unit_tangent(m, w, along=(1,), tangent="relaxed"):
    """``unit_rows(tangent_rows(m, w))`` as the stage does it: two numbers per row."""
    a, b = rows.unit_tangent_factors(m, w, along, tangent)
    return a * m - b * w


compiled = quick_jit(unit_tangent, static_argnums=(2, 3))


def by_reference(m, w, tangent):
    x = reference.tangent_rows(np.float64(m), np.float64(w), tangent)
    return reference.unit_rows(x)


@every_tangent
def test_rows_along_any_axes_agree_with_the_reference(x64, tangent):
    # Row norms of w on both sides of one, where the relaxed factor changes its sign.
    for shape in ((3, 8), (6, 1)):
        m = gaussian(shape)
        norms = np.linspace(0.2, 2.0, shape[0])[:, None]
        w = norms * reference.unit_rows(gaussian(shape, 1))
        got = rows.tangent_rows(jnp.asarray(m), jnp.asarray(w), (1,), tangent)
        # |x - exact| <= a few eps (|m| + |<m, w> w|), and the second is at most 4 |m|
        # (|w| <= 2). A row of one element has nothing across w: its strict tangent is
        # rounding and counts as zero.
        expected = reference.tangent_rows(m, w, tangent)
        atol = 64 * 5 * EPS64 * np.abs(m).max()
        np.testing.assert_allclose(got, expected, rtol=0, atol=atol)

    # (heads, size, out): rows run along the first two axes.
    m = gaussian((2, 3, 4))
    w = gaussian((2, 3, 4), 1)
    got = unit_tangent(jnp.asarray(m), jnp.asarray(w), (0, 1), tangent)
    flat = by_reference(m.reshape(6, 4).T, w.reshape(6, 4).T, tangent)
    np.testing.assert_allclose(got, flat.T.reshape(2, 3, 4), rtol=1e-12)
    # A stack is a loop over its matrices.
    got = unit_tangent(jnp.asarray(m), jnp.asarray(w), (2,), tangent)
    stack = np.stack([by_reference(a, b, tangent) for a, b in zip(m, w, strict=True)])
    np.testing.assert_allclose(got, stack, rtol=1e-12)


@every_tangent
def test_projection_and_normalization_in_one_pass(tangent):
    """Gradients within the scale contract, weights of very different norms.

    With a zero row, zero weights and NaN.
    """
    m = gaussian((6, 8), 0)
    w = gaussian((6, 8), 1)
    got = rows.tangent_rows(np.float32(m), np.float32(0 * w), (1,), tangent)
    np.testing.assert_array_equal(got, np.float32(m))
    for scale in (1e-25, 1e19):  # the square overflows float32 or is zero
        got = rows.tangent_rows(jnp.float32(scale * m), jnp.float32(w), (1,), tangent)
        expected = reference.tangent_rows(m, w, tangent)
        np.testing.assert_allclose(got / scale, expected, atol=1e-5)
    m[2] = 0
    w[3] = 0
    m[4, 1] = np.nan
    for scale, norm in (
        (1e-15, 1e-3),
        (1e15, 1e3),
        (1e-15, 1e3),
        (1e15, 1e-3),
        (1.0, 1e8),
    ):
        m32 = np.float32(scale * m)
        w32 = np.float32(norm * w)
        expected = by_reference(m32, w32, tangent)
        got = np.asarray(compiled(m32, w32, (1,), tangent))
        # Ten roundings over the square of the share that is left: 0.5 and more of these
        # rows is across w.
        np.testing.assert_allclose(got, expected, rtol=0, atol=10 / 0.5**2 * EPS32)
        assert not got[2].any()


def along_weights(share, seed=0):
    """Momentum of norm one that is parallel to w but for ``share``, and w."""
    w = reference.unit_rows(gaussian((64, 16), seed))
    x = reference.tangent_rows(gaussian((64, 16), seed + 1), w, "strict")
    across = reference.unit_rows(x)
    m = (1 - share**2) ** 0.5 * w + share * across
    return np.float32(m), np.float32(w)


def test_the_error_grows_as_the_share_across_the_weights_shrinks():
    for share in (1.0, 0.1, 0.01, 0.003):
        m, w = along_weights(share)
        got = np.asarray(compiled(m, w, (1,), "strict"), np.float64)
        norm = np.linalg.norm(got, axis=-1)
        # <m, m> and <m, w>^2 / <w, w> are sums of sixteen products: a few eps, of which
        # x has a share q^2; half in a root. The direction loses no more than m did when
        # it was rounded: a few eps over q.
        assert np.abs(norm - 1).max() <= 4 * EPS32 / share**2
        expected = by_reference(m, w, "strict")
        atol = 8 * EPS32 / share
        np.testing.assert_allclose(got / norm[:, None], expected, rtol=0, atol=atol)
    # Below ``4 sqrt(eps) = 1.4e-3`` across the weights: half of that is zero, twice of
    # it is not.
    for factor, gone in ((0.5, True), (2.0, False)):
        m, w = along_weights(factor * 4 * EPS32**0.5)
        largest = np.abs(compiled(m, w, (1,), "strict")).max(axis=-1)
        assert ((largest == 0) == gone).all()


@pytest.mark.parametrize("tangent", ["strict", "relaxed"])
def test_momentum_along_the_weights(tangent):
    """Along unit weights only rounding is left, which counts as zero.

    Along others, rows of at most norm one are left, at every scale.
    """
    random = np.random.default_rng(0)
    w = random.standard_normal((200, 37))
    unit = np.float32(reference.unit_rows(w))
    times = np.float32(random.uniform(0.1, 9, (200, 1)))
    assert not np.asarray(compiled(times * unit, unit, (1,), tangent)).any()
    assert not np.asarray(rows.tangent_rows(times * unit, unit, (1,), tangent)).any()
    for size, noise in itertools.product((1.0, 1e-8, 1e-15), (0, 1e-6, 1e-3)):
        m = np.float32((w + noise * random.standard_normal(w.shape)) * size)
        # Beyond rounding, what a difference of numbers 1e6 times as large has lost:
        # some per cent.
        norms = np.linalg.norm(compiled(m, np.float32(w), (1,), tangent), axis=-1)
        assert norms.max() < 1.1, (size, noise)


def test_rows_and_columns_at_once(x64):
    x = gaussian((2, 4, 6), 4)
    x[:, 1] = 0
    r = np.linalg.norm(x, axis=-1, keepdims=True)
    c = np.linalg.norm(x, axis=-2, keepdims=True)
    expected = x / np.where(r == 0, 1, r) / c * r.max(axis=-2, keepdims=True)
    for scale in (1e-100, 1.0, 1e100):
        got = rows.unit_rows_and_columns(jnp.asarray(x * scale), (2,), (1,))
        np.testing.assert_allclose(got, expected, rtol=1e-12)
    assert not rows.unit_rows_and_columns(jnp.zeros((2, 4, 6)), (2,), (1,)).any()


def test_parameters_are_neither_transposed_nor_reshaped():
    """Sums only, which XLA partitions on any mesh."""
    x = jnp.ones((3, 4, 5))
    program = jax.make_jaxpr(lambda m, w: unit_tangent(m, w, (0, 2)))(x, x)
    primitives = {eqn.primitive.name for eqn in equations(program.jaxpr)}
    assert "reduce_sum" in primitives
    assert not primitives & {"transpose", "reshape"}
