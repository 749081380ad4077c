# SPDX-License-Identifier: Apache-2.0
"""Low-rank orthogonalisation by one power iteration a step, with error feedback: Dion.

``orthogonalize_low_rank`` finds the leading directions of the momentum, starting from those of the step before, and
says what is left of it; ``error_feedback`` holds that, in the parameter's own layout. What is not found stays in the
momentum and grows until it is.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from normpre_optax.linalg.orthonormal import orthonormal_rows
from normpre_optax.linalg.precision import product, working_dtype
from normpre_optax.linalg.rows import row_norms, unit_rows
from normpre_optax.transforms.checks import float_dtype, static_int
from normpre_optax.transforms.draws import draws_of_stacks, identities
from normpre_optax.transforms.oriented import UPRIGHT, MatrixLayout, OrientedTransformation, in_context


class LowRankState(NamedTuple):
    """Thin factors, as rows and in at least float32.

    Attributes:
        factors: a tree like the updates', ``(..., r, columns)`` for every leaf: where the next step starts, ``Q^T`` but
            for the rows' lengths.
    """

    factors: optax.Updates


def orthogonalize_low_rank(
    rank: int = 768,
    seed: int = 0,
    compute_dtype: jax.typing.DTypeLike | None = None,
    *,
    share: jax.typing.ArrayLike = 0.05,
) -> OrientedTransformation:
    """The leading ``rank`` directions of every matrix at size one, ``P Q^T``, and the matrix less a share of them.

    ``P = qr(M Q)``, ``R = M^T P``, ``Q = R`` with columns of length one; what is left is ``M - share P R^T``. A
    direction in which the matrix has nothing but rounding noise, ``||R_j|| <= 8 eps max_k ||R_k||``, gives nothing and
    keeps its column of ``Q``.

    Args:
        rank: number of directions; no more than the shorter side.
        seed: of the Gaussian draws with which ``Q`` starts; they depend on it, the parameter's path and the matrix's
            place in its stack, and on nothing else.
        compute_dtype: dtype of the operands of products with it, sums in float32; None: the device's usual product.
        share: how much of what was found is taken out, between 0 and 1: one minus the momentum.

    Returns:
        A transformation on matrices in the last two axes, for use in ``error_feedback``: in place of every update it
        gives two, the directions and what is left.

    Raises:
        TypeError: if ``rank`` or ``seed`` is traced.
        ValueError: if one is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.low_rank import orthogonalize_low_rank
        >>> tx = orthogonalize_low_rank(rank=1, share=0.25)
        >>> m = jnp.array([[4.0, 0.0], [0.0, 0.0]])
        >>> (found, left), _ = tx.update(m, tx.init(m))
        >>> print(jnp.abs(found), left)
        [[1. 0.]
         [0. 0.]] [[3. 0.]
         [0. 0.]]

    References:
        Ahn, Xu, Abreu et al., Dion, arXiv 2504.05295 (github.com/microsoft/dion).
    """
    rank = static_int("rank", rank, least=1)
    seed = static_int("seed", seed, least=0, below=2**32)
    float_dtype("compute_dtype", compute_dtype)

    def init(params):
        leaves, treedef = jax.tree.flatten(params)
        shapes = [(min(rank, *w.shape[-2:]), w.shape[-1]) for w in leaves]
        drawn = draws_of_stacks(seed, 0, jax.tree.leaves(identities(params)), shapes)
        starts = [x.astype(working_dtype(w.dtype)) for x, w in zip(drawn, leaves, strict=True)]
        return LowRankState(treedef.unflatten(starts))

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del params, extra_args
        transposed = matrix_layout.transposed

        def iterate(m: jax.Array, start: jax.Array, thin: _Thin) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
            lifted = m.astype(start.dtype)
            q = unit_rows(thin.columns(start))
            p = thin.rows(product(q, lifted if transposed else lifted.mT, compute_dtype))
            p = thin.rows(orthonormal_rows(p))
            r = thin.columns(product(p, lifted.mT if transposed else lifted, compute_dtype))
            length = row_norms(r)
            gone = length <= 8 * jnp.finfo(r.dtype).eps * jnp.max(length, axis=-2, keepdims=True)
            p, r = jnp.where(gone, 0, p), jnp.where(gone, q, r)
            found = _outer(p, unit_rows(r), transposed, compute_dtype).astype(m.dtype)
            left = m - in_context(share) * _outer(p, r, transposed, compute_dtype)
            return (found, left.astype(m.dtype)), r

        leaves, treedef = jax.tree.flatten(updates)
        done = list(map(iterate, leaves, jax.tree.leaves(state.factors), _thin_beside(matrix_layout, len(leaves))))
        new, factors = zip(*done, strict=True) if done else ((), ())
        return treedef.unflatten(new), LowRankState(treedef.unflatten(factors))

    return OrientedTransformation(init, update)


class _Thin(NamedTuple):
    """Puts thin factors ``(..., r, rows)`` and ``(..., r, columns)`` where the matrix's rows and columns lie."""

    rows: Callable[[jax.Array], jax.Array] = lambda x: x
    columns: Callable[[jax.Array], jax.Array] = lambda x: x


