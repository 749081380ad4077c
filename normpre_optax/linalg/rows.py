# SPDX-License-Identifier: Apache-2.0
"""Rows of a matrix: their lengths, their directions, and their part along another matrix's rows.

A row runs along ``axis``: -1, or -2 for the rows of a matrix that is stored transposed.

Lengths are taken of rows divided by their largest entry, so that squares neither overflow nor vanish: a row of
entries near 1e-30 or 1e30 is measured as well as one near 1. Zero rows stay zero and NaN stays NaN. The
optimizers' own way, ``tangent_factors``, does without that where it can.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.platforms import by_platform

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
    x, shrink, _ = _tangent(m / peak, w, mode, radius, axis)
    return x * (peak / shrink)


class RowFactors(NamedTuple):
    """Two numbers a row: ``Psi = momentum M - weights W``.

    Attributes:
        momentum: of a row of the momentum, ``(..., m, 1)``, along axis -2 ``(..., 1, n)``; 0 where nothing is left.
        weights: of the same row of the weights, in the same shape.
    """

    momentum: jax.Array
    weights: jax.Array


def scaled_rows(m: jax.Array, w: jax.Array | None, factors: RowFactors) -> jax.Array:
    """``momentum M - weights W``; without W, ``momentum M``.

    Args:
        m: momentum ``(..., m, n)``.
        w: weights ``(..., m, n)``, or None.
        factors: of its rows.

    Returns:
        Matrices ``(..., m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import scaled_rows, tangent_factors
        >>> m = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> print(scaled_rows(m, None, tangent_factors(m, None, "none")))
        [[0.6 0.8]
         [0.  0. ]]
    """
    return m * factors.momentum if w is None else m * factors.momentum - w * factors.weights


def tangent_factors(
    m: jax.Array, w: jax.Array | None, mode: str = "relaxed", radius: jax.typing.ArrayLike = 1.0, axis: int = -1
) -> RowFactors:
    """What makes rows of ``Psi`` of the momentum and the weights, from one pass over both.

    ``<m, m>``, ``<m, w>`` and ``<w, w>`` give the length of x: the square of its part across w is
    ``<m, m> - <m, w>^2 / <w, w>``, and its part along w is that of m times a known number. That difference cancels
    where m lies along w. On a CPU rows for which it does are measured again with care, as are those whose squares
    overflow or vanish; an accelerator has no time for a branch. There a part across w of less than
    ``4 sqrt(eps) ||m||`` counts as rounding noise, and the length of a row of which a share q is left is off by
    ``eps / q^2``.

    Args:
        m: momentum ``(..., m, n)``.
        w: weights ``(..., m, n)``; None for the mode ``none``.
        mode: see ``tangent_rows``.
        radius: see ``tangent_rows``.
        axis: along which a row runs.

    Returns:
        The factors of every row.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.rows import tangent_factors
        >>> factors = tangent_factors(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 0.5]]), "strict")
        >>> print(factors.momentum.round(4), factors.weights.round(4))
        [[0.3333]] [[2.6667]]
    """

    sums = functools.partial(jnp.sum, axis=axis, keepdims=True)

    def straight(m: jax.Array, w: jax.Array | None) -> RowFactors:
        scale, mm = _in_range([sums((m * scale) ** 2) for scale in _SCALES])
        mw, ww = (None, None) if w is None else (sums(m * w), sums(w * w))
        return _one_pass(mm, mw, ww, scale, mode, radius)[0]

    def checked(m: jax.Array, w: jax.Array | None) -> RowFactors:
        mm, (mw, ww) = sums(m * m), (None, None) if w is None else (sums(m * w), sums(w * w))
        quick, xx = _one_pass(mm, mw, ww, jnp.ones_like(mm), mode, radius)
        outside = lambda square: (square < _LEAST_SQUARE) | (square > _LARGEST_SQUARE)  # noqa: E731
        doubtful = outside(mm) | ~(xx >= _LEAST_SHARE * mm)
        if ww is not None:
            doubtful |= outside(ww)
        doubtful &= jnp.any(m != 0, axis=axis, keepdims=True) & ~jnp.isnan(mm)  # zero is zero, NaN has no better way

        @jax.named_scope("rare")
        def careful() -> RowFactors:
            found = _careful_factors(m, w, mode, radius, axis)
            return RowFactors(*(jnp.where(doubtful, good, fast) for good, fast in zip(found, quick, strict=True)))

        return jax.lax.cond(jnp.any(doubtful), careful, lambda: quick)

    return by_platform(m, w, cpu=checked, default=straight)


# Sums of squares outside of these are not trusted: they, or squares in them, may have overflowed or lost digits.
_LEAST_SQUARE, _LARGEST_SQUARE = 1e-24, 1e30
# Less than this share of <m, m> is a difference of numbers that much larger: off by 16 eps and more.
_LEAST_SHARE = 1 / 16


# Powers of two at which squares are taken: one of the two is in range for every row of entries from 1e-30 to 1e26.
_SCALES = (2.0**-30, 2.0**40)


def _in_range(squares: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Of sums of squares at ``_SCALES``, for every row: the scale to use, and the sum at it."""
    (below, above), (down, up) = squares, _SCALES
    small = below < _LEAST_SQUARE
    return jnp.where(small, up, down).astype(below.dtype), jnp.where(small, above, below)


