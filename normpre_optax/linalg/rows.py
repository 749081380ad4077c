# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix: their lengths, their directions, and their part along another matrix's rows.

A row runs along ``axis``: -1, or -2 for the rows of a matrix that is stored transposed.

Lengths are taken of rows divided by their largest entry, so that squares neither overflow nor vanish: a row of
entries near 1e-30 or 1e30 is measured as well as one near 1. Zero rows stay zero and NaN stays NaN.
"""

import jax
import jax.numpy as jnp

TANGENT_MODES = ("relaxed", "bounded", "strict", "none")


def _peak(x: jax.Array, axis: int) -> jax.Array:
    """Largest magnitude of each row, with 1 in place of 0, and no larger than what has a normal reciprocal."""
    peak = jnp.max(jnp.abs(x), axis=axis, keepdims=True, initial=0)
    return jnp.where(peak == 0, 1, jnp.minimum(peak, jnp.finfo(x.dtype).max / 4))


def row_norms(x: jax.Array, axis: int = -1) -> jax.Array:
    """Euclidean length of each row.

    Args:
        x: matrices ``(..., m, n)``.
        axis: along which a row runs.

    Returns:
        Lengths, with size one in place of ``axis``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import row_norms
        >>> print(row_norms(jnp.array([[3e-30, 4e-30], [0.0, 0.0]])).ravel())
        [5.e-30 0.e+00]
    """
    peak = _peak(x, axis)
    return peak * jnp.sqrt(jnp.sum((x / peak) ** 2, axis=axis, keepdims=True))


def unit_rows(x: jax.Array, axis: int = -1, eps: float = 0.0) -> jax.Array:
    """Every row divided by its length: ``Psi = D(X)^-1 X`` of the paper; zero rows stay zero.

    Args:
        x: matrices ``(..., m, n)``.
        axis: along which a row runs.
        eps: added to the squared length.

    Returns:
        Matrices ``(..., m, n)`` whose rows have length 1 or 0 (with ``eps``, less than 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import unit_rows
        >>> print(unit_rows(jnp.array([[3.0, 4.0], [0.0, 0.0]])))
        [[0.6 0.8]
         [0.  0. ]]
    """
    peak = _peak(x, axis)
    x = x / peak
    square = jnp.sum(x**2, axis=axis, keepdims=True)
    if eps:
        square = square + eps / peak**2  # infinite for a row far below eps, which then is zero
    norm = jnp.sqrt(square)
    return x / jnp.where(norm == 0, 1, norm)


def standardize_rows(x: jax.Array, axis: int = -1) -> jax.Array:
    """Every row less its mean, divided by its standard deviation (over n, not n - 1).

    A row of which only rounding noise is left, such as one of equal entries, counts as zero and stays zero.

    Args:
        x: matrices ``(..., m, n)``.
        axis: along which a row runs.

    Returns:
        Matrices ``(..., m, n)`` whose rows have mean 0 and length ``sqrt(n)`` or 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import standardize_rows
        >>> print(standardize_rows(jnp.array([[3e20, 5e20], [0.1, 0.1]])).round(4))
        [[-1.  1.]
         [ 0.  0.]]
    """
    x = x / _peak(x, axis)
    square = jnp.mean(x**2, axis=axis, keepdims=True)
    x = x - jnp.mean(x, axis=axis, keepdims=True)
    variance = jnp.mean(x**2, axis=axis, keepdims=True)
    gone = variance <= (8 * jnp.finfo(x.dtype).eps) ** 2 * square
    return jnp.where(gone, 0, x / jnp.sqrt(jnp.where(gone, 1, variance)))


def equalize(x: jax.Array) -> jax.Array:
    """Every entry divided by the length of its row and by that of its column: ``x_ij max_k r_k / (r_i c_j)``.

    Both lengths are those of ``x``. The largest row's length in front makes the result independent of the scale of
    ``x``. Rows and columns enter alike, up to that factor.

    Args:
        x: matrices ``(..., m, n)``.

    Returns:
        Matrices ``(..., m, n)``. Zero rows and columns stay zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import equalize
        >>> print(equalize(jnp.array([[2e-20, 0.0], [0.0, 1e-20]])))
        [[1. 0.]
         [0. 2.]]
    """
    rows, columns = row_norms(x), row_norms(x, axis=-2)
    share = rows / jnp.max(jnp.where(rows == 0, jnp.finfo(x.dtype).tiny, rows), axis=-2, keepdims=True)
    return x / jnp.where(columns == 0, 1, columns) / jnp.where(share == 0, 1, share)


def tangent_rows(
    m: jax.Array, w: jax.Array | None, mode: str = "relaxed", radius: jax.typing.ArrayLike = 1.0, axis: int = -1
) -> jax.Array:
    """Rows of ``m`` with their part along the rows of ``w`` damped, removed or kept.

    Per row, with the radius c and the radial part ``r = <m, w> w / ||w||^2``:

    - ``relaxed``: ``x = m - <m, w> w / c^2``, which keeps ``r`` times ``1 - ||w||^2 / c^2`` (the paper's, c = 1);
    - ``bounded``: keeps ``r`` times ``max(0, 1 - ||w||^2 / c^2)``;
    - ``strict``: removes ``r``;
    - ``none``: ``x = m``.

    A row of which only rounding noise is left, ``||x|| <= 8 eps ||m||``, counts as zero.

    Args:
        m: momentum ``(..., m, n)``.
        w: weights ``(..., m, n)``; None will do for the mode ``none``.
        mode: one of the above.
        radius: the row length c at which the relaxed radial part vanishes.
        axis: along which a row runs.

    Returns:
        ``X`` of the paper, ``(..., m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import tangent_rows
        >>> m, w = jnp.array([[1.0, 1.0]]), jnp.array([[0.0, 0.5]])
        >>> print(tangent_rows(m, w), tangent_rows(m, w, "strict"))
        [[1.   0.75]] [[1. 0.]]
    """
    if mode == "none":
        return m
    assert w is not None
    peak = _peak(m, axis)
    x, size = _tangent(m / peak, w, mode, radius, axis)
    return x * (size * peak)


def unit_tangent_rows(
    m: jax.Array, w: jax.Array | None, mode: str = "relaxed", radius: jax.typing.ArrayLike = 1.0, axis: int = -1
) -> jax.Array:
    """``unit_rows(tangent_rows(m, w, ...))`` in fewer passes over memory: ``X`` is not brought back to its scale.

    Args:
        m: momentum ``(..., m, n)``.
        w: weights ``(..., m, n)``; None will do for the mode ``none``.
        mode: see ``tangent_rows``.
        radius: see ``tangent_rows``.
        axis: along which a row runs.

    Returns:
        ``Psi`` of the paper, ``(..., m, n)``: rows of length 1 or 0.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import unit_tangent_rows
        >>> print(unit_tangent_rows(jnp.array([[3e-20, 4e-20]]), jnp.array([[0.0, 1.0]])))
        [[1. 0.]]
    """
    if mode == "none":
        return unit_rows(m, axis)
    assert w is not None
    # No peak is taken again: X comes with entries near one, and rounding noise is the least that is left of them.
    x, _ = _tangent(m / _peak(m, axis), w, mode, radius, axis)
    norm = jnp.sqrt(jnp.sum(x**2, axis=axis, keepdims=True))
    return x / jnp.where(norm == 0, 1, norm)


def _tangent(
    m: jax.Array, w: jax.Array, mode: str, radius: jax.typing.ArrayLike, axis: int
) -> tuple[jax.Array, jax.Array]:
    """``tangent_rows`` of rows whose largest entry is one, divided by a size that keeps squares from overflowing."""
    if mode == "relaxed":
        along, amount = w, 1 / jnp.square(jnp.asarray(radius, m.dtype))
    else:
        along, amount = unit_rows(w, axis), jnp.ones((), m.dtype)
    if mode == "bounded":
        amount = jnp.minimum(1, jnp.square(row_norms(w, axis) / radius)).astype(m.dtype)
    radial = amount * jnp.sum(m * along, axis=axis, keepdims=True)
    # X is as long as m, or as the radial part times w: about the square of that part where it is the longer one.
    size = jnp.maximum(1, jnp.abs(radial))
    inverse = 1 / size
    shrink = inverse * inverse
    x = shrink * m - (radial * inverse * inverse) * along
    noise = 8 * jnp.finfo(m.dtype).eps * shrink
    gone = jnp.sum(x**2, axis=axis, keepdims=True) <= noise**2 * jnp.sum(m**2, axis=axis, keepdims=True)
    return jnp.where(gone, 0, x), size * size
