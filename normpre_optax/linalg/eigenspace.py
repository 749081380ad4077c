# SPDX-License-Identifier: Apache-2.0
"""The leading modes of ``Psi Psi^T``: exactly, or by the randomized sketch of Algorithm 2.

Both work on the shorter side of ``Psi`` (its rows when square): ``Psi Psi^T`` and ``Psi^T Psi`` share their nonzero
eigenvalues, and clipping the same modes from the left or from the right is the same update.

Thin factors are kept as rows, ``(l, s)`` and ``(l, n)``, so that ``Psi`` is only ever the right operand of a product:
there it may lie either way, ``psi`` or ``stored.mT``, and nothing large is transposed.
"""

from typing import NamedTuple

import jax

from normpre_optax.linalg.lapack import eigh
from normpre_optax.linalg.orthonormal import orthonormal_rows
from normpre_optax.linalg.precision import product


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
    values, vectors = eigh(product(psi, psi.mT))
    k = min(rank, psi.shape[-2])
    vectors = vectors[..., :k].mT
    return Modes(values[..., :k], vectors, product(vectors, psi))


def leading_modes_sketch(
    psi: jax.Array,
    omega: jax.Array,
    rank: int,
    power_iterations: int = 1,
    compute_dtype: jax.typing.DTypeLike | None = None,
    short_is_sharded: bool = False,
) -> Modes:
    """The ``rank`` leading modes as seen from a random subspace: Algorithm 2 of the paper.

    ``Y = Psi Omega``, ``p`` times ``Y = Psi Psi^T Y``, ``Q = qr(Y)``, then the eigenpairs of
    ``(Q^T Psi)(Q^T Psi)^T`` (Rayleigh-Ritz), lifted by ``Q``. The basis is made orthonormal before every power step
    too: the same span, without losing its smaller directions to rounding.

    Args:
        psi: wide matrices ``(..., s, n)``, ``s <= n``.
        omega: Gaussian draws ``(..., l, n)``, ``l = min(s, rank + oversampling)``: the paper's Omega^T.
        rank: number of modes; at most ``l`` are returned.
        power_iterations: ``p``.
        compute_dtype: dtype of the operands of the products with ``psi``; None: that of ``psi``.
        short_is_sharded: the rows of ``psi`` are spread over devices and its columns are not: bases between power
            steps are made orthonormal on the long side, which every device holds whole.

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
    y = product(omega, psi.mT, compute_dtype)  # Y^T of the paper, as all factors here are transposed
    for _ in range(power_iterations):
        if short_is_sharded:
            back = orthonormal_rows(product(y, psi, compute_dtype))
        else:
            back = product(orthonormal_rows(y), psi, compute_dtype)
        y = product(back, psi.mT, compute_dtype)
    q = orthonormal_rows(y)
    seen = product(q, psi, compute_dtype)
    values, z = eigh(product(seen, seen.mT))
    z = z[..., : min(rank, omega.shape[-2])].mT
    return Modes(values[..., : z.shape[-2]], product(z, q), product(z, seen))
