# SPDX-License-Identifier: Apache-2.0
"""Symmetric eigenvalues and singular values of stacks of matrices, one matrix at a time on CPU.

XLA's CPU runtime runs independent operations of a program side by side on its thread pool, and a *batched* LAPACK
call spreads its batch over the same pool and waits for it: with as many such calls as threads, everybody waits and
nobody works (``docs/cpu_hang.md``). A call on one matrix needs no pool, so on CPU a stack is walked matrix by
matrix, under ``jax.vmap`` too. Elsewhere the batched routine is used.
"""

import functools

import jax
import jax.numpy as jnp

from normpre_optax.platforms import by_platform


def _walk(f, x: jax.Array):
    """``f`` of each matrix of a stack ``(..., m, n)``, in turn."""
    one = jax.custom_batching.sequential_vmap(f)
    for _ in x.shape[:-2]:
        one = functools.partial(jax.lax.map, one)
    return one(x)


def eigh(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors of symmetric matrices, largest first.

    Args:
        a: symmetric matrices ``(..., s, s)``.

    Returns:
        Eigenvalues ``(..., s)`` in descending order, eigenvectors ``(..., s, s)`` in columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.lapack import eigh
        >>> print(eigh(jnp.diag(jnp.array([1.0, 3.0, 2.0])))[0])
        [3. 2. 1.]
    """
    values, vectors = by_platform(
        a, cpu=lambda x: _walk(lambda y: tuple(jnp.linalg.eigh(y)), x), default=lambda x: tuple(jnp.linalg.eigh(x))
    )
    return values[..., ::-1], vectors[..., ::-1]


def svd(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Thin singular value decomposition ``x = U diag(s) V^T``.

    Args:
        x: matrices ``(..., m, n)``.

    Returns:
        ``U`` of shape ``(..., m, k)``, ``s`` of shape ``(..., k)`` descending, ``V^T`` of shape ``(..., k, n)``, with
        ``k = min(m, n)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.lapack import svd
        >>> print(svd(jnp.array([[0.0, 2.0], [1.0, 0.0]]))[1])
        [2. 1.]
    """

    def thin(y: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        u, s, vt = jnp.linalg.svd(y, full_matrices=False)
        return u, s, vt

    return by_platform(x, cpu=lambda y: _walk(thin, y), default=thin)


@jax.jit
def singular_values(x: jax.Array) -> jax.Array:
    """Singular values alone, largest first.

    Args:
        x: matrices ``(..., m, n)``.

    Returns:
        ``(..., min(m, n))``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.linalg.lapack import singular_values
        >>> print(singular_values(jnp.array([[0.0, 2.0], [1.0, 0.0]])))
        [2. 1.]
    """

    def values(y: jax.Array) -> jax.Array:
        return jnp.linalg.svd(y, compute_uv=False)

    return by_platform(x, cpu=lambda y: _walk(values, y), default=values)
