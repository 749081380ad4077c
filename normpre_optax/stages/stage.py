# SPDX-License-Identifier: Apache-2.0
"""What a stage is: an optax transformation that is passed the axes of the matrices.

A direction passes them as ``matrix_dims``: to the ``update`` of all stages, and to the
``init`` of those that take an argument of this name.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.platforms import by_platform
from normpre_optax.parameters.dims import split_axes
from normpre_optax.parameters.rules import Assignment, assign
from normpre_optax.trees import DimsTree, PyTree

# step(updates, state, params, matrix_dims) -> (updates, state)
Step = Callable[[PyTree, PyTree, PyTree, DimsTree], tuple[PyTree, PyTree]]


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
        def run(updates, state, params):
            return step(updates, state, params, matrix_dims)

        # Once to tell whether they are traced and where they are, and once to compute.
        args = updates, state, params
        return by_platform(run, *args)(*args)

    return optax.GradientTransformationExtraArgs(init, update)


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


def assigned(updates: PyTree, params: PyTree, matrix_dims: DimsTree) -> Any:
    """Return the ``Assignment`` of a tree of matrices: no ``dims`` in it are None.

    Args:
        updates: tree that is assigned if ``params`` is None.
        params: tree of parameters, or None.
        matrix_dims: see ``normpre_g``.

    Raises:
        ValueError: if a parameter is not a matrix.
    """
    found = assign(updates if params is None else params, matrix_dims)
    for spec in found.values():
        if spec.dims is None:
            raise ValueError(
                f"parameter {spec.path!r} of shape {spec.shape} is not a matrix"
                f" ({spec.reason}). Complete optimizers such as normpre_g pass it to"
                " AdamW. Around a direction or a stage alone, use optax.masked or"
                " optax.partition, or pass matrix_dims with its axes:"
                " MatrixDims(inputs=..., outputs=...)"
            )
    return found


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
