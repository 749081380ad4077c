# SPDX-License-Identifier: Apache-2.0
"""Orthonormal bases of wide flat matrices by shifted Cholesky-QR, in plain array operations.

With ``G = Y Y^T = L L^T`` the rows of ``L^-1 Y`` are orthonormal up to ``eps cond(Y)^2``. A small shift of the
diagonal keeps the factorisation alive on rank-deficient input, at the price of directions that come out too short;
repeating the pass lengthens them (shifted Cholesky-QR 3). What is missing at the end is rounding noise of the input:
such a row is shorter than one, never a duplicate of another.

On CPU no QR, Cholesky or triangular solve of LAPACK is called: see ``lapack`` for why.
"""

import jax
import jax.numpy as jnp

from normpre_optax.linalg.precision import exact_product
from normpre_optax.platforms import by_platform


def inverse_cholesky(g: jax.Array, spare: bool = False) -> jax.Array:
    """``L^-1`` of ``g = L L^T``, all matrices of the stack at once: by elimination on CPU, by one call elsewhere.

    Directions that are rounding noise of ``g`` are left out or come out too short, and nothing becomes NaN: see
    ``eliminated`` and ``factored``, which are the two ways.

    Args:
        g: symmetric positive semidefinite matrices ``(..., l, l)``.
        spare: whether directions of which little is left come out too short on a CPU too, to be lengthened by another
            pass, where they are left out otherwise.

    Returns:
        Lower triangular matrices ``(..., l, l)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import inverse_cholesky
        >>> print(inverse_cholesky(jnp.array([[4.0, 2.0], [2.0, 2.0]])))
        [[ 0.5  0. ]
         [-0.5  1. ]]
    """
    return by_platform(g, cpu=lambda g: eliminated(shifted(g) if spare else g), default=factored)


def eliminated(g: jax.Array) -> jax.Array:
    """``inverse_cholesky`` in plain array operations: elimination on ``[g | I]``, a loop of ``l`` short steps.

    A pivot at or below ``l eps`` times the largest diagonal entry is rounding noise: its row comes out zero, and the
    elimination goes on without it. Safe from the CPU's hang (``lapack``); on an accelerator every step of the loop
    costs as much as a product.

    Args:
        g: symmetric positive semidefinite matrices ``(..., l, l)``.

    Returns:
        Lower triangular matrices ``(..., l, l)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import eliminated
        >>> print(eliminated(jnp.array([[4.0, 0.0], [0.0, 0.0]])))
        [[0.5 0. ]
         [0.  0. ]]
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


def factored(g: jax.Array) -> jax.Array:
    """``inverse_cholesky`` by one Cholesky factorisation and one triangular solve of the whole stack.

    ``g`` is first brought to a unit diagonal, and what is off the diagonal is shortened by ``2 l eps``: more than the
    rounding of ``g`` and of the factorisation, so that no pivot fails however dependent the rows are. A direction of
    which less than that is left comes out too short.

    Args:
        g: symmetric positive semidefinite matrices ``(..., l, l)``.

    Returns:
        Lower triangular matrices ``(..., l, l)``; rows and columns of zero diagonal entries are zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import factored
        >>> print(factored(jnp.array([[4.0, 0.0], [0.0, 0.0]])))
        [[0.5 0. ]
         [0.  0. ]]
    """
    size = g.shape[-1]
    diagonal = jnp.diagonal(g, axis1=-2, axis2=-1)
    inverse = jnp.where(diagonal > 0, jax.lax.rsqrt(jnp.where(diagonal > 0, diagonal, 1)), 0 * diagonal)
    unit = inverse[..., :, None] * g * inverse[..., None, :] / (1 + 2 * size * jnp.finfo(g.dtype).eps)
    identity = jnp.eye(size, dtype=g.dtype)
    lower = jax.lax.linalg.cholesky(jnp.where(identity == 1, 1, unit), symmetrize_input=False)
    solved = jax.lax.linalg.triangular_solve(
        lower, jnp.broadcast_to(identity, g.shape), left_side=True, lower=True, transpose_a=False
    )
    return solved * inverse[..., None, :]


def shifted(g: jax.Array) -> jax.Array:
    """``g`` with ``4 l eps`` times its trace added to the diagonal: a few times its rounding error.

    With ``L^-1`` of that, directions of which little is left come out too short instead of being left out.

    Args:
        g: symmetric positive semidefinite matrices ``(..., l, l)``.

    Returns:
        Matrices ``(..., l, l)``, positive definite unless zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.orthonormal import shifted
        >>> bool(jnp.linalg.eigvalsh(shifted(jnp.ones((3, 3))))[0] > 1e-6)
        True
    """
    size = g.shape[-1]
    trace = jnp.trace(g, axis1=-2, axis2=-1)[..., None, None]
    return g + 4 * size * jnp.finfo(g.dtype).eps * trace * jnp.eye(size, dtype=g.dtype)


def orthonormal_rows(y: jax.Array) -> jax.Array:
    """Orthonormal basis of the row span of ``y``, by three passes of Cholesky-QR, all but the last one shifted.

    Three make up for any condition number that the dtype can represent.

    Args:
        y: matrices ``(..., l, m)``, ``l <= m``.

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
    peak = jnp.max(jnp.abs(y), axis=(-2, -1), keepdims=True, initial=0)

    def one_pass(y: jax.Array, spare: bool) -> jax.Array:
        return exact_product(inverse_cholesky(exact_product(y, y.mT), spare), y)

    y = y / jnp.where(peak == 0, 1, peak)
    return one_pass(jax.lax.fori_loop(0, 2, lambda _, y: one_pass(y, spare=True), y), spare=False)
