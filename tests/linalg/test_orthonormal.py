# SPDX-License-Identifier: Apache-2.0
"""Cholesky-QR: an orthonormal basis of the right span, for every condition number that float32 can hold."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg import orthonormal
from tests import cases
from tests.cases import EPS32, gaussian

# Compiled whole: run eagerly, the inner loop would compile anew at every call.
inverse_cholesky = jax.jit(orthonormal.inverse_cholesky)
# One operation after the other: two batched calls of LAPACK side by side can stop for ever (docs/cpu_hang.md).
factored = cases.one_by_one_jit(orthonormal.factored)
orthonormal_columns = jax.jit(lambda y: orthonormal.orthonormal_rows(y.mT).mT)


def with_condition(m, k, condition):
    u, _ = np.linalg.qr(gaussian((m, k)))
    v, _ = np.linalg.qr(gaussian((k, k), 1))
    return u * np.geomspace(1, 1 / condition, k) @ v.T, u


@pytest.mark.parametrize("size", [1, 2, 5, 40])
def test_inverse_cholesky_inverts_numpys_factor(x64, size):
    a = gaussian((3, size, size + 2))
    g = a @ np.swapaxes(a, -1, -2)
    expected = np.linalg.inv(np.linalg.cholesky(g))
    # Backward stable: relative to the factor's norm, eps times the condition number of g, here below 1e5.
    assert np.linalg.cond(g).max() < 1e5
    for way in (inverse_cholesky, factored):  # the latter shortens what is off the diagonal by 2 l eps: as little
        np.testing.assert_allclose(way(jnp.asarray(g)), expected, atol=1e-10 * np.abs(expected).max())


def test_a_pivot_of_rounding_noise_is_left_out():
    # The second row of the factor is sqrt(eps) long: noise beside the first. The third has nothing to do with it.
    g = jnp.array([[1.0, 1.0, 0.0], [1.0, 1.0 + EPS32, 0.0], [0.0, 0.0, 4.0]])
    np.testing.assert_array_equal(inverse_cholesky(g), [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.5]])


@pytest.mark.parametrize("condition", [1.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(40, 12), (12, 12), (9, 1)])
def test_spans_the_columns_it_was_given(shape, condition):
    m, k = shape
    y, u = with_condition(m, k, condition)
    q = np.asarray(orthonormal_columns(jnp.asarray(y, jnp.float32)), np.float64)
    # Three passes bring Q^T Q to the identity within a few eps times the number of columns.
    np.testing.assert_allclose(q.T @ q, np.eye(k), atol=4 * k * EPS32 + 1e-6)
    # The float32 copy of y has lost directions of relative length eps; what is left spans u up to eps * condition.
    outside = q - u @ (u.T @ q)
    assert np.linalg.norm(outside, 2) <= 8 * k * EPS32 * condition


def test_rank_deficient_input_gives_an_orthonormal_basis_of_its_range():
    u, _ = np.linalg.qr(gaussian((20, 3)))
    y = u @ gaussian((3, 8), 1)  # rank 3 in 8 columns
    q = np.asarray(orthonormal_columns(jnp.asarray(y, jnp.float32)), np.float64)
    assert np.isfinite(q).all()
    # No direction is counted twice, and the range is there: the projector onto it survives Q Q^T.
    assert np.linalg.norm(q, 2) <= 1 + 1e-3
    assert np.linalg.norm(u - q @ (q.T @ u), 2) <= 1e-3


def test_zero_and_bad_input():
    assert not np.any(orthonormal_columns(jnp.zeros((6, 3))))
    y = gaussian((3, 6, 2)).astype(np.float32)
    clean = np.asarray(orthonormal_columns(jnp.asarray(y)))
    y[1, 0, 0] = np.nan
    q = np.asarray(orthonormal_columns(jnp.asarray(y)))
    assert np.isnan(q[1]).any()
    np.testing.assert_array_equal(q[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_does_not_see_the_scale(scale):
    y = jnp.asarray(gaussian((10, 4)), jnp.float32)
    np.testing.assert_allclose(orthonormal_columns(y * jnp.float32(scale)), orthonormal_columns(y), atol=1e-5)


def test_a_stack_is_a_loop_under_vmap_too():
    y = jnp.asarray(gaussian((3, 10, 4)), jnp.float32)
    one_by_one = np.stack([orthonormal_columns(x) for x in y])
    np.testing.assert_allclose(orthonormal_columns(y), one_by_one, atol=1e-6)
    np.testing.assert_allclose(jax.vmap(orthonormal_columns)(y), one_by_one, atol=1e-6)


def gram(vectors):
    """Rows of different lengths, in float64, and their Gram matrix as float32 has it."""
    y = vectors * np.geomspace(1e-3, 1e3, len(vectors))[:, None]
    return y, np.asarray(y @ y.T, np.float32)


DEPENDENT = {
    "full rank": gaussian((8, 20)),
    "rank three": gaussian((8, 3)) @ gaussian((3, 20), 1),
    "near rank one": gaussian((8, 1)) @ gaussian((1, 20), 1) + 1e-4 * gaussian((8, 20), 2),
    "rank one": gaussian((8, 1)) @ gaussian((1, 20), 1),
    "twins": gaussian((8, 20))[[0, 1, 1, 3, 0, 5, 6, 1]],
    "one zero row": gaussian((8, 20)) * (np.arange(8) != 3)[:, None],
    "zero": np.zeros((8, 20)),
}


def test_the_factorisation_of_accelerators_never_fails_and_counts_no_direction_twice():
    """``W G W^T <= 1`` but for rounding, for Gram matrices of rows that depend on each other and differ in length."""
    ys, grams = zip(*map(gram, DEPENDENT.values()), strict=True)
    found = np.asarray(factored(jnp.asarray(np.stack(grams))), np.float64)
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, np.tril(found))
    for name, y, w in zip(DEPENDENT, ys, found, strict=True):
        # G is rounded, entry by entry, by eps of its rows' lengths: l eps in norm at unit diagonal, half of what the
        # diagonal is raised by. Solving with L rounds another l eps, times the condition of L, which the raise bounds
        # by (1 / (2 l eps))^(1/2): l eps / (2 l eps)^(1/2) = 1e-3.
        norm = np.linalg.norm(w @ y, 2)
        assert norm <= 1 + 1e-3, (name, norm)
        # A direction that stands clear of noise has its full length: the first row that is not zero does.
        rows = np.linalg.norm(w @ y, axis=1)
        there = np.linalg.norm(y, axis=1) > 0
        np.testing.assert_allclose(rows[there][:1], 1, rtol=1e-5)
        assert not w[~there].any()
        assert not w[:, ~there].any()


@pytest.mark.parametrize("name", ["rank three", "near rank one", "rank one", "twins"])
def test_the_factorisation_of_accelerators_spans_the_range_of_what_is_dependent(name):
    """Rows that float32 can tell apart become orthonormal; what is left of the others is their noise, and short."""
    y, g = gram(DEPENDENT[name])
    basis = np.asarray(factored(jnp.asarray(g)), np.float64) @ y
    unit = y / np.linalg.norm(y, axis=1, keepdims=True)
    s, directions = np.linalg.svd(unit, full_matrices=False)[1:]
    # Above the raise of the diagonal, 2 l eps = 2e-6 of a squared singular value, a hundredfold: short by a hundredth.
    clear = directions[s**2 > 100 * 2 * 8 * EPS32]
    assert len(clear) == {"rank three": 3, "near rank one": 1, "rank one": 1, "twins": 5}[name]
    assert np.linalg.svd(basis @ clear.T, compute_uv=False).min() >= 0.98


def test_the_factorisation_of_accelerators_keeps_a_bad_matrix_to_itself():
    grams = np.stack([gram(x)[1] for x in DEPENDENT.values()])
    clean = np.asarray(factored(jnp.asarray(grams)))
    grams[1, 2, 0] = grams[1, 0, 2] = np.nan
    grams[2, 4, 4] = np.nan
    hurt = np.asarray(factored(jnp.asarray(grams)))
    assert np.isnan(hurt[1]).any()
    assert np.isnan(hurt[2]).any()
    np.testing.assert_array_equal(np.delete(hurt, (1, 2), 0), np.delete(clean, (1, 2), 0))
