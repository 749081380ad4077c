# SPDX-License-Identifier: Apache-2.0
"""The metric of rows and columns in which a spectral stage computes."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import check_numbers
from normpre_optax.linalg.platforms import by_platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.parameters.dims import MatrixDims, blocks_of, split_axes
from normpre_optax.parameters.rules import Assignment
from normpre_optax.parameters.tree import is_box
from normpre_optax.sharding.placement import replicated, spec_of
from normpre_optax.stages.blocks import Block
from normpre_optax.stages.mapping import by_shape, map_matrices
from normpre_optax.stages.stage import (
    assigned,
    check_state_axes,
    check_transformation,
    init_stage,
)


class MetricState(NamedTuple):
    """Averages of mean squares of rows and columns, and the state of the spectral
    stage.

    ``rows`` and ``columns`` are trees like the parameters. The arrays of ``rows`` have
    size one along the inputs, those of ``columns`` along the outputs (one entry per
    output block).
    """

    rows: optax.Updates
    columns: optax.Updates
    spectral: optax.OptState


def with_metric(
    spectral: optax.GradientTransformation,
    strength: jax.typing.ArrayLike = 0.5,
    clip: float = 2.0,
    decay: jax.typing.ArrayLike = 0.95,
    *,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Scale rows and columns around a spectral stage, by their gradients.

    With averages r and c of the mean squares of the rows and columns of earlier
    gradients, ``a = clip(sqrt(r / mean(r)), 1 / k, k)^(-p)``, and b the same of c, the
    result is ``D = diag(a) T(diag(a) U diag(b)) diag(b)``. Then ``r = d r + (1 - d)
    mean_in(G^2)`` and ``c = d c + (1 - d) mean_out(G^2)``. With T = msign, D is the
    direction of steepest descent in the weighted spectral norm ``||diag(a)^-1 D
    diag(b)^-1||_op``.

    Args:
        spectral: T, such as ``precondition_globally()``, or any optax transformation of
            matrices.
        strength: p. With 0 the metric has no effect; 1/2 is the square root of full
            normalization.
        clip: k, largest ratio of a row's root mean square to that of the matrix that is
            taken into account.
        decay: d, of the averages.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage whose state has one float32 number per row and per column. In a
        ``direction``, G are the gradients; outside, the updates that the stage is
        passed.

    Raises:
        TypeError: if ``spectral`` is not an optax transformation.
        ValueError: if a number is out of range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import with_metric
        >>> tx, g = with_metric(optax.identity()), jnp.diag(jnp.array([3.0, 1.0]))
        >>> _, state = tx.update(g, tx.init(g))
        >>> print(
        ...     tx.update(g, state)[0].round(3)
        ... )  # 3 / 1.8, and 1 / 0.25 because of the clip
        [[1.667 0.   ]
         [0.    4.   ]]

    References:
        The one-sided normalization of Normalize-Then-Precondition is strength 1, before
        the stage only.
    """
    check_numbers(strength=strength, clip=clip, decay=decay)
    check_transformation("spectral", spectral)
    inner = optax.with_extra_args_support(spectral)

    def scaled(
        u: jax.Array, w: Any, dims: MatrixDims, rows: jax.Array, columns: jax.Array
    ) -> jax.Array:
        mean = jnp.mean(
            rows, split_axes(u.ndim, dims)[1], keepdims=True
        )  # that of the columns is the same
        for squares in (rows, columns):
            relative = jnp.sqrt(
                jnp.where(mean == 0, 1, squares / jnp.where(mean == 0, 1, mean))
            )
            u = u * jnp.clip(relative, 1 / clip, clip) ** -jnp.asarray(
                strength, u.dtype
            )
        return u

    def init(params, *, matrix_dims=matrix_dims):
        found = assigned(params, None, matrix_dims)
        rows, columns = mean_squares(optax.tree.zeros_like(params), found)
        return MetricState(rows, columns, init_stage(inner, params, found))

    def update(
        updates,
        state,
        params=None,
        *,
        matrix_dims=matrix_dims,
        gradients=None,
        **extra_args,
    ):
        def run(updates, state, params, gradients):
            dims = assigned(updates, params, matrix_dims)
            check_state_axes(state.rows, updates, dims)

            def within_metric(u):
                return map_matrices(scaled, u, params, dims, *state[:2], stacked=True)

            u = within_metric(updates)
            t, new = inner.update(
                u,
                state.spectral,
                params,
                matrix_dims=dims,
                gradients=gradients,
                **extra_args,
            )
            rows, columns = average(state[:2], mean_squares(gradients, dims), decay)
            return within_metric(t), MetricState(rows, columns, new)

        args = updates, state, params, updates if gradients is None else gradients
        return by_platform(run, *args)(*args)

    return optax.GradientTransformationExtraArgs(init, update)


def average(old: Any, new: Any, decay: jax.typing.ArrayLike) -> Any:
    """Return ``decay old + (1 - decay) new`` of two trees."""
    return jax.tree.map(lambda o, n: replicated(decay * o + (1 - decay) * n), old, new)


def without_boxes(tree: Any) -> Any:
    """Return the tree with each box replaced by its array, or by ``MaskedNode`` if it
    has none.
    """

    def array(node):
        return (
            next(iter(jax.tree.leaves(node)), optax.MaskedNode())
            if is_box(node)
            else node
        )

    return jax.tree.map(array, tree, is_leaf=is_box)


def mean_squares(gradients: Any, found: Assignment) -> tuple[Any, Any]:
    """Return trees of the mean squares of the rows of every parameter, and of the
    columns of each output block.
    """
    leaves, treedef = jax.tree.flatten(without_boxes(gradients))
    each: Any = zip(leaves, found.values(), strict=True)
    new = by_shape(
        _mean_squares,
        [Block(s.path, s.dims, spec_of(g, s.sharding), g, None, []) for g, s in each],
    )
    return treedef.unflatten([rows for rows, _ in new]), treedef.unflatten(
        [columns for _, columns in new]
    )


def _mean_squares(
    g: jax.Array, w: Any, dims: MatrixDims
) -> tuple[jax.Array, jax.Array]:
    _, outputs, inputs = split_axes(g.ndim, dims)
    squares, places = jnp.square(at_least_float32(g)), blocks_of(g.shape, dims)
    rows, axis = jnp.mean(squares, inputs, keepdims=True), outputs[0]
    if len(places) == 1:
        return rows, jnp.mean(squares, outputs, keepdims=True)
    index = jnp.arange(g.shape[axis]).reshape(
        [-1 if i == axis else 1 for i in range(g.ndim)]
    )
    inside = [
        (index >= at.start) & (index < at.stop) for at, *_ in places
    ]  # slices would gather a sharded axis
    return rows, jnp.concatenate(
        [jnp.mean(squares, outputs, keepdims=True, where=x) for x in inside], axis
    )
