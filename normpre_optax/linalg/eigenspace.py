# SPDX-License-Identifier: Apache-2.0
"""The leading modes of ``Psi Psi^T``: exactly, or by the randomized sketch of Algorithm 2.

Both work on the shorter side of ``Psi`` (its rows when square): ``Psi Psi^T`` and ``Psi^T Psi`` share their nonzero
eigenvalues, and clipping the same modes from the left or from the right is the same update.

Thin factors are kept as rows, ``(l, s)`` and ``(l, n)``, so that ``Psi`` is only ever the right operand of a product:
there it may lie either way, ``psi`` or ``stored.mT``, and nothing large is transposed.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.linalg.lapack import eigh
from normpre_optax.linalg.newton_schulz import clipping_factor, inverse_root
from normpre_optax.linalg.orthonormal import inverse_cholesky
from normpre_optax.linalg.precision import exact_product, product


class Modes(NamedTuple):
    """Leading modes of a wide matrix ``Psi`` ``(..., s, n)``, largest first.

    Attributes:
        values: eigenvalues of ``Psi Psi^T``, squared singular values of ``Psi``, ``(..., k)``.
        vectors: their eigenvectors in rows, ``(..., k, s)``.
        coordinates: ``vectors Psi``, ``(..., k, n)``.
    """

    values: jax.Array
    vectors: jax.Array
    coordinates: jax.Array


def leading_modes_exact(psi: jax.Array, rank: int) -> Modes:
    """The ``rank`` leading modes by a full symmetric eigendecomposition.

    Args:
        psi: wide matrices ``(..., s, n)``, ``s <= n``.
        rank: number of modes; at most ``s`` are returned.

    Returns:
        ``Modes`` with ``k = min(rank, s)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import leading_modes_exact
        >>> print(leading_modes_exact(jnp.diag(jnp.array([1.0, 3.0, 2.0])), 2).values)
        [9. 4.]
    """
    values, vectors = eigh(exact_product(psi, psi.mT))
    k = min(rank, psi.shape[-2])
    vectors = vectors[..., :k].mT
    return Modes(values[..., :k], vectors, exact_product(vectors, psi))


def leading_modes_sketch(
    psi: jax.Array,
    omega: jax.Array,
    rank: int,
    power_iterations: int = 1,
    compute_dtype: jax.typing.DTypeLike | None = None,
) -> Modes:
    """The ``rank`` leading modes as seen from a random subspace: Algorithm 2 of the paper.

    ``Y = Psi Omega``, ``p`` times ``Y = Psi Psi^T Y``, ``Q = qr(Y)``, then the eigenpairs of
    ``(Q^T Psi)(Q^T Psi)^T`` (Rayleigh-Ritz), lifted by ``Q``. The basis is made nearly orthonormal before every power
    step too: the same span, without losing its smaller directions to rounding. ``Q`` need not be exactly orthonormal
    either: its Gram matrix enters the eigenproblem.

    Args:
        psi: wide matrices ``(..., s, n)``, ``s <= n``.
        omega: Gaussian draws ``(..., l, n)``, ``l = min(s, rank + oversampling)``: the paper's Omega^T.
        rank: number of modes; at most ``l`` are returned.
        power_iterations: ``p``.
        compute_dtype: dtype of the operands of the products with ``psi``; None: the device's usual product.

    Returns:
        ``Modes`` with ``k = min(rank, l)``.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import leading_modes_sketch
        >>> psi = jnp.diag(jnp.array([5.0, 3.0, 1.0, 0.1]))
        >>> omega = jax.random.normal(jax.random.key(0), (3, 4))
        >>> print(leading_modes_sketch(psi, omega, rank=2, power_iterations=4).values.round(2))
        [25.  9.]

    References:
        Halko, Martinsson and Tropp, arXiv 0909.4061.
    """
    squares = jnp.sum(psi**2, axis=(-2, -1), keepdims=True)
    return leading_modes_sketches([psi], [omega], [squares], [rank], power_iterations, compute_dtype)[0]


def leading_modes_sketches(
    psis: Sequence[jax.Array],
    omegas: Sequence[jax.Array],
    squares: Sequence[jax.Array],
    ranks: Sequence[int],
    power_iterations: int = 1,
    compute_dtype: jax.typing.DTypeLike | None = None,
    short_is_sharded: Sequence[bool] | None = None,
    solve: Callable | None = None,
) -> list[Modes]:
    """``leading_modes_sketch`` of stacks of several shapes, their small problems solved together.

    What is ``l x l`` is solved together for all of one ``l``: one factorisation and one eigensolver serve the list.

    Args:
        psis: wide matrices ``(..., s, n)``, ``s <= n``.
        omegas: draws ``(..., l, n)`` for each.
        squares: sums of squares of ``psis``, ``(..., 1, 1)``.
        ranks: number of modes of each; see ``leading_modes_sketch``.
        power_iterations: see ``leading_modes_sketch``.
        compute_dtype: see ``leading_modes_sketch``.
        short_is_sharded: for matrices on a mesh: whether the rows are spread over devices and the columns are not.
            Bases between power steps are then made orthonormal on the long side, which every device holds whole.
        solve: what to call instead of ``together`` for the last problems; the factorisations before are then made one
            by one, as their results would have to travel, too.

    Returns:
        ``Modes`` of each.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import leading_modes_sketches
        >>> psis = [jnp.diag(jnp.array([5.0, 3.0, 1.0])), jnp.eye(3, 6)]
        >>> omegas = [jax.random.normal(jax.random.key(0), (2, n)) for n in (3, 6)]
        >>> found = leading_modes_sketches(psis, omegas, [jnp.array([[35.0]]), jnp.array([[3.0]])], [1, 1], 4)
        >>> print([modes.values.round(2).item() for modes in found])
        [25.0, 1.0]
    """
    factor, last = _solvers(solve)
    q, seen, grams = _subspaces(psis, omegas, squares, power_iterations, compute_dtype, short_is_sharded, factor)
    pairs = last(lambda pair: _rayleigh_ritz(*pair), grams)
    return [
        Modes(values[..., :k], exact_product(z[..., :k, :], a), exact_product(z[..., :k, :], b))
        for (values, z), a, b, k in zip(pairs, q, seen, ranks, strict=True)
    ]


class Clip(NamedTuple):
    """What clipping adds to wide matrices ``Psi`` ``(..., s, n)``: ``vectors^T coordinates``.

    Attributes:
        vectors: ``(..., l, s)``.
        coordinates: ``(..., l, n)``.
        removed: how much smaller the sum of squares becomes, ``(..., 1, 1)``.
    """

    vectors: jax.Array
    coordinates: jax.Array
    removed: jax.Array


def clip_sketches(
    psis: Sequence[jax.Array],
    omegas: Sequence[jax.Array],
    squares: Sequence[jax.Array],
    levels: Sequence[jax.Array],
    power_iterations: int = 1,
    compute_dtype: jax.typing.DTypeLike | None = None,
    short_is_sharded: Sequence[bool] | None = None,
    solve: Callable | None = None,
) -> list[Clip]:
    """All modes that a sketch sees, clipped without an eigensolver: ``Psi - Q^T B + clip(Q^T B)``, ``B = Q Psi``.

    As ``leading_modes_sketches``, but for what is done with the subspace: the factor that clips B is a function of its
    Gram matrix, and made of products alone (``clipping_factor``).

    Args:
        psis: see ``leading_modes_sketches``.
        omegas: likewise.
        squares: likewise.
        levels: squares of the thresholds, ``(..., 1, 1)``.
        power_iterations: see ``leading_modes_sketch``.
        compute_dtype: likewise.
        short_is_sharded: see ``leading_modes_sketches``.
        solve: likewise.

    Returns:
        ``Clip`` of each.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax.linalg.eigenspace import clip_sketches
        >>> psi, one = jnp.diag(jnp.array([5.0, 3.0, 1.0])), jnp.ones((1, 1))
        >>> (clip,) = clip_sketches([psi], [jax.random.normal(jax.random.key(0), (2, 3))], [35 * one], [one], 4)
        >>> print(jnp.diag(psi + clip.vectors.T @ clip.coordinates).round(2), clip.removed.round(2))
        [1. 1. 1.] [[32.]]
    """
    factor, last = _solvers(solve)
    q, seen, grams = _subspaces(psis, omegas, squares, power_iterations, compute_dtype, short_is_sharded, factor)
    problems = [(*pair, level) for pair, level in zip(grams, levels, strict=True)]
    found = last(lambda problem: _clipped(*problem), problems)
    return [
        Clip(exact_product(change, a), exact_product(inverse, b), removed)
        for (change, inverse, removed), a, b in zip(found, q, seen, strict=True)
    ]


def _clipped(gram: jax.Array, interaction: jax.Array, level: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The factor that clips, of a basis made orthonormal, what makes it so, and the squares that it removes."""
    inverse, interaction = _orthonormal(gram, interaction)
    change = clipping_factor(interaction / level)
    moved = exact_product(change, interaction)
    doubled = 2 * jnp.trace(moved, axis1=-2, axis2=-1)[..., None, None]
    removed = -doubled - jnp.sum(moved * change, axis=(-2, -1), keepdims=True)  # The factor is symmetric.
    return exact_product(change, inverse), inverse, removed


