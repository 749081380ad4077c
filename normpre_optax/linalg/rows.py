# SPDX-License-Identifier: Apache-2.0
"""Row norms and the tangent projection, by sums along the axes of a row.

The functions work on parameters as they are stored. A row (the weights of one output
neuron) runs along the axes ``along``; a column is a row along the others. Sums keep
their axes, so that they broadcast.
"""

import jax
import jax.numpy as jnp

from normpre_optax.linalg.products import inverse_norm, inverse_root

Axes = tuple[int, ...]
TANGENTS = ("relaxed", "strict", "none")


def unit_rows(x: jax.Array, along: Axes) -> jax.Array:
    """Divide every row by its norm: ``x_i / ||x_i||``. Zero rows stay zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import unit_rows
        >>> print(unit_rows(jnp.array([[3.0, 4.0], [0.0, 0.0]]), (1,)))
        [[0.6 0.8]
         [0.  0. ]]
    """
    return x * inverse_norm(x, along)


def unit_rows_and_columns(x: jax.Array, along: Axes, across: Axes) -> jax.Array:
    """Divide every entry by the norms of its row and its column.

    The result is ``x_ij max_k r_k / (r_i c_j)``, with both norms of ``x``. The norm of
    the largest row keeps it independent of the scale of ``x``. Zero rows and columns
    stay zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import unit_rows_and_columns
        >>> x = jnp.array([[2e-8, 0.0], [0.0, 1e-8]])
        >>> print(unit_rows_and_columns(x, (1,), (0,)))
        [[1. 0.]
         [0. 2.]]
    """
    rows = inverse_norm(x, along)
    columns = inverse_norm(x, across)
    # These are inverse norms: the least one is that of the largest row.
    nonzero = jnp.where(rows == 0, jnp.inf, rows)
    largest = jnp.min(nonzero, across, keepdims=True)
    relative = jnp.where(rows == 0, 0, rows / largest)
    return x * (relative * columns)


def tangent_rows(
    m: jax.Array, w: jax.Array, along: Axes, tangent: str = "relaxed"
) -> jax.Array:
    """Project every row of ``m`` against the same row of ``w``.

    - ``relaxed``: ``m - <m, w> w``, which keeps the radial part of ``m`` times ``1 -
      ||w||^2``;
    - ``strict``: ``m - <m, w> w / ||w||^2``, which removes it;
    - ``none``: ``m``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import tangent_rows
        >>> print(tangent_rows(jnp.array([[1.0, 1.0]]), jnp.array([[0.0, 0.5]]), (1,)))
        [[1.   0.75]]
    """
    if tangent == "none":
        return m
    _, radial, left = _radial(m, w, along, tangent)
    return jnp.where(left == 0, 0, m - radial * w)


# Jitted: traced and lowered once per shape.
@jax.jit(static_argnames=("along", "tangent"))
def unit_tangent_factors(
    m: jax.Array, w: jax.Array | None, along: Axes, tangent: str = "relaxed"
) -> tuple[jax.Array, jax.Array]:
    """Return ``(a, b)`` with ``unit_rows(tangent_rows(m, w)) = a m - b w``.

    It is one pass over ``m`` and ``w``.

    Args:
        m: momentum.
        w: weights of the same shape; not read if ``tangent`` is "none".
        along: axes of a row.
        tangent: see ``tangent_rows``.

    Returns:
        Two numbers per row. A row of which only rounding error is left has ``a = b =
        0``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import unit_tangent_factors
        >>> m, w = jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 0.5]])
        >>> a, b = unit_tangent_factors(m, w, (1,), "strict")
        >>> print(a.round(4), b.round(4))
        [[0.3333]] [[2.6667]]
    """
    if tangent == "none" or w is None:
        a = inverse_norm(m, along)
        return a, jnp.zeros_like(a)
    mm, radial, left = _radial(m, w, along, tangent)
    # 1 / ||x||. Two roots, because ||m||^2 times a small share may underflow.
    a = inverse_root(mm, m.size // max(1, mm.size)) * inverse_root(left)
    return a, radial * a


def _radial(
    m: jax.Array, w: jax.Array, along: Axes, tangent: str
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return ``||m||^2``, ``r`` with ``x = m - r w``, and ``||x||^2 / ||m||^2``.

    The last is 0 where ``x`` is rounding error.
    """
    mm = jnp.sum(m * m, along, keepdims=True)
    mw = jnp.sum(m * w, along, keepdims=True)
    ww = jnp.sum(w * w, along, keepdims=True)
    # The radial part of m is along_w w.
    divisor_ww = jnp.where(ww == 0, 1, ww)
    along_w = jnp.where(ww == 0, 0, mw / divisor_ww)
    # Its share of ||m||^2.
    divisor_mm = jnp.where(mm == 0, 1, mm)
    # In this order: mw^2 may overflow where ||m||^2 does not.
    share = jnp.where(mm == 0, 0, along_w * (mw / divisor_mm))
    kept = 1 - ww if tangent == "relaxed" else jnp.zeros_like(ww)
    eps = jnp.finfo(mm.dtype).eps
    # Where m is along w, rounding leaves a few eps. The threshold is a norm of 4
    # sqrt(eps), in float32 0.0014 of that of m.
    tangential = jnp.where(1 - share < 16 * eps, 0, 1 - share)
    left = tangential + kept * (kept * share)
    # The same for `kept`, where the norm of w is one up to rounding.
    left = jnp.where(left <= (8 * eps) ** 2, 0, left)
    radial = (1 - kept) * along_w
    return mm, radial, left
