# SPDX-License-Identifier: Apache-2.0
"""Stages, and directions, which are chains of stages in float32.

A stage is an optax transformation that is passed the axes of the matrices. A direction
passes them as ``matrix_dims``: to the ``update`` of all stages, and to the ``init`` of
those that take an argument of this name.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer
from jax.sharding import AbstractMesh, PartitionSpec

from normpre_optax.checks import check_function
from normpre_optax.linalg.platforms import by_platform, platform
from normpre_optax.linalg.products import at_least_float32
from normpre_optax.parameters.dims import split_axes
from normpre_optax.parameters.rules import Assignment, assigned
from normpre_optax.sharding.auto import in_auto_axes
from normpre_optax.sharding.placement import mesh_of, spec_of
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.tpu_groups import groups_that_fit, update_in_groups
from normpre_optax.trees import DimsTree, PyTree

# step(updates, state, params, matrix_dims) -> (updates, state); the axes by name
Step = Callable[..., tuple[PyTree, PyTree]]


class CountState(NamedTuple):
    """Number of updates so far, int32 ``()``."""

    count: jax.typing.ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]


class CompleteOptimizer(optax.GradientTransformationExtraArgs):
    """An optimizer with learning rate and weight decay, which cannot be a stage."""


def init_count(params: optax.Params) -> CountState:
    """State of a stage that depends on the step."""
    return CountState(jnp.zeros((), jnp.int32))


def init_empty(params: optax.Params) -> optax.EmptyState:
    """State of a stage that has none."""
    return optax.EmptyState()


def stage(
    step: Step, init: Callable[..., Any], matrix_dims: DimsTree
) -> optax.GradientTransformationExtraArgs:
    """Return the stage that updates by ``step``.

    Args:
        step: ``(updates, state, params, matrix_dims) -> (updates, state)``, traced once
            per platform.
        init: ``(params) -> state``; if the state depends on the axes,
            ``(params, *, matrix_dims)``.
        matrix_dims: axes for ``step`` outside of a direction.
    """

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **_):
        run = functools.partial(step, matrix_dims=matrix_dims)
        # Once to tell whether they are traced and where they are, and once to compute.
        args = updates, state, params
        return by_platform(run, *args)(*args)

    return optax.GradientTransformationExtraArgs(init, update)


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
    # A direction without stages is an error, too.
    for one in stages or (None,):
        check_transformation("stages", one)
    chain = optax.chain(*stages)

    def init(params, *, matrix_dims=matrix_dims):
        found = assigned(params, None, matrix_dims)
        # The state is like these: momenta of half-precision parameters are float32.
        weights = jax.tree.map(at_least_float32, params)
        return tuple(init_stage(one, weights, found) for one in stages)

    def update(updates, state, params=None, *, matrix_dims=matrix_dims, **extra_args):
        extra_args["matrix_dims"] = assigned(updates, params, matrix_dims)
        run = functools.partial(_run_chain, chain, extra_args)
        mesh = mesh_of(updates)
        if mesh is not None and mesh.size == 1 and _is_traced(updates):
            run = _without_explicit_axes(run, mesh, (updates, state))
        args = updates, state, params
        new, state = by_platform(run, *args)(*args)
        # Gradients may have another dtype than their parameters.
        like = params
        if params is None:
            like = updates
        return jax.tree.map(lambda u, p: u.astype(p.dtype), new, like), state

    return optax.GradientTransformationExtraArgs(init, update)


def _run_chain(
    chain: optax.GradientTransformationExtraArgs,
    extra_args: dict[str, Any],
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> tuple[optax.Updates, optax.OptState]:
    """Return the chain's new updates and state, computed in at least float32."""
    updates = jax.tree.map(at_least_float32, updates)
    params = jax.tree.map(at_least_float32, params)
    if platform() == "tpu" and mesh_of(updates) is None and params is not None:
        groups = groups_that_fit(updates)
        if len(groups) > 1:
            return update_in_groups(chain, extra_args, groups, updates, state, params)
    # Inside another direction, `gradients` are those of that one.
    extra_args = {"gradients": updates} | extra_args
    return chain.update(updates, state, params, **extra_args)


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


def init_stage(
    stage: optax.GradientTransformation, params: optax.Params, found: Assignment
) -> optax.OptState:
    """Return the state of a stage, whose ``init`` is passed the axes if it takes them.

    Others, such as those of optax, have states that do not depend on the axes. Nor can
    a chain of optax pass them on: see ``check_state_axes``.
    """
    if "matrix_dims" in inspect.signature(stage.init).parameters:
        init: Callable[..., optax.OptState] = stage.init
        return init(params, matrix_dims=found)
    return stage.init(params)


def check_transformation(name: str, value: Any) -> None:
    """Raise a TypeError for what cannot be a stage.

    That is what is not an optax transformation, and a complete optimizer.
    """
    if not isinstance(value, optax.GradientTransformation):
        fix = "optax.stateless converts a function (updates, params) -> updates"
        raise TypeError(
            f"{name} must be an optax.GradientTransformation, got {value!r}; {fix}"
        )
    if isinstance(value, CompleteOptimizer):
        refuse_complete_optimizer()


def refuse_complete_optimizer() -> None:
    """Raise a TypeError."""
    raise TypeError(
        "a complete optimizer cannot be a stage: pass its direction, such as"
        " scale_by_muon()"
    )


def check_state_axes(rows: PyTree, updates: PyTree, found: Assignment) -> None:
    """Raise a ValueError if state of one number per row is of rows along other axes.

    A direction passes its axes to ``init``, but ``optax.chain`` and other wrappers do
    not pass them on. The state of a stage inside of them would be that of other rows.

    Args:
        rows: tree of arrays of size one along the inputs.
        updates: tree of the matrices.
        found: their axes.
    """
    each = zip(
        jax.tree.leaves(rows), jax.tree.leaves(updates), found.values(), strict=True
    )
    for x, u, spec in each:
        assert spec.dims is not None  # see `assigned`
        _, _, inputs = split_axes(u.ndim, spec.dims)
        shape = tuple(1 if axis in inputs else n for axis, n in enumerate(u.shape))
        if x.shape != shape:
            raise ValueError(
                f"parameter {spec.path!r} of shape {u.shape}: the state was initialized"
                f" for other axes than {spec.dims}. optax.chain and other wrappers"
                " inside a direction do not pass the axes to init: use direction"
                " instead, or pass matrix_dims to the stage itself"
            )
