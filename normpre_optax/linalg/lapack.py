# SPDX-License-Identifier: Apache-2.0
"""Symmetric eigenvalues and singular values of stacks of matrices, one matrix at a time on CPU.

XLA's CPU runtime runs independent operations of a program side by side on its thread pool, and a *batched* LAPACK
call spreads its batch over the same pool and waits for it: with as many such calls as threads, everybody waits and
nobody works (``docs/cpu_hang.md``). A call on one matrix needs no pool, so on CPU a stack is walked matrix by
matrix, under ``jax.vmap`` too. Elsewhere the batched routine is used.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from normpre_optax.platforms import by_platform


def _factorise(f: Callable, x: jax.Array) -> Any:
    """``f`` of a stack ``(..., m, n)``; on CPU of each of its matrices, in turn."""

    def walk(x: jax.Array) -> Any:
        one = jax.custom_batching.sequential_vmap(f)
        for _ in x.shape[:-2]:
            one = functools.partial(jax.lax.map, one)
        return one(x)

    return by_platform(x, cpu=walk, default=f)


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
    values, vectors = _factorise(lambda x: tuple(jnp.linalg.eigh(x)), a)
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
    return _factorise(lambda y: tuple(jnp.linalg.svd(y, full_matrices=False)), x)


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
    return _factorise(lambda y: jnp.linalg.svd(y, compute_uv=False), x)
