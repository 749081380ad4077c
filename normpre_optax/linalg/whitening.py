# SPDX-License-Identifier: Apache-2.0
"""Whitening: the inverse square root of a Gram matrix by coupled Newton-Schulz iterations, times the matrix."""

import jax
import jax.numpy as jnp

from normpre_optax.linalg.newton_schulz import symmetric_product, unit_frobenius
from normpre_optax.linalg.precision import product, working_dtype


def whiten(x: jax.Array, steps: int = 6, compute_dtype: jax.typing.DTypeLike | None = None) -> jax.Array:
    """``Z X``, where ``Z`` tends to ``(X X^T / ||X X^T||_F)^(-1/2)``.

    ``Y = X X^T / ||X X^T||_F`` and ``Z = I``; then at every step, from the old values of both,
    ``Y <- Y (3 I - Z Y) / 2`` and ``Z <- (3 I - Z Y) Z / 2``. A singular value ``s`` of ``X`` is thus brought towards
    ``||X X^T||_F^(1/2)``; by one step it grows at most by 1.5. ``Z X = X Z'`` with the same ``Z'`` of ``X^T X``, so the
    shorter side is used.

    Args:
        x: matrices ``(..., m, n)``.
        steps: number of iterations.
        compute_dtype: dtype of the products' operands, with sums in float32; None: the dtype of ``x``.

    Returns:
        Matrices ``(..., m, n)``, as large as ``x`` times a number between 1 and ``1.5^steps``. Zero stays zero;
        rounding noise in directions that ``x`` lacks grows by ``1.5^steps``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.whitening import whiten
        >>> x = whiten(jnp.diag(jnp.array([1.0, 2.0])), steps=12)
        >>> print((x / x[0, 0]).round(4))
        [[1. 0.]
         [0. 1.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148; Higham, Functions of Matrices, 2008, section 6.7.
    """
    tall = x.shape[-2] > x.shape[-1]
    unit = unit_frobenius(x)
    gram = symmetric_product(unit.mT, unit, compute_dtype) if tall else symmetric_product(unit, unit.mT, compute_dtype)
    identity = jnp.broadcast_to(jnp.eye(gram.shape[-1], dtype=gram.dtype), gram.shape)

    # Y and Z are polynomials of one symmetric matrix: they commute, and so every product here is symmetric.
    def step(_: int, pair: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        y, z = pair
        turn = 1.5 * identity - 0.5 * symmetric_product(z, y, compute_dtype)
        return symmetric_product(y, turn, compute_dtype), symmetric_product(turn, z, compute_dtype)

    _, z = jax.lax.fori_loop(0, steps, step, (unit_frobenius(gram), identity))
    z = z.astype(working_dtype(x.dtype))
    return (product(x, z, compute_dtype) if tall else product(z, x, compute_dtype)).astype(x.dtype)