def _one_pass(
    mm: jax.Array,
    mw: jax.Array | None,
    ww: jax.Array | None,
    scale: jax.Array,
    mode: str,
    radius: jax.typing.ArrayLike,
) -> tuple[RowFactors, jax.Array]:
    """Factors from sums alone, and the squared lengths of x; ``mm`` and x are those of ``scale m``."""
    if mw is None or ww is None:
        along, xx = jnp.zeros_like(mm), mm
    else:
        mw = scale * mw
        radial = jnp.where(ww == 0, 0, mw / jnp.where(ww == 0, 1, ww))  # the part along w is radial * w
        kept = _kept(ww, mode, radius)
        along = mw / jnp.square(jnp.asarray(radius, mm.dtype)) if mode == "relaxed" else (1 - kept) * radial
        across, inside = mm - radial * mw, (kept * radial) * (kept * mw)
        eps = jnp.finfo(mm.dtype).eps
        xx = jnp.where(across < 16 * eps * mm, 0, across) + inside
        xx = jnp.where((mm == 0) | (xx <= (8 * eps) ** 2 * mm), 0, xx)
    size = jnp.where(xx == 0, 0, 1 / jnp.sqrt(jnp.where(xx == 0, 1, xx)))
    return RowFactors(scale * size, along * size), xx


def _careful_factors(
    m: jax.Array, w: jax.Array | None, mode: str, radius: jax.typing.ArrayLike, axis: int
) -> RowFactors:
    """``tangent_factors`` of rows that are first divided by their largest entry; noise counts as zero."""
    peak = _peak(m, axis)
    scaled = m / peak
    if w is None:
        shrink, along, x = jnp.ones_like(peak), jnp.zeros_like(peak), scaled
    else:
        x, shrink, along = _tangent(scaled, w, mode, radius, axis)
    norm = jnp.sqrt(jnp.sum(x**2, axis=axis, keepdims=True))
    size = jnp.where(norm == 0, 0, 1 / jnp.where(norm == 0, 1, norm))
    most = jnp.finfo(m.dtype).max / 4  # finite for the smallest numbers, too: such rows come out shorter
    wanted = size * shrink
    share = jnp.minimum(1, most * peak / jnp.where(wanted == 0, 1, wanted))
    return RowFactors(jnp.minimum(wanted / peak, most), jnp.clip(share * size * along, -most, most))


def _kept(ww: jax.Array, mode: str, radius: jax.typing.ArrayLike) -> jax.Array | float:
    """What is kept of the radial part, given the squared lengths of the weights' rows."""
    if mode == "strict":
        return 0.0
    relaxed = 1 - ww / jnp.square(jnp.asarray(radius, ww.dtype))
    return jnp.maximum(relaxed, 0) if mode == "bounded" else relaxed


def _tangent(
    m: jax.Array, w: jax.Array, mode: str, radius: jax.typing.ArrayLike, axis: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """``tangent_rows`` of rows whose largest entry is one: ``x = shrink m - along w``, shrink and along.

    ``x / shrink`` is what was asked for; squares of x do not overflow.
    """
    if mode == "relaxed":
        length, amount = jnp.ones((), m.dtype), 1 / jnp.square(jnp.asarray(radius, m.dtype))
    else:
        norm = row_norms(w, axis)
        length, amount = jnp.where(norm == 0, 1, norm), jnp.ones((), m.dtype)
        if mode == "bounded":
            amount = jnp.minimum(1, jnp.square(norm / radius)).astype(m.dtype)
    radial = amount * jnp.sum(m * (w / length), axis=axis, keepdims=True)
    # X is as long as m, or as the radial part times w: about the square of that part where it is the longer one.
    inverse = 1 / jnp.maximum(1, jnp.abs(radial))
    shrink, along = inverse * inverse, radial * inverse * inverse / length
    x = shrink * m - along * w
    noise = 8 * jnp.finfo(m.dtype).eps * shrink
    gone = jnp.sum(x**2, axis=axis, keepdims=True) <= noise**2 * jnp.sum(m**2, axis=axis, keepdims=True)
    return jnp.where(gone, 0, x), shrink, along
