# SPDX-License-Identifier: Apache-2.0
"""Projection and normalisation of rows as one stage: what ``tangent`` and ``normalize`` have in common.

One pass over momentum and weights gives two numbers a row, a second one applies them. Between the two, whoever wants
rows on some steps and columns on others can choose (``wrappers.alternate_orientation``).
"""

from collections.abc import Callable

import jax

from normpre_optax.linalg.precision import working_dtype
from normpre_optax.linalg.rows import RowFactors, scaled_rows, tangent_factors
from normpre_optax.transforms.oriented import RowScaling, in_context


def row_scaling(
    mode: str, radius: jax.typing.ArrayLike = 1.0, length: Callable[[int, int], float] = lambda rows, columns: 1.0
) -> RowScaling:
    """Rows of ``tangent_rows(m, w, mode, radius)`` brought to a length; zero rows stay zero.

    Args:
        mode: see ``project_to_tangent``.
        radius: see ``project_to_tangent``.
        length: ``(rows, columns) -> length`` of the rows afterwards.

    Returns:
        The stage.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.row_scaling import row_scaling
        >>> x = jnp.array([[3.0, 4.0], [0.0, 0.0]])
        >>> print(row_scaling("none", length=lambda rows, columns: 10.0).update(x, ())[0])
        [[6. 8.]
         [0. 0.]]
    """
    project = mode != "none"

    def lifted(x: jax.Array) -> jax.Array:
        return x.astype(working_dtype(x.dtype))

    def weights(updates, params):
        return weights_of(params) if project else jax.tree.map(lambda _: None, updates)

    def factors(updates, params, transposed: bool):
        def of_matrix(m: jax.Array, w: jax.Array | None) -> RowFactors:
            rows, columns = m.shape[-2:][:: -1 if transposed else 1]
            w = None if w is None else lifted(w)
            found = tangent_factors(lifted(m), w, mode, in_context(radius), axis=-2 if transposed else -1)
            size = length(rows, columns)
            return RowFactors(*(x * size for x in found))

        with jax.named_scope("rows"):
            return jax.tree.map(of_matrix, updates, weights(updates, params))

    def apply(updates, params, found):
        def of_matrix(m: jax.Array, w: jax.Array | None, factors: RowFactors) -> jax.Array:
            return scaled_rows(lifted(m), None if w is None else lifted(w), factors).astype(m.dtype)

        with jax.named_scope("rows"):
            return jax.tree.map(of_matrix, updates, weights(updates, params), found)

    return RowScaling(factors, apply)


def weights_of(params):
    """``params``, or an error that says where they belong."""
    if params is None:
        raise ValueError(
            "the tangent projection needs the weights: call update(grads, state, params). In an Equinox loop that "
            "is optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array)); a loop that never passes "
            "params (brax, for one) needs that third argument added, or tangent='none'."
        )
    return params