def _thin_beside(layout: MatrixLayout, count: int) -> list[_Thin]:
    """For each of so many stacks. Left to itself, XLA's partitioner gathers what could stay."""
    mesh = layout.mesh
    if mesh is None:
        return [_Thin()] * count

    def lying(batch: Any, side: Any) -> Callable[[jax.Array], jax.Array]:
        sharding = NamedSharding(mesh, PartitionSpec(batch, None, side))
        return lambda x: jax.lax.with_sharding_constraint(x, sharding)

    sides = [(batch, *(sides[::-1] if layout.transposed else sides)) for batch, *sides in layout.specs]
    return [_Thin(lying(batch, rows), lying(batch, columns)) for batch, rows, columns in sides]


def _outer(p: jax.Array, r: jax.Array, transposed: bool, compute_dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """``P R^T``, or its transpose, of factors that are kept as rows."""
    return product(r.mT, p, compute_dtype) if transposed else product(p.mT, r, compute_dtype)


class ErrorFeedbackState(NamedTuple):
    """Momentum, like the parameters, and the state of the approximation."""

    trace: optax.Updates
    inner_state: optax.OptState


def error_feedback(
    approximate: optax.GradientTransformation, accumulator_dtype: jax.typing.DTypeLike | None = None
) -> optax.GradientTransformationExtraArgs:
    """``M = M + G``; the update, and the M of the next step, are the two that ``approximate`` makes of it.

    Args:
        approximate: gives a pair in place of every update: what is made of the momentum, and what is left of it.
        accumulator_dtype: dtype in which the momentum is stored; None means the parameters'.

    Returns:
        A transformation on the parameters' own layout.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.low_rank import error_feedback
        >>> halves = optax.stateless(lambda updates, params: jax.tree.map(lambda m: (m, m / 2), updates))
        >>> tx, g = error_feedback(halves), jnp.array([1.0])
        >>> _, state = tx.update(g, tx.init(g))
        >>> print(tx.update(g, state)[0])
        [1.5]
    """
    float_dtype("mu_dtype", accumulator_dtype)
    approximate = optax.with_extra_args_support(approximate)

    def init(params):
        zero = lambda p: jnp.zeros_like(p, accumulator_dtype)  # noqa: E731
        return ErrorFeedbackState(jax.tree.map(zero, params), approximate.init(params))

    def update(updates, state, params=None, **extra_args):
        momentum = jax.tree.map(lambda g, m: g + m.astype(g.dtype), updates, state.trace)
        pairs, inner_state = approximate.update(momentum, state.inner_state, params, **extra_args)
        new = jax.tree.map(lambda _, pair: pair[0], momentum, pairs)
        trace = jax.tree.map(lambda _, pair, old: pair[1].astype(old.dtype), momentum, pairs, state.trace)
        return new, ErrorFeedbackState(trace, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