def _subspaces(psis, omegas, squares, power_iterations, compute_dtype, short_is_sharded, factor):
    """Nearly orthonormal bases Q in rows, ``B = Q Psi``, and both Gram matrices."""
    on_long_side = short_is_sharded or [False] * len(psis)

    def thin(factors: list[jax.Array], wide: Sequence[jax.Array]) -> list[jax.Array]:
        return [product(f, x, compute_dtype) for f, x in zip(factors, wide, strict=True)]

    def basis(ys: list[jax.Array], chosen: Sequence[bool]) -> list[jax.Array]:
        grams = [exact_product(y, y.mT) if here else None for y, here in zip(ys, chosen, strict=True)]
        inverses = factor(lambda g: inverse_cholesky(g, spare=True), grams)
        return [y if i is None else exact_product(i, y) for y, i in zip(ys, inverses, strict=True)]

    def shorter(factors: Sequence[jax.Array]) -> list[jax.Array]:
        # As if the matrices had Frobenius norm one, so that no power overflows; the last product sees psi itself.
        return [f * inverse_root(square) for f, square in zip(factors, squares, strict=True)]

    turned = [psi.mT for psi in psis]
    y = shorter(thin(list(omegas), turned))  # Y^T of the paper, as all factors here are transposed
    for _ in range(power_iterations):
        back = thin(shorter(basis(y, [not long for long in on_long_side])), psis)
        y = thin(shorter(basis(back, on_long_side)), turned)
    q = basis(y, [True] * len(y))
    seen = thin(q, psis)
    grams = [(exact_product(a, a.mT), exact_product(b, b.mT)) for a, b in zip(q, seen, strict=True)]
    return q, seen, grams


