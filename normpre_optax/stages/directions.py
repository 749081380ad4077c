# SPDX-License-Identifier: Apache-2.0
"""Directions, which are chains of stages in float32, and stages of a function."""

import functools
from collections.abc import Callable

import jax
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.checks import check_function
from normpre_optax.linalg.platforms import by_platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.sharding.auto import in_auto_axes
from normpre_optax.sharding.placement import mesh_of, spec_of
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.stage import (
    assigned,
    check_transformation,
    init_empty,
    init_stage,
    stage,
)
from normpre_optax.stages.tpu_groups import update_in_groups
from normpre_optax.trees import DimsTree, PyTree


def per_parameter(
    f: Callable[..., jax.Array], matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Return the stateless stage of a function ``f(update, weight, dims)``.

    Args:
        f: function of one parameter in its own layout, in float32. ``weight`` is None
            if ``update`` is called without params.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        The stage.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import per_parameter
        >>> from normpre_optax.parameters.dims import split_axes
        >>> def center(u, w, dims):
        ...     _, outputs, inputs = split_axes(u.ndim, dims)
        ...     return u - jnp.mean(u, inputs, keepdims=True)  # the mean of every row
        >>> kernel = jnp.array([[1.0, 2.0], [3.0, 2.0]])  # (in, out)
        >>> print(per_parameter(center).update(kernel, ())[0])
        [[-1.  0.]
         [ 1.  0.]]
    """
    check_function("f", f, "(update, weight, dims) -> update")

    def step(updates, state, params, matrix_dims):
        return map_matrices(f, updates, params, matrix_dims), state

    return stage(step, init_empty, matrix_dims)


def direction(
    *stages: optax.GradientTransformation, matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Chain stages to the direction of matrices, before decay and learning rate.

    Half-precision gradients and weights are converted to float32 once, so that
    accumulators are float32; the update has the dtype of the parameter. The axes of
    every parameter are assigned once and passed to the stages as ``matrix_dims``, also
    to those of a direction inside this one, and the gradients as ``gradients``. At
    ``init``, the axes are passed to stages whose ``init`` takes ``matrix_dims``:
    wrappers such as ``optax.chain`` do not pass them on to ``with_metric`` inside.

    Args:
        stages: optax transformations and stages of this library.
        matrix_dims: which axes are inputs and outputs; see ``normpre_g``.

    Returns:
        The transformation. Its updates point uphill, like those of
        ``optax.scale_by_*``.

    Raises:
        TypeError: if a stage is not an optax transformation, or a complete optimizer.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import direction, normalize_rows
        >>> tx = direction(optax.trace(0.9), normalize_rows())
        >>> kernel = jnp.array([[3.0, 0.0], [4.0, 2.0]])  # (in, out)
        >>> print(tx.update(kernel, tx.init(kernel))[0].T)
        [[0.6 0.8]
         [0.  1. ]]
    """
    for one in stages or (None,):
        check_transformation("stages", one)
    chain = optax.chain(*stages)

    def init(params, *, matrix_dims=matrix_dims):
        found = assigned(params, None, matrix_dims)
        weights = jax.tree.map(at_least_float32, params)
        return tuple(init_stage(one, weights, found) for one in stages)

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **extra_args):
        extra_args["matrix_dims"] = assigned(updates, params, matrix_dims)
        run = functools.partial(update_in_groups, chain, extra_args)
        mesh = mesh_of(updates)
        if mesh is not None and mesh.size == 1 and _is_traced(updates):
            run = _without_explicit_axes(run, mesh, (updates, state))
        args = updates, state, params
        new, state = by_platform(run, *args)(*args)
        like = params
        if params is None:
            like = updates
        return jax.tree.map(lambda u, p: u.astype(p.dtype), new, like), state

    return optax.GradientTransformationExtraArgs(init, update)


def _is_traced(tree: PyTree) -> bool:
    """Return whether the arrays of a tree are traced, as inside of jit."""
    return isinstance(jax.tree.leaves(tree)[0], Tracer)


def _without_explicit_axes(
    run: Callable, mesh: AbstractMesh, results: PyTree
) -> Callable:
    """Return ``run`` for the Explicit axes of one device: Auto ones are no mesh.

    Only inside of jit: outside, this would compile at every call.
    """
    specs = jax.tree.map(lambda x: spec_of(x) or PartitionSpec(), results)
    return in_auto_axes(run, mesh, specs)
