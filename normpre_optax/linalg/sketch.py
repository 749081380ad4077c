# SPDX-License-Identifier: Apache-2.0
"""Clip the leading singular values of matrices.

They are found by a randomized sketch (Algorithm 2) or exactly.

With ``Q`` an orthonormal basis of a subspace of rows of ``Psi^T`` and ``B = Q Psi``,
clipping adds ``Q^T F B`` to ``Psi``: ``F`` is a small matrix, computed from the Gram
matrices of ``Q`` and ``B``. The small problems of all matrices are solved in one
batched call. Thin factors are stored as rows ``(l, s)`` and ``(l, n)``.
"""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from normpre_optax.linalg.batches import one_at_a_time, solve_together
from normpre_optax.linalg.newton_schulz import clipping_factor
from normpre_optax.linalg.products import (
    Operands,
    at_least_float32,
    exact_product,
    inverse_root,
    product,
)


class Clipping(NamedTuple):
    """How many leading singular values are clipped, and to which level.

    The ``rank`` largest are clipped to ``level``, with ``level^2 = max(least, share
    (total - their squares))``.

    All are arrays ``(..., 1, 1)``; ``total`` is the sum of the squares of all singular
    values, ``||Psi||_F^2``.
    """

    total: jax.Array
    least: jax.Array
    share: jax.Array
    rank: jax.Array


class Clipped(NamedTuple):
    """The clipped matrix is ``psi + left^T right``.

    ``squares`` is its sum of squares, ``(..., 1, 1)``.
    """

    left: jax.Array
    right: jax.Array
    squares: jax.Array


def to_threshold(total: jax.Array, rank: int, threshold: ArrayLike = 1.0) -> Clipping:
    """Return the clipping to a threshold, for matrices with this sum of squares."""
    one = jnp.ones_like(total)
    return Clipping(
        total=total,
        least=one * jnp.square(threshold),
        share=jnp.zeros_like(total),
        rank=one * rank,
    )


def clip_by_sketch(
    psis: Sequence[jax.Array],
    omegas: Sequence[jax.Array],
    clippings: Sequence[Clipping],
    power_iterations: int = 1,
    products: bool = False,
    compute_dtype: Operands = None,
    solve: Callable[..., list[Any]] | None = None,
) -> list[Clipped]:
    """Find what clips the leading singular values of wide matrices: Algorithm 2.

    ``Y = Psi Omega``; ``p`` times ``Y = Psi Psi^T Y``, with the basis orthonormalized
    in between (the same span); then the eigenpairs of the sketched interaction matrix
    ``(Q Psi)(Q Psi)^T``.

    Args:
        psis: wide matrices ``(..., s, n)``, ``s <= n``.
        omegas: Gaussian draws ``(..., l, n)``: the paper's ``Omega^T``.
        clippings: how many singular values of each are clipped, and to which level.
        power_iterations: ``p``.
        products: clip all ``l`` singular values of the sketch by matrix products alone,
            without an eigensolver; ``l`` takes the place of ``rank``.
        compute_dtype: dtype of the operands of the products with ``Psi``.
        solve: replaces ``solve_together`` on a mesh, to distribute the eigenproblems.
            Factorizations are replicated (``axes=()``), because their results would
            have to be communicated.

    Returns:
        What clips each of them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax.linalg.sketch import (
        ...     clip_by_sketch,
        ...     sum_of_squares,
        ...     to_threshold,
        ... )
        >>> psi = jnp.diag(jnp.array([5.0, 3.0, 1.0]))
        >>> omega = jax.random.normal(jax.random.key(0), (2, 3))
        >>> clipping = to_threshold(sum_of_squares(psi), rank=1)
        >>> ((left, right, _),) = clip_by_sketch([psi], [omega], [clipping], 4)
        >>> print(jnp.diag(psi + left.T @ right).round(2))
        [1. 3. 1.]

    References:
        Halko, Martinsson and Tropp, arXiv 0909.4061.
    """
    times = functools.partial(product, dtype=compute_dtype)
    factor = solve_together
    if solve is None:
        solve = solve_together
    else:
        factor = functools.partial(solve, axes=())

    def times_psi(ys: list[jax.Array]) -> list[jax.Array]:
        return [times(y, psi) for y, psi in zip(ys, psis, strict=True)]

    def times_psi_transposed(ys: Sequence[jax.Array]) -> list[jax.Array]:
        return [times(y, psi.mT) for y, psi in zip(ys, psis, strict=True)]

    def orthonormalized(ys: list[jax.Array]) -> list[jax.Array]:
        grams = [(exact_product(y, y.mT),) for y in ys]
        inverses = factor(_inverse_cholesky, grams)
        return [exact_product(l, y) for l, y in zip(inverses, ys, strict=True)]

    ys = times_psi_transposed(omegas)
    for _ in range(power_iterations):
        # The span is the same without it, but not in floating point: all rows would
        # tend to the leading singular vector.
        back = times_psi(orthonormalized(ys))
        ys = times_psi_transposed(orthonormalized(back))
    qs = orthonormalized(ys)
    bs = times_psi(qs)
    problems = []
    for q, b, clipping in zip(qs, bs, clippings, strict=True):
        # Rounding leaves Q only nearly orthonormal, so its Gram matrix is used, too.
        grams = exact_product(q, q.mT), exact_product(b, b.mT)
        problems.append((*grams, *clipping))
    solver = _factor_by_products if products else _factor_by_eigenvectors
    factors = solve(solver, problems)
    found = []
    for q, b, (f, squares) in zip(qs, bs, factors, strict=True):
        found.append(Clipped(q, exact_product(f, b), squares))
    return found