def _rayleigh_ritz(gram: jax.Array, interaction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """``lambda``, largest first, and ``z`` (rows) of ``interaction z = lambda gram z``, with ``z gram z^T = 1``."""
    inverse, interaction = _orthonormal(gram, interaction)
    values, z = eigh(interaction)
    return values, exact_product(z.mT, inverse)


def _orthonormal(gram: jax.Array, interaction: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What makes a basis of that Gram matrix orthonormal, and the interaction in the new one."""
    inverse = inverse_cholesky(gram)
    return inverse, exact_product(exact_product(inverse, interaction), inverse.mT)


def _solvers(solve: Callable | None) -> tuple[Callable, Callable]:
    """How the factorisations between the products are made, and how the last problems are solved."""
    factor, last = (together, together) if solve is None else (_one_by_one, solve)
    return jax.named_scope("small")(factor), jax.named_scope("small")(last)


def _one_by_one(f: Callable, problems: Sequence[Any]) -> list[Any]:
    return [None if problem is None else f(problem) for problem in problems]


def together(f: Callable, problems: Sequence[Any]) -> list[Any]:
    """``f`` of trees of arrays ``(..., l, l)``, called once for all of one size; of None, None."""
    sizes: dict[Any, list[int]] = {}
    for i, problem in enumerate(problems):
        if problem is not None:
            sizes.setdefault(tuple(x.shape[-2:] for x in jax.tree.leaves(problem)), []).append(i)
    results: list[Any] = [None] * len(problems)
    for members in sizes.values():
        if len(members) == 1:
            results[members[0]] = f(problems[members[0]])
            continue
        leads = [jax.tree.leaves(problems[i])[0].shape[:-2] for i in members]
        flat = [jax.tree.map(lambda x: x.reshape(-1, *x.shape[-2:]), problems[i]) for i in members]
        solved = f(jax.tree.map(lambda *xs: jnp.concatenate(xs), *flat))
        start = 0
        for i, lead, part in zip(members, leads, flat, strict=True):
            end = start + len(jax.tree.leaves(part)[0])
            results[i] = jax.tree.map(lambda x, s=start, e=end, lead=lead: x[s:e].reshape(*lead, *x.shape[1:]), solved)
            start = end
    return results
