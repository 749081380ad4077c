# SPDX-License-Identifier: Apache-2.0
"""Hyperball: every matrix keeps its initial Frobenius norm, and a step has a size relative to it."""

import contextlib
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from normpre_optax.checks import PASS_PARAMS, check_numbers
from normpre_optax.linalg.precision import inverse_root
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.tree import without_boxes
from normpre_optax.stages.base import at_least_float32, map_matrices, stage

_ADAMS = 3e-3  # learning rates below are AdamW's


class HyperballState(NamedTuple):
    """Number of updates, int32 ``()``, and the initial norm of every matrix, of size one along rows and columns."""

    count: jax.typing.ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
    norm: optax.Params


def hyperball(
    learning_rate: optax.ScalarOrSchedule, *, matrix_dims: Any = None
) -> optax.GradientTransformationExtraArgs:
    """Make steps of norm ``lr ||W||`` and rescale ``W`` to its initial norm.

    ``W <- R N(W - lr R N(U))``, where ``N`` divides a matrix by its Frobenius norm and ``R`` is the norm of ``W`` at
    ``init``. The scale of the update ``U`` has no effect, and there is no weight decay.

    Args:
        learning_rate: size of a step relative to the weights, number or schedule.
        matrix_dims: see ``normpre_g``; inside ``with_adamw``, its own apply.

    Returns:
        A transformation of matrices that replaces ``optax.scale_by_learning_rate``. It needs params. A matrix that is
        initialized to zero has no norm to keep: it takes the step ``-lr U``.

    Raises:
        ValueError: if params are missing.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import hyperball, scale_by_muon
        >>> tx = optax.chain(scale_by_muon(), hyperball(0.01))
        >>> w = {"kernel": 0.5 * jnp.eye(3)}
        >>> updates, state = tx.update({"kernel": jnp.ones((3, 3))}, tx.init(w), w)
        >>> print(jnp.linalg.norm(w["kernel"] + updates["kernel"]).round(4), jnp.linalg.norm(w["kernel"]).round(4))
        0.866 0.866

    References:
        Wen et al., Hyperball, arXiv 2606.16899.
    """
    check_numbers(learning_rate=learning_rate)
    warn_of_a_rate_like_adams(learning_rate, 3)
    return _hyperball(learning_rate, None, matrix_dims)


def warn_of_a_rate_like_adams(learning_rate: Any, stacklevel: int) -> None:
    """Warn where the peak of the learning rate is what AdamW has: steps would be ten times too small."""
    peak = 0.0
    if callable(learning_rate):
        with contextlib.suppress(Exception):  # a schedule may need what is not there yet
            schedule: Any = learning_rate
            peak = max(float(schedule(2**k)) for k in range(21))
    elif not isinstance(learning_rate, jax.Array):  # which optax.inject_hyperparams passes: the rate of one step
        peak = float(learning_rate)
    if 0 < peak < _ADAMS:
        warnings.warn(
            f"hyperball: the learning rate is at most {peak:.2g}, like AdamW's. Here it is the size of a step relative "
            "to the weights, 1e-2 to 2e-2 at its peak; adam_learning_rate= is that of the AdamW group",
            stacklevel=stacklevel,
        )


def _hyperball(learning_rate: Any, multipliers: Any, matrix_dims: Any) -> optax.GradientTransformationExtraArgs:
    """``hyperball`` whose learning rate is multiplied by a number per parameter, from ``multipliers(params)``."""

    def init(params):
        norm = map_matrices(_row_wise_norm, jax.tree.map(at_least_float32, params), None, matrix_dims)
        _warn_of_zeros(norm)
        return HyperballState(jnp.zeros((), jnp.int32), without_boxes(norm))

    def step(updates, state, params, matrix_dims):
        if params is None:
            raise ValueError(f"hyperball needs the parameters: {PASS_PARAMS}")
        lr: Any = learning_rate(state.count) if callable(learning_rate) else learning_rate
        times = [1.0] * len(jax.tree.leaves(params)) if multipliers is None else jax.tree.leaves(multipliers(params))
        rates = [
            jnp.full_like(norm, jnp.asarray(lr * x, norm.dtype))
            for norm, x in zip(jax.tree.leaves(state.norm), times, strict=True)
        ]
        new = map_matrices(_step, updates, params, matrix_dims, state.norm, rates)
        return new, HyperballState(optax.safe_increment(state.count), state.norm)

    return stage(step, init, matrix_dims)


def _step(u: jax.Array, w: jax.Array, dims: MatrixDims, norm: jax.Array, rate: jax.Array) -> jax.Array:
    ww, wu, uu = (_over_matrix(x, dims) for x in (w * w, w * u, u * u))
    size = rate * jnp.where(norm > 0, norm * inverse_root(uu), 1)
    after = jnp.sqrt(jnp.maximum(ww - 2 * size * wu + size**2 * uu, 0))
    back = jnp.where((norm > 0) & (after > 0), norm / jnp.where(after > 0, after, 1), 1)
    return (back - 1) * w - back * size * u


def _over_matrix(x: jax.Array, dims: MatrixDims) -> jax.Array:
    _, outputs, inputs = split_axes(x.ndim, dims)
    return jnp.sum(x, outputs + inputs, keepdims=True)


def _row_wise_norm(w: jax.Array, _: None, dims: MatrixDims) -> jax.Array:
    """Frobenius norm of every matrix, repeated for each of its rows, so that output blocks can differ."""
    shape = jnp.sum(w, split_axes(w.ndim, dims)[2], keepdims=True)
    squares = _over_matrix(w * w, dims)
    norm = jnp.where(squares == 0, 0, jnp.sqrt(jnp.where(squares == 0, 1, squares)))  # with a derivative at zero
    return jnp.broadcast_to(norm, shape.shape)


def _warn_of_zeros(norms: Any) -> None:
    """Warn of matrices without a norm to keep; inside jit nothing is known of them."""
    named = jax.tree_util.tree_leaves_with_path(norms)
    here = [(path, x) for path, x in named if not isinstance(x, Tracer) and x.is_fully_addressable]
    zero = [path for path, x in here if not jax.device_get(x).all()]
    if zero:
        first = jax.tree_util.keystr(zero[0], simple=True, separator="/")
        warnings.warn(
            f"hyperball: parameter {first!r} and {len(zero) - 1} more are initialized to zero, so they have no norm to "
            "keep and grow without weight decay. Initialize them with a small standard deviation, or pass them to "
            "AdamW (None in matrix_dims)",
            stacklevel=2,
        )
