# SPDX-License-Identifier: Apache-2.0
"""Whitening and standardized rows: scales, zeros, NaN, and matrices of known spectra.

In ``tests/test_relatives.py`` SWAN is compared with the literal form, on rows.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.whitening import standardized_rows, whiten
from tests import reference
from tests.cases import EPS32

SHAPES = [(5, 12), (12, 5), (1, 1)]


def gaussian(shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


@pytest.mark.parametrize("shape", SHAPES)
def test_many_steps_tend_to_the_matrix_sign(x64, shape):
    x = gaussian(shape)
    # The iteration squares the distance to one; 40 steps leave rounding.
    assert np.linalg.svd(x, compute_uv=False).min() > 0.01
    scale = np.sqrt(np.linalg.norm(x @ x.T))
    found = jax.jit(whiten, static_argnums=1)(x, 40) / scale
    np.testing.assert_allclose(found, reference.msign(x), atol=1e-8)


@pytest.mark.parametrize("shape", SHAPES)
def test_it_keeps_the_scale_of_a_matrix_and_zeros_and_nan_stay(shape):
    x = jnp.asarray(gaussian(shape), jnp.float32)
    alone = whiten(x)
    for scale in (1e-15, 1e15):
        # A few roundings, times the slope of six iterations at zero, 1.5^6.
        found = whiten(scale * x) / scale
        np.testing.assert_allclose(found, alone, rtol=0, atol=485 * EPS32 * 4)
    assert not whiten(jnp.zeros(shape)).any()
    assert np.isnan(whiten(x.at[0, 0].set(jnp.nan))).all()
    np.testing.assert_allclose(jnp.sqrt(jnp.mean(whiten(x, rms=0.5) ** 2)), 0.5, 1e-6)
    assert not whiten(jnp.zeros(shape), rms=0.5).any()


def test_nothing_is_added_that_a_matrix_of_low_rank_lacks():
    x = np.outer([1.0, 2.0, 3.0], [1.0, -1.0, 0.0, 2.0]).astype(np.float32)
    found = np.asarray(whiten(jnp.asarray(x)), np.float64)
    expected = x / np.linalg.norm(x)
    # What is rounded into the missing directions grows by 1.5 a step: 11 eps after six.
    np.testing.assert_allclose(found / np.linalg.norm(found), expected, atol=2e-6)


def test_standardized_rows_that_are_constant_become_zero():
    """SWAN's transcription has the others."""
    flat = [0.1] * 7
    tiny = [1e-15, 2e-15, 0.0, 0.0, 0.0, 0.0, 0.0]
    zero = [0.0] * 7
    nan = [np.nan] + [1.0] * 6
    found = standardized_rows(jnp.float32([flat, tiny, zero, nan]), (1,))
    of_flat, of_tiny, of_zero, of_nan = np.asarray(found)
    assert not np.any([of_flat, of_zero])
    moments = [np.mean(of_tiny), np.std(of_tiny)]
    np.testing.assert_allclose(moments, [0, 1], rtol=0, atol=1e-6)
    assert np.isnan(of_nan).all()
