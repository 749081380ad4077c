# SPDX-License-Identifier: Apache-2.0
"""Orthonormal bases of wide flat matrices by shifted Cholesky-QR, in plain array operations.

With ``G = Y Y^T = L L^T`` the rows of ``L^-1 Y`` are orthonormal up to ``eps cond(Y)^2``. A small shift of the
diagonal keeps the factorisation alive on rank-deficient input, at the price of directions that come out too short;
repeating the pass lengthens them (shifted Cholesky-QR 3). What is missing at the end is rounding noise of the input:
such a row is shorter than one, never a duplicate of another.

No QR, Cholesky or triangular solve of LAPACK is called: see ``lapack`` for why.
"""

import jax
import jax.numpy as jnp

from normpre_optax.linalg.precision import product


def inverse_cholesky(g: jax.Array) -> jax.Array:
    """``L^-1`` of ``g = L L^T``, by elimination on ``[g | I]``, all matrices of the stack at once.

    A pivot at or below ``l eps`` times the largest diagonal entry is rounding noise: its row comes out zero, and the
    elimination goes on without it.

    Args:
        g: symmetric positive semidefinite matrices ``(..., l, l)``.

    Returns:
        Lower triangular matrices ``(..., l, l)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import inverse_cholesky
        >>> print(inverse_cholesky(jnp.array([[4.0, 2.0], [2.0, 2.0]])))
        [[ 0.5  0. ]
         [-0.5  1. ]]
    """
    size = g.shape[-1]
    index = jnp.arange(size)[:, None]
    peak = jnp.max(jnp.diagonal(g, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    noise = size * jnp.finfo(g.dtype).eps * peak

    def eliminate(j: jax.Array, pair: jax.Array) -> jax.Array:
        row = jax.lax.dynamic_slice_in_dim(pair, j, 1, axis=-2)
        column = jax.lax.dynamic_slice_in_dim(pair, j, 1, axis=-1)
        pivot = jax.lax.dynamic_slice_in_dim(row, j, 1, axis=-1)
        inverse = jnp.where(pivot <= noise, 0, 1 / jnp.where(pivot <= noise, 1, pivot))
        below = jnp.where(index > j, column * inverse, 0)
        return jnp.where(index == j, row * jnp.sqrt(inverse), pair - below * row)

    identity = jnp.broadcast_to(jnp.eye(size, dtype=g.dtype), g.shape)
    return jax.lax.fori_loop(0, size, eliminate, jnp.concatenate([g, identity], axis=-1))[..., size:]


def orthonormal_rows(y: jax.Array, passes: int = 3) -> jax.Array:
    """Orthonormal basis of the row span of ``y``.

    Args:
        y: matrices ``(..., l, m)``, ``l <= m``.
        passes: Cholesky-QR passes, all but the last one shifted; three make up for any condition number that the dtype
            can represent.

    Returns:
        ``Q`` of shape ``(..., l, m)`` with ``Q Q^T = I`` on the numerical range of ``y``. Rows beyond its rank are
        zero or rounding noise of length at most one, orthogonal to the others.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import orthonormal_rows
        >>> q = orthonormal_rows(jnp.array([[1.0, 1.0, 0.0], [1.0, 1.001, 0.0]]))
        >>> bool(jnp.allclose(q @ q.T, jnp.eye(2), atol=1e-5))
        True

    References:
        Fukaya, Kannan, Nakatsukasa, Yamamoto and Yanagisawa, Shifted Cholesky QR, SIAM J. Sci. Comput. 42, 2020.
    """
    size = y.shape[-2]
    # The rounding error of g is a few eps times its trace; a shift well above it keeps every pivot positive.
    shift = 4 * size * jnp.finfo(y.dtype).eps * jnp.eye(size, dtype=y.dtype)
    peak = jnp.max(jnp.abs(y), axis=(-2, -1), keepdims=True, initial=0)

    def one_pass(i: jax.Array, y: jax.Array) -> jax.Array:
        g = product(y, y.mT)
        trace = jnp.trace(g, axis1=-2, axis2=-1)[..., None, None]
        return product(inverse_cholesky(g + jnp.where(i < passes - 1, trace, 0) * shift), y)

    return jax.lax.fori_loop(0, passes, one_pass, y / jnp.where(peak == 0, 1, peak))
