# SPDX-License-Identifier: Apache-2.0
"""Second moments of what the spectral stage gives: rows that are large on average are made smaller.

Moments of single entries are optax's (``optax.scale_by_rms``): they need to know nothing of matrices.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.newton_schulz import unit_frobenius
from normpre_optax.linalg.precision import working_dtype
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, in_context


class RowMomentState(NamedTuple):
    """A tree like the updates', ``(..., rows, 1)`` for every leaf: averages of the rows' mean squares."""

    moment: optax.Updates


def scale_by_row_moment(decay: jax.typing.ArrayLike = 0.95, eps: float = 1e-10) -> OrientedTransformation:
    """Divide every row by the root of an average of its mean square, and keep the size of the matrix.

    ``v = decay v + (1 - decay) mean(O_i^2)`` for every row, ``O'_i = O_i / (sqrt(v_i) + eps)``, and then
    ``O' ||O||_F / ||O'||_F``, which makes a correction of the bias at the start needless.

    Args:
        decay: of the average.
        eps: added to the root. Meant for matrices with singular values near one, as a spectral stage gives them.

    Returns:
        A transformation that reads the last two axes of every leaf as (rows, columns), with one float32 number of state
        a row. It depends on the orientation: under ``alternate_orientation`` it is refused. Zero rows stay zero.

    Raises:
        ValueError: if ``decay`` is not in [0, 1) or ``eps`` not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import scale_by_row_moment
        >>> tx = scale_by_row_moment()
        >>> o = jnp.array([[3.0, 3.0], [1.0, 1.0]])
        >>> print(tx.update(o, tx.init(o))[0].round(4))
        [[2.2361 2.2361]
         [2.2361 2.2361]]

    References:
        Li et al., NorMuon, arXiv 2510.05491 (github.com/zichongli5/NorMuon).
    """
    if isinstance(decay, int | float) and not 0 <= decay < 1:
        raise ValueError(f"decay must lie in [0, 1), got {decay}")
    if not eps > 0:
        raise ValueError(f"eps must be positive, got {eps}")

    def init(params):
        zero = lambda x: jnp.zeros((*x.shape[:-1], 1), working_dtype(x.dtype))  # noqa: E731
        return RowMomentState(jax.tree.map(zero, params))

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del params, extra_args

        def of_rows(column: jax.Array) -> jax.Array:
            return column.mT if matrix_layout.transposed else column

        def average(o: jax.Array, moment: jax.Array) -> jax.Array:
            square = jnp.mean(o.astype(moment.dtype) ** 2, axis=-2 if matrix_layout.transposed else -1, keepdims=True)
            kept = in_context(decay)
            return jnp.asarray(kept * moment + (1 - kept) * of_rows(square), moment.dtype)

        def scale(o: jax.Array, moment: jax.Array) -> jax.Array:
            lifted = o.astype(moment.dtype)
            size = jnp.sqrt(jnp.sum(lifted**2, axis=(-2, -1), keepdims=True))
            return (size * unit_frobenius(lifted / (jnp.sqrt(of_rows(moment)) + eps))).astype(o.dtype)

        moment = jax.tree.map(average, updates, state.moment)
        return jax.tree.map(scale, updates, moment), RowMomentState(moment)

    return OrientedTransformation(init, update)
