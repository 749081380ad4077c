# SPDX-License-Identifier: Apache-2.0
"""Whitening against its literal form on the rows' side, and against msign, which it tends to."""

import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.rows import equalize, standardize_rows, unit_rows
from normpre_optax.linalg.whitening import whiten
from tests.reference import msign

SHAPES = [(4, 9), (9, 4), (5, 5)]


def literal(x, steps):
    y = x @ x.T / np.linalg.norm(x @ x.T)
    z = identity = np.eye(len(x))
    for _ in range(steps):
        y, z = y @ (3 * identity - z @ y) / 2, (3 * identity - z @ y) @ z / 2
    return z @ x


@pytest.mark.parametrize("shape", SHAPES)
def test_whitening_is_its_literal_form(shape, x64):
    x = np.random.default_rng(0).standard_normal((2, *shape))
    got = whiten(jnp.asarray(x))
    for i in range(2):
        np.testing.assert_allclose(got[i], literal(x[i], 6), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_whitening_tends_to_msign(shape, x64):
    x = np.random.default_rng(1).standard_normal(shape)
    got = whiten(jnp.asarray(x), steps=40) / np.sqrt(np.linalg.norm(x @ x.T))
    np.testing.assert_allclose(got, msign(x), atol=1e-8)


@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_whitening_keeps_scale_zero_and_nan(scale):
    x = np.random.default_rng(2).standard_normal((4, 6)).astype(np.float32)
    np.testing.assert_allclose(whiten(jnp.asarray(x * np.float32(scale))) / scale, whiten(jnp.asarray(x)), rtol=2e-5)
    stack = jnp.stack([jnp.zeros((4, 6)), jnp.asarray(x).at[0, 0].set(jnp.nan), jnp.asarray(x)])
    zero, nan, sound = whiten(stack)
    assert not zero.any()
    assert jnp.isnan(nan).any()
    assert jnp.isfinite(sound).all()


def test_whitening_leaves_what_a_matrix_of_low_rank_lacks():
    x = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 0.0, 2.0]).astype(np.float32)
    got = np.asarray(whiten(jnp.asarray(x)), np.float64)
    # What is rounded into the missing directions grows by 1.5 a step: 11 eps after six.
    np.testing.assert_allclose(got / np.linalg.norm(got), x / np.linalg.norm(x), atol=2e-6)


@pytest.mark.parametrize("axis", [-1, -2])
def test_standardized_rows(axis, x64):
    x = np.random.default_rng(3).standard_normal((3, 5, 7)) + 4
    expected = (x - x.mean(axis, keepdims=True)) / x.std(axis, keepdims=True)
    np.testing.assert_allclose(standardize_rows(jnp.asarray(x), axis), expected, rtol=1e-12, atol=1e-12)


def test_rows_of_equal_entries_are_zero_and_not_noise():
    rows = jnp.asarray([[0.1] * 7, [1e-20, 2e-20] + [0.0] * 5, [0.0] * 7, [jnp.nan] + [1.0] * 6], jnp.float32)
    flat, tiny, zero, nan = standardize_rows(rows)
    assert not flat.any()
    assert not zero.any()
    np.testing.assert_allclose(jnp.std(tiny), 1, rtol=1e-6)
    assert jnp.isnan(nan).all()


def test_equalize(x64):
    x = np.random.default_rng(4).standard_normal((2, 4, 6))
    x[:, 1] = 0
    rows, columns = np.linalg.norm(x, axis=-1, keepdims=True), np.linalg.norm(x, axis=-2, keepdims=True)
    expected = x / np.where(rows == 0, 1, rows) / columns * rows.max(axis=-2, keepdims=True)
    for scale in (1e-200, 1.0, 1e200):
        np.testing.assert_allclose(equalize(jnp.asarray(x * scale)), expected, rtol=1e-12)
    assert not equalize(jnp.zeros((3, 2))).any()


def test_an_eps_under_the_length_damps_what_is_below_it():
    x = jnp.asarray([[3.0, 4.0], [3e-9, 4e-9], [0.0, 0.0], [3e-30, 4e-30]], jnp.float32)
    long, short, zero, least = np.linalg.norm(unit_rows(x, eps=1e-7), axis=-1)
    np.testing.assert_allclose(long, 1, atol=1e-6)
    np.testing.assert_allclose(short, 5e-9 / np.sqrt(1e-7), rtol=1e-5)
    assert zero == 0
    assert least < 1e-20