def clip_exactly(psi: jax.Array, clipping: Clipping) -> Clipped:
    """The same by an eigendecomposition of ``Psi Psi^T``, for one wide matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.sketch import (
        ...     clip_exactly,
        ...     sum_of_squares,
        ...     to_threshold,
        ... )
        >>> psi = jnp.diag(jnp.array([3.0, 2.0, 0.5]))
        >>> clipping = to_threshold(sum_of_squares(psi), rank=1)
        >>> left, right, squares = clip_exactly(psi, clipping)
        >>> print(jnp.diag(psi + left.T @ right).round(3), squares.round(2))
        [1.  2.  0.5] [[5.25]]
    """
    # All directions are in the basis: Q is the identity, and B is Psi.
    identity = jnp.eye(len(psi), dtype=psi.dtype)
    factor, squares = _factor_by_eigenvectors(
        identity, exact_product(psi, psi.mT), *clipping
    )
    return Clipped(identity, exact_product(factor, psi), squares)


def _factor_by_eigenvectors(
    gram: jax.Array,
    interaction: jax.Array,
    total: jax.Array,
    least: jax.Array,
    share: jax.Array,
    rank: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return ``F``, and the sum of squares of the clipped matrix.

    ``gram`` and ``interaction`` are the Gram matrices of Q and B; ``total``, ``least``,
    ``share`` and ``rank`` are those of ``Clipping``.
    """
    inverse, interaction = _orthonormal(gram, interaction)
    values, vectors = one_at_a_time(_eigh)(interaction)
    # eigh sorts in ascending order.
    index = jnp.arange(len(values), dtype=rank.dtype)
    # Rank and level are (1, 1); their [0] broadcasts along the eigenvalues.
    among = index >= len(values) - rank[0]
    remaining = total - jnp.sum(jnp.where(among, values, 0))
    level = jnp.maximum(least, share * remaining)
    clipped = among & (values > level[0])
    # Eigenvalues and the level are squares of singular values. Those that are not
    # clipped may be zero or negative, by rounding.
    divisors = jnp.where(clipped, values, 1)
    gains = jnp.where(clipped, jnp.sqrt(level[0] / divisors), 1)
    # NaN is above no level, and would be a gain of one.
    gains = jnp.where(jnp.isnan(values), values, gains)
    z = exact_product(vectors.T, inverse)
    factor = exact_product(z.T * (gains - 1)[None], z)
    removed = jnp.sum(jnp.where(clipped, values - level[0], 0))
    return factor, _squares(total, removed, level)


def _eigh(x: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(jnp.linalg.eigh(x))


def _factor_by_products(
    gram: jax.Array,
    interaction: jax.Array,
    total: jax.Array,
    least: jax.Array,
    share: jax.Array,
    rank: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """The same for all modes of the subspace, by products alone."""
    inverse, interaction = _orthonormal(gram, interaction)
    remaining = total - jnp.trace(interaction)
    level = jnp.maximum(least, share * remaining)
    # Zero stays zero, NaN stays NaN.
    divisor = jnp.where(level == 0, 1, level)
    change = clipping_factor(interaction / divisor)
    moved = exact_product(change, interaction)
    # tr(A) - tr((I + C) A (I + C)) for the interaction matrix A and the change C.
    removed = -2 * jnp.trace(moved) - jnp.sum(moved * change)
    factor = exact_product(inverse.T, exact_product(change, inverse))
    return factor, _squares(total, removed, level)


def _squares(total: jax.Array, removed: jax.Array, level: jax.Array) -> jax.Array:
    """Return what is left of the squares."""
    # Rounding may not make it less than one clipped mode has.
    return jnp.maximum(total - removed, jnp.minimum(total, level))


def _orthonormal(
    gram: jax.Array, interaction: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return what orthonormalizes a basis, and the interaction matrix in the new one.

    Rows much shorter than one are rounding error of dependent rows: their interactions
    are noise and are left out.
    """
    short = jnp.diagonal(gram) < 1e-4
    kept = jnp.where(short[:, None] | short[None], 0, gram)
    inverse = _inverse_cholesky(kept)
    half = exact_product(inverse, interaction)
    return inverse, exact_product(half, inverse.T)


def _inverse_cholesky(g: jax.Array) -> jax.Array:
    """Return ``L^-1`` of ``g = L L^T``, finite for positive semidefinite matrices.

    ``g`` is scaled to a unit diagonal and its other entries are reduced by ``2 l eps``,
    more than rounding can make the matrix indefinite. Directions with less than that
    left come out too short; zero rows stay zero.
    """
    scale = inverse_root(jnp.diagonal(g))
    identity = jnp.eye(len(g), dtype=g.dtype)
    eps = jnp.finfo(g.dtype).eps
    unit = scale[:, None] * g * scale[None] / (1 + 2 * len(g) * eps)
    # Exactly one, where rounding leaves nearly one.
    diagonal = jnp.where(jnp.isnan(g), g, 1)
    unit = jnp.where(identity == 1, diagonal, unit)
    return one_at_a_time(_inverse_factor)(unit) * scale[None]


def _inverse_factor(x: jax.Array) -> jax.Array:
    # Only the lower triangle is read, so the matrix need not be symmetrized first.
    lower = jax.lax.linalg.cholesky(x, symmetrize_input=False)
    identity = jnp.eye(len(x), dtype=x.dtype)
    return jax.lax.linalg.triangular_solve(lower, identity, left_side=True, lower=True)


def draws(
    seed: int,
    step: ArrayLike,
    ids: ArrayLike,
    shape: tuple[int, int],
) -> jax.Array:
    """Draw ``Omega^T`` for every matrix.

    It depends on seed, step, parameter and batch index, and on nothing else.

    Args:
        seed: of the optimizer.
        step: number of updates before this one.
        ids: ``matrix_ids``, uint32 ``(..., 2)``.
        shape: ``(l, n)``.

    Returns:
        float32 ``(..., l, n)``. The same on every host and for every sharding.

    Example:
        >>> from normpre_optax.linalg.sketch import draws, matrix_ids
        >>> draws(0, 0, matrix_ids("up/kernel", (5,)), (2, 6)).shape
        (5, 2, 6)
    """
    # Threefry is the one generator whose draws do not depend on the sharding.
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), step)

    def draw(own: jax.Array) -> jax.Array:
        of_parameter = jax.random.fold_in(key, own[0])
        of_matrix = jax.random.fold_in(of_parameter, own[1])
        return jax.random.normal(of_matrix, shape, jnp.float32)

    return jnp.vectorize(draw, signature="(i)->(l,n)")(ids)


def matrix_ids(path: str, batch: tuple[int, ...]) -> np.ndarray:
    """Return uint32 ``(*batch, 2)``, which identifies the matrices of a parameter.

    That is crc32 of the parameter's path, and the index of each of its matrices.
    """
    index = np.arange(np.prod(batch, dtype=int), dtype=np.uint32).reshape(batch)
    # Python's own hash of a string differs between processes.
    parameter = np.full_like(index, zlib.crc32(path.encode()))
    return np.stack([parameter, index], axis=-1)


def sum_of_squares(x: jax.Array) -> jax.Array:
    """Return the squared Frobenius norm of every matrix, ``(..., 1, 1)``."""
    return jnp.sum(jnp.square(at_least_float32(x)), axis=(-2, -1), keepdims=True)
