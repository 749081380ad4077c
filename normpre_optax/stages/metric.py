# SPDX-License-Identifier: Apache-2.0
"""The metric of rows and columns in which a spectral stage computes."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from normpre_optax.checks import check_numbers
from normpre_optax.linalg.platforms import by_platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.parameters.dims import MatrixDims, blocks_of, split_axes
from normpre_optax.parameters.rules import Assignment, assigned
from normpre_optax.parameters.tree import is_box
from normpre_optax.sharding.placement import replicated, spec_of
from normpre_optax.stages.blocks import Block
from normpre_optax.stages.mapping import by_shape, map_matrices
from normpre_optax.stages.stage import (
    check_state_axes,
    check_transformation,
    init_stage,
)
from normpre_optax.trees import DimsTree, PyTree


class MetricState(NamedTuple):
    """Averages of mean squares, and the state of the spectral stage.

    ``rows`` and ``columns`` are trees like the parameters. The arrays of ``rows`` have
    size one along the inputs, those of ``columns`` along the outputs (one entry per
    output block).
    """

    rows: optax.Updates
    columns: optax.Updates
    spectral: optax.OptState


def with_metric(
    spectral: optax.GradientTransformation,
    strength: ArrayLike = 0.5,
    clip: float = 2.0,
    decay: ArrayLike = 0.95,
    *,
    matrix_dims: DimsTree = None,
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
        >>> tx = with_metric(optax.identity())
        >>> g = jnp.diag(jnp.array([3.0, 1.0]))
        >>> _, state = tx.update(g, tx.init(g))
        >>> updates, _ = tx.update(g, state)
        >>> print(updates.round(3))  # 3 / 1.8, and 1 / 0.25 because of the clip
        [[1.667 0.   ]
         [0.    4.   ]]

    References:
        The one-sided normalization of Normalize-Then-Precondition is strength 1, before
        the stage only.
    """
    check_numbers(strength=strength, clip=clip, decay=decay)
    check_transformation("spectral", spectral)
    inner = optax.with_extra_args_support(spectral)

    scaled = functools.partial(_in_metric, strength, clip)

    def init(params, *, matrix_dims=matrix_dims):
        found = assigned(params, None, matrix_dims)
        # Those of zeros: arrays with the shapes and shardings that `update` computes.
        zeros = optax.tree.zeros_like(params)
        rows, columns = mean_squares(zeros, found)
        return MetricState(rows, columns, init_stage(inner, params, found))

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **extra_args):
        gradients = extra_args.pop("gradients", None)
        if gradients is None:
            gradients = updates

        def run(updates, state, params, gradients):
            found = assigned(updates, params, matrix_dims)
            check_state_axes(state.rows, updates, found)

            def in_metric(u):
                averages = state.rows, state.columns
                return map_matrices(scaled, u, params, found, *averages, stacked=True)

            new, spectral_state = inner.update(
                in_metric(updates),
                state.spectral,
                params,
                matrix_dims=found,
                gradients=gradients,
                **extra_args,
            )
            # After their use: the metric of a step is that of earlier gradients.
            new_rows, new_columns = mean_squares(gradients, found)
            rows = average(state.rows, new_rows, decay)
            columns = average(state.columns, new_columns, decay)
            return in_metric(new), MetricState(rows, columns, spectral_state)

        args = updates, state, params, gradients
        return by_platform(run, *args)(*args)

    return optax.GradientTransformationExtraArgs(init, update)


def _in_metric(
    strength: ArrayLike,
    clip: float,
    u: jax.Array,
    w: jax.Array | None,
    dims: MatrixDims,
    rows: jax.Array,
    columns: jax.Array,
) -> jax.Array:
    """Return ``diag(a) U diag(b)``, from the mean squares of rows and columns."""
    _, outputs, _ = split_axes(u.ndim, dims)
    mean = jnp.mean(rows, outputs, keepdims=True)  # that of the columns is the same
    for squares in (rows, columns):
        # Before the first gradient, all averages are zero: the metric is one.
        ratio = squares / jnp.where(mean == 0, 1, mean)
        relative = jnp.sqrt(jnp.where(mean == 0, 1, ratio))
        clipped = jnp.clip(relative, 1 / clip, clip)
        u = u * clipped ** -jnp.asarray(strength, u.dtype)
    return u


def average(old: PyTree, new: PyTree, decay: ArrayLike) -> Any:
    """Return ``decay old + (1 - decay) new`` of two trees."""
    return jax.tree.map(lambda o, n: replicated(decay * o + (1 - decay) * n), old, new)


def without_boxes(tree: PyTree) -> Any:
    """Return the tree with each box replaced by its array.

    A box without an array is replaced by ``MaskedNode``.
    """

    def array(node):
        if is_box(node):
            return next(iter(jax.tree.leaves(node)), optax.MaskedNode())
        return node

    return jax.tree.map(array, tree, is_leaf=is_box)


def mean_squares(gradients: PyTree, found: Assignment) -> tuple[Any, Any]:
    """Return trees of the mean squares of rows and of columns of every parameter.

    Args:
        gradients: tree of the gradients.
        found: their axes.

    Returns:
        Two trees of arrays of size one along the inputs, and along the outputs; of
        the columns, one entry per output block.
    """
    leaves, treedef = jax.tree.flatten(without_boxes(gradients))
    each: Any = zip(leaves, found.values(), strict=True)
    blocks = []
    for g, spec in each:
        sharding = spec_of(g, spec.sharding)
        blocks.append(Block(spec.path, spec.dims, sharding, g, None, []))
    rows = []
    columns = []
    for of_rows, of_columns in by_shape(_mean_squares, blocks):
        rows.append(of_rows)
        columns.append(of_columns)
    return treedef.unflatten(rows), treedef.unflatten(columns)


def _mean_squares(
    g: jax.Array, w: jax.Array | None, dims: MatrixDims
) -> tuple[jax.Array, jax.Array]:
    _, outputs, inputs = split_axes(g.ndim, dims)
    squares = jnp.square(at_least_float32(g))
    rows = jnp.mean(squares, inputs, keepdims=True)
    output_blocks = blocks_of(g.shape, dims)
    if len(output_blocks) == 1:
        return rows, jnp.mean(squares, outputs, keepdims=True)
    axis = outputs[0]
    shape = [1] * g.ndim
    shape[axis] = -1
    index = jnp.arange(g.shape[axis]).reshape(shape)
    columns = []
    for block in output_blocks:
        # A mask, because a slice would gather a sharded axis.
        inside = (index >= block.at.start) & (index < block.at.stop)
        columns.append(jnp.mean(squares, outputs, keepdims=True, where=inside))
    return rows, jnp.concatenate(columns, axis)
