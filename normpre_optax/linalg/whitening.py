# SPDX-License-Identifier: Apache-2.0
"""Standardized rows, and whitened matrices: the two steps of SWAN."""

import functools
import math

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from normpre_optax.linalg.products import (
    inverse_root,
    on_smaller_side,
    product,
    smaller_gram,
)
from normpre_optax.linalg.rows import Axes


def standardized_rows(x: jax.Array, along: Axes) -> jax.Array:
    """Subtract from every row its mean, and divide by its standard deviation.

    A constant row becomes zero: what is left of it is rounding.

    Args:
        x: parameter in its own layout, in at least float32.
        along: the axes of a row.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.whitening import standardized_rows
        >>> x = jnp.array([[3e5, 5e5], [0.1, 0.1]])
        >>> print(standardized_rows(x, (1,)).round(4))
        [[-1.  1.]
         [ 0.  0.]]
    """
    squares = jnp.mean(x * x, along, keepdims=True)
    centered = x - jnp.mean(x, along, keepdims=True)
    variance = jnp.mean(centered * centered, along, keepdims=True)
    # The mean is wrong by a few eps of the row, and so is what it leaves of a constant.
    rounding = (8 * jnp.finfo(x.dtype).eps) ** 2 * squares
    variance = jnp.where(variance <= rounding, 0, variance)
    # A variance is a mean of squares: its least value is that of one square.
    return centered * inverse_root(variance, terms=1)


def whiten(
    x: jax.Array,
    steps: int = 6,
    compute_dtype: DTypeLike | None = None,
    rms: ArrayLike | None = None,
) -> jax.Array:
    """Return ``Z x`` with ``Z`` close to ``(x x^T / ||x x^T||_F)^(-1/2)``.

    ``Y = x x^T / ||x x^T||_F`` and ``Z = I``; each step sets ``Y <- Y (3 I - Z Y) / 2``
    and ``Z <- (3 I - Z Y) Z / 2``, both from the old values. The smaller dimension is
    used: ``Z x = x Z'`` with the same function ``Z'`` of ``x^T x``.

    Args:
        x: matrix ``(m, n)`` in at least float32.
        steps: number of iterations.
        compute_dtype: dtype of the operands of products, see ``products.product``.
        rms: if given, scale the result to this root mean square.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.whitening import whiten
        >>> x = whiten(jnp.diag(jnp.array([1.0, 2.0])), steps=12)
        >>> print((x / x[0, 0]).round(4))
        [[1. 0.]
         [0. 1.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148; Higham, Functions of
        Matrices, 2008, section 6.7.
    """
    times = functools.partial(product, dtype=compute_dtype)
    # Two steps of scaling, or the fourth powers of large entries overflow.
    unit = x * inverse_root(jnp.sum(x * x), x.size)
    gram = smaller_gram(unit, times)
    y = gram * inverse_root(jnp.sum(gram * gram))
    z = identity = jnp.eye(len(y), dtype=y.dtype)
    for _ in range(steps):
        factor = 1.5 * identity - 0.5 * times(z, y)
        y = times(y, factor)
        z = times(factor, z)
    whitened = on_smaller_side(z, x, times)
    if rms is None:
        return whitened
    norm = rms * math.sqrt(x.size)
    squares = jnp.sum(whitened * whitened)
    return whitened * (norm * inverse_root(squares))
