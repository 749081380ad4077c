# SPDX-License-Identifier: Apache-2.0
"""Momentum against the weights: the relaxed tangent projection and its relatives."""

import functools
from collections.abc import Callable

import jax
import optax

from normpre_optax.linalg.precision import in_working_dtype
from normpre_optax.linalg.rows import TANGENT_MODES, tangent_rows
from normpre_optax.transforms.checks import number
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, RowScaling, in_context
from normpre_optax.transforms.row_scaling import row_scaling, weights_of


def project_to_tangent(mode: str = "relaxed", radius: jax.typing.ArrayLike = 1.0) -> OrientedTransformation:
    """Damp the part of every row of the update along the same row of the weights.

    Per row, with the radius c (1 in the paper):

    - ``relaxed``: ``x = m - <m, w> w / c^2``, which keeps the radial part times ``1 - ||w||^2 / c^2``. For a row
      longer than c that factor is negative: the published step shrinks it where the loss wants it longer, and lengthens
      it where the loss wants it shorter;
    - ``bounded``: keeps it times ``max(0, 1 - ||w||^2 / c^2)``;
    - ``strict``: removes it;
    - ``none``: keeps it whole.

    Args:
        mode: one of the above.
        radius: c, in units of the weights.

    Returns:
        A stateless transformation. It reads the last two axes of every leaf as (rows, columns) and needs ``params``.

    Raises:
        ValueError: if ``mode`` is unknown, ``radius`` is not positive, or ``update`` is called without ``params``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import project_to_tangent
        >>> tx = project_to_tangent()
        >>> w, m = jnp.array([[0.0, 0.5]]), jnp.array([[1.0, 1.0]])
        >>> print(tx.update(m, tx.init(w), w)[0])
        [[1.   0.75]]

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum"; ``bounded`` and the radius are this library's.
    """
    _check(mode, radius)

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del extra_args
        if mode == "none":
            return updates, state
        axis = -2 if matrix_layout.transposed else -1
        of_row = functools.partial(tangent_rows, mode=mode, radius=in_context(radius), axis=axis)
        return jax.tree.map(in_working_dtype(of_row), updates, weights_of(params)), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)


def normalize_tangent_rows(
    mode: str = "relaxed",
    radius: jax.typing.ArrayLike = 1.0,
    length: Callable[[int, int], float] = lambda rows, columns: 1.0,
) -> RowScaling:
    """``chain(project_to_tangent(mode, radius), normalize_rows())`` in two passes over memory: sums, then the result.

    Args:
        mode: see ``project_to_tangent``.
        radius: see ``project_to_tangent``.
        length: ``(rows, columns) -> length`` of the rows afterwards.

    Returns:
        A stateless transformation. It reads the last two axes of every leaf as (rows, columns) and needs ``params``.

    Raises:
        ValueError: as ``project_to_tangent``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.tangent import normalize_tangent_rows
        >>> tx = normalize_tangent_rows()
        >>> w, m = jnp.array([[0.0, 0.5]]), jnp.array([[1.0, 1.0]])
        >>> print(tx.update(m, tx.init(w), w)[0])
        [[0.8 0.6]]
    """
    _check(mode, radius)
    return row_scaling(mode, radius, length)


def _check(mode: str, radius) -> None:
    if mode not in TANGENT_MODES:
        raise ValueError(f"tangent={mode!r} is not one of {TANGENT_MODES}")
    number("tangent_radius", radius)
    if not (isinstance(radius, jax.Array) or radius > 0):
        raise ValueError(f"tangent_radius must be positive, got {radius}")
