# SPDX-License-Identifier: Apache-2.0
"""Marginal normalisation: every row to length one."""

import functools

import jax
import optax

from normpre_optax.linalg.precision import in_working_dtype
from normpre_optax.linalg.rows import unit_rows
from normpre_optax.transforms.oriented import OrientedTransformation


def normalize_rows() -> OrientedTransformation:
    """Divide every row by its length: ``Psi = Diag(diag(X X^T))^(-1/2) X``.

    Returns:
        A stateless transformation that reads the last two axes of every leaf as (rows, columns). Zero rows stay zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normalize_rows
        >>> tx = normalize_rows()
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> print(tx.update(x, tx.init(x))[0])
        [[0.6 0.8]
         [0.  0. ]]

    References:
        Normalize-Then-Precondition, "Diagonal-Gram Normalization".
    """

    def update(updates, state, params=None, *, transposed: bool = False, **extra_args):
        del params, extra_args
        normalize = functools.partial(unit_rows, axis=-2 if transposed else -1)
        return jax.tree.map(in_working_dtype(normalize), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)
