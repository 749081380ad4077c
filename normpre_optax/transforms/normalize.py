# SPDX-License-Identifier: Apache-2.0
"""Marginal normalisation: every row to length one."""

import jax
import optax

from normpre_optax.linalg.precision import in_working_dtype
from normpre_optax.linalg.rows import unit_rows


def normalize_rows() -> optax.GradientTransformationExtraArgs:
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

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(in_working_dtype(unit_rows), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
