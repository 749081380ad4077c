# SPDX-License-Identifier: Apache-2.0
"""Low-rank orthogonalisation by one power iteration a step, with error feedback: Dion.

``orthogonalize_low_rank`` finds the leading directions of the momentum, starting from those of the step before;
``discount_low_rank`` takes a share of what was found out of the momentum. The two belong together, and
``error_feedback`` calls them in turn and holds the momentum, in the parameter's own layout. What is not found stays in
the momentum and grows until it is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.orthonormal import orthonormal_rows
from normpre_optax.linalg.precision import product, working_dtype
from normpre_optax.linalg.rows import row_norms, unit_rows
from normpre_optax.transforms.checks import float_dtype, static_int
from normpre_optax.transforms.draws import draws_of_stacks, identities
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, in_context


class LowRankState(NamedTuple):
    """Thin factors, as rows and in at least float32.

    Attributes:
        factors: a tree like the updates', ``(..., r, columns)`` for every leaf: where the next step starts, ``Q^T`` but
            for the rows' lengths. Between the two stages ``(..., r, columns + rows)``: ``R^T`` beside ``P^T``, so that
            P needs no memory from step to step.
    """

    factors: optax.Updates


def orthogonalize_low_rank(
    rank: int = 768, seed: int = 0, compute_dtype: jax.typing.DTypeLike | None = None
) -> OrientedTransformation:
    """The leading ``rank`` directions of every matrix at size one: ``P Q^T``, by one power iteration a step.

    ``P = qr(M Q)``, ``R = M^T P``, ``Q = R`` with columns of length one. A direction in which the matrix has nothing
    but rounding noise, ``||R_j|| <= 8 eps max_k ||R_k||``, gives nothing and keeps its column of ``Q``.

    Args:
        rank: number of directions; no more than the shorter side.
        seed: of the Gaussian draws with which ``Q`` starts; they depend on it, the parameter's path and the matrix's
            place in its stack, and on nothing else.
        compute_dtype: dtype of the operands of products with it, sums in float32; None: the device's usual product.

    Returns:
        A transformation on matrices in the last two axes, for use in ``error_feedback``: ``discount_low_rank`` brings
        its state, of ``rank`` rows a matrix, back into shape.

    Raises:
        TypeError: if ``rank`` or ``seed`` is traced.
        ValueError: if one is out of range.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.low_rank import orthogonalize_low_rank
        >>> tx = orthogonalize_low_rank(rank=1)
        >>> m = jnp.outer(jnp.array([0.0, 5.0]), jnp.array([0.6, -0.8]))
        >>> print(jnp.abs(tx.update(m, tx.init(m))[0]).round(3))
        [[0.  0. ]
         [0.6 0.8]]

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

        def iterate(m: jax.Array, start: jax.Array) -> tuple[jax.Array, jax.Array]:
            lifted = m.astype(start.dtype)
            q = unit_rows(start)
            p = orthonormal_rows(product(q, lifted if transposed else lifted.mT, compute_dtype))
            r = product(p, lifted.mT if transposed else lifted, compute_dtype)
            length = row_norms(r)
            gone = length <= 8 * jnp.finfo(r.dtype).eps * jnp.max(length, axis=-2, keepdims=True)
            p, r = jnp.where(gone, 0, p), jnp.where(gone, q, r)
            new = _outer(p, unit_rows(r), transposed, compute_dtype)
            return new.astype(m.dtype), jnp.concatenate([r, p], axis=-1)

        found = jax.tree.map(iterate, updates, state.factors)
        new, factors = (jax.tree.map(lambda _, parts, k=k: parts[k], updates, found) for k in range(2))
        return new, LowRankState(factors)

    return OrientedTransformation(init, update)


def discount_low_rank(
    share: jax.typing.ArrayLike, compute_dtype: jax.typing.DTypeLike | None = None
) -> OrientedTransformation:
    """Take ``share`` of the last low-rank approximation out of every matrix: ``M - share P R^T``.

    Args:
        share: how much of it, between 0 and 1.
        compute_dtype: dtype of the product's operands, sums in float32; None: the device's usual product.

    Returns:
        A transformation that reads the state of ``orthogonalize_low_rank`` and has no ``init`` of its own.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.low_rank import discount_low_rank, orthogonalize_low_rank
        >>> tx, m = orthogonalize_low_rank(rank=1), jnp.array([[4.0, 0.0], [0.0, 0.0]])
        >>> _, state = tx.update(m, tx.init(m))
        >>> print(discount_low_rank(0.25).update(m, state)[0])
        [[3. 0.]
         [0. 0.]]
    """

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del params, extra_args

        def columns(m: jax.Array) -> int:
            return m.shape[-2 if matrix_layout.transposed else -1]

        def discount(m: jax.Array, factors: jax.Array) -> jax.Array:
            r, p = factors[..., : columns(m)], factors[..., columns(m) :]
            return (m - in_context(share) * _outer(p, r, matrix_layout.transposed, compute_dtype)).astype(m.dtype)

        left = jax.tree.map(discount, updates, state.factors)
        return left, LowRankState(jax.tree.map(lambda m, f: f[..., : columns(m)], updates, state.factors))

    def init(params):
        raise ValueError("discount_low_rank reads the state of orthogonalize_low_rank: use that one's init")

    return OrientedTransformation(init, update)


def _outer(p: jax.Array, r: jax.Array, transposed: bool, compute_dtype: jax.typing.DTypeLike | None) -> jax.Array:
    """``P R^T``, or its transpose, of factors that are kept as rows."""
    return product(r.mT, p, compute_dtype) if transposed else product(p.mT, r, compute_dtype)


class ErrorFeedbackState(NamedTuple):
    """Momentum, like the parameters, and the state of the approximation."""

    trace: optax.Updates
    inner_state: optax.OptState


def error_feedback(
    approximate: optax.GradientTransformation,
    discount: optax.GradientTransformation,
    accumulator_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """``M = M + G``; the update is ``approximate(M)``; then ``M = discount(M)``, with the state of ``approximate``.

    Args:
        approximate: what is made of the momentum.
        discount: what is left of it for the next step; sees the new state of ``approximate`` and returns the state to
            keep.
        accumulator_dtype: dtype in which the momentum is stored; None means the parameters'.

    Returns:
        A transformation on the parameters' own layout.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax.transforms.low_rank import error_feedback
        >>> tx = error_feedback(optax.identity(), optax.scale(0.5))  # both without state
        >>> g = jnp.array([1.0])
        >>> _, state = tx.update(g, tx.init(g))
        >>> print(tx.update(g, state)[0])
        [1.5]
    """
    float_dtype("mu_dtype", accumulator_dtype)
    approximate, discount = map(optax.with_extra_args_support, (approximate, discount))

    def init(params):
        zero = lambda p: jnp.zeros_like(p, accumulator_dtype)  # noqa: E731
        return ErrorFeedbackState(jax.tree.map(zero, params), approximate.init(params))

    def update(updates, state, params=None, **extra_args):
        momentum = jax.tree.map(lambda g, m: g + m.astype(g.dtype), updates, state.trace)
        new, inner_state = approximate.update(momentum, state.inner_state, params, **extra_args)
        left, inner_state = discount.update(momentum, inner_state, params, **extra_args)
        trace = jax.tree.map(lambda m, old: m.astype(old.dtype), left, state.trace)
        return new, ErrorFeedbackState(trace, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
