# SPDX-License-Identifier: Apache-2.0
"""Marginal normalisation: rows to length one, to mean zero and unit variance, rows and columns at once."""

import functools
from collections.abc import Callable

import jax
import optax

from normpre_optax.linalg.precision import in_working_dtype
from normpre_optax.linalg.rows import equalize, unit_rows
from normpre_optax.linalg.rows import standardize_rows as standardized
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation
from normpre_optax.transforms.row_scaling import row_scaling


def normalize_rows(eps: float = 0.0) -> OrientedTransformation:
    """Divide every row by its length: ``Psi = Diag(diag(X X^T))^(-1/2) X``.

    Args:
        eps: added to the squared length: for rows that are known to have a length near one, unless they are noise.
            With 0 the result does not depend on the rows' scale.

    Returns:
        A stateless transformation that reads the last two axes of every leaf as (rows, columns). Zero rows stay zero.

    Raises:
        ValueError: if ``eps`` is negative.

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
    if not eps >= 0:
        raise ValueError(f"eps must not be negative, got {eps}")
    return _on_rows(functools.partial(unit_rows, eps=eps)) if eps else row_scaling("none")


def standardize_rows() -> OrientedTransformation:
    """Bring every row to mean 0 and standard deviation 1: ``(X_i - mean(X_i)) / std(X_i)``.

    Returns:
        A stateless transformation that reads the last two axes of every leaf as (rows, columns). Rows of equal entries
        become zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import standardize_rows
        >>> tx = standardize_rows()
        >>> x = jnp.array([[1.0, 5.0], [2.0, 2.0]])
        >>> print(tx.update(x, tx.init(x))[0].round(4))
        [[-1.  1.]
         [ 0.  0.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148 ("GradNorm").
    """
    return _on_rows(standardized)


def equalize_rows_and_columns() -> OrientedTransformation:
    """Divide every entry by the lengths of its row and of its column, both taken of the matrix as it comes.

    Not rows first and columns of the result then: ``x_ij / (r_i c_j)``, times the largest ``r`` so that the result
    does not depend on the scale of the matrix. A spectral stage forgets that factor.

    Returns:
        A stateless transformation on matrices in the last two axes. Zero rows and columns stay zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import equalize_rows_and_columns
        >>> tx = equalize_rows_and_columns()
        >>> x = jnp.diag(jnp.array([10.0, 1.0]))
        >>> print(tx.update(x, tx.init(x))[0])
        [[ 1.  0.]
         [ 0. 10.]]

    References:
        MuonEq, mode RC (github.com/MaeChd/muon-eq).
    """
    return _on_rows(lambda x, axis: equalize(x))


def _on_rows(f: Callable[..., jax.Array]) -> OrientedTransformation:
    """``f(matrices, axis=...)`` on every leaf."""

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del params, extra_args
        of_row = functools.partial(f, axis=-2 if matrix_layout.transposed else -1)
        return jax.tree.map(in_working_dtype(of_row), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)
