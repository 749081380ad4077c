# SPDX-License-Identifier: Apache-2.0
"""The dense factorisations: NumPy's numbers, for stacks, under vmap and jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from normpre_optax.linalg.lapack import eigh, singular_values, svd
from tests.cases import gaussian


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
def test_eigh_is_descending_and_exact(x64, batch):
    a = gaussian((*batch, 5, 5))
    a = a + np.swapaxes(a, -1, -2)
    values, vectors = eigh(jnp.asarray(a))
    np.testing.assert_allclose(values, np.linalg.eigvalsh(a)[..., ::-1], atol=1e-12)
    np.testing.assert_allclose(a @ vectors, vectors * values[..., None, :], atol=1e-12)
    if batch:
        np.testing.assert_allclose(jax.jit(jax.vmap(eigh))(jnp.asarray(a))[0], values, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 7), (7, 4), (3, 4, 7), (2, 3, 7, 4)])
def test_svd_is_thin_and_exact(x64, shape):
    x = gaussian(shape)
    u, s, vt = svd(jnp.asarray(x))
    assert u.shape[-1] == s.shape[-1] == vt.shape[-2] == 4
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), atol=1e-12)
    np.testing.assert_allclose((u * s[..., None, :]) @ vt, x, atol=1e-12)
    np.testing.assert_allclose(singular_values(jnp.asarray(x)), s, atol=1e-12)
    if len(shape) > 2:
        np.testing.assert_allclose(jax.jit(jax.vmap(svd))(jnp.asarray(x))[1], s, atol=1e-12)
        np.testing.assert_allclose(jax.jit(jax.vmap(singular_values))(jnp.asarray(x)), s, atol=1e-12)


@pytest.mark.parametrize("f", [eigh, svd])
def test_a_bad_matrix_spoils_no_neighbour(f):
    x = gaussian((3, 4, 4)).astype(np.float32)
    x = x + np.swapaxes(x, -1, -2)
    clean = [np.asarray(part) for part in f(jnp.asarray(x))]
    x[1, 0, 0] = np.nan
    for part, whole in zip(f(jnp.asarray(x)), clean, strict=True):
        np.testing.assert_allclose(part[jnp.array([0, 2])], whole[[0, 2]], atol=1e-6)
        assert np.isnan(part[1]).any()
