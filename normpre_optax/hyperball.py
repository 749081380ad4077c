# SPDX-License-Identifier: Apache-2.0
"""Hyperball: every matrix has a fixed Frobenius norm, and steps have a size relative to
it.
"""

import contextlib
import functools
import math
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import PASS_PARAMS, check_choice, check_numbers
from normpre_optax.linalg.products import inverse_root
from normpre_optax.parameters.broadcast import numbers
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.roles import row_norms_by_role
from normpre_optax.parameters.rules import Assignment, assign
from normpre_optax.parameters.tree import leaf_paths
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.stage import CountState, init_count, stage

_ADAMS = 5e-3  # a lower peak looks like AdamW's learning rate


def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    *,
    row_norms: Any = None,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """Set the norm of every matrix, and make steps of a size relative to it.

    ``W <- R N(N(W) - lr N(U))``, where ``N`` divides a matrix (out, in) by its
    Frobenius norm and ``R = row_norm sqrt(out)``. The first update sets the norms, so
    neither the initial norm nor the scale of the update ``U`` has an effect. A matrix
    whose update is zero stays as it is. There is no weight decay.

    Args:
        learning_rate: size of a step relative to the weights, number or schedule.
        row_norms: root mean square of the norms of a matrix's rows (one output neuron
            each): a number for all matrices, or a tree of numbers like the parameters,
            or a function ``(params) -> tree``. None means 1, but ``sqrt(in / (out k))``
            for the ``k`` matrices that write into the residual stream, found by their
            names and shapes: the outputs of a block then have a size that does not
            depend on its width or on the depth. ``explain`` shows them. "keep" keeps
            the norm that every matrix has, to fine-tune trained weights; a zero matrix
            gets the norm of None. In bfloat16 weights, the norm may change by several
            percent in 20,000 steps.
        matrix_dims: see ``normpre_g``.

    Returns:
        A transformation of matrices that replaces ``optax.scale_by_learning_rate``. It
        needs params; its state is a step counter.

    Raises:
        TypeError: if ``row_norms`` has an unsupported type.
        ValueError: if params are missing, or a number is out of range.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import hyperball, scale_by_muon
        >>> tx = optax.chain(scale_by_muon(), hyperball(0.01))
        >>> w = {"kernel": 0.5 * jnp.eye(4)}
        >>> updates, state = tx.update({"kernel": jnp.ones((4, 4))}, tx.init(w), w)
        >>> print(jnp.linalg.norm(w["kernel"] + updates["kernel"]).round(4))
        2.0

    References:
        Wen et al., Hyperball, arXiv 2606.16899 (which keeps the initial norm).
    """
    check_numbers(learning_rate=learning_rate)
    warn_of_an_unusual_rate(learning_rate, row_norms, 3)

    def norms_of(params):
        return row_norms_of(row_norms, params, assign(params, matrix_dims))

    def init(params):
        if leaf_paths(params):  # optax.tree.map_params passes none
            found = assign(params, matrix_dims)
            row_norms_of(row_norms, params, found)
            for caution in cautions(found, params, row_norms is None):
                warnings.warn(caution, stacklevel=2)
        return init_count(params)

    return _hyperball(
        learning_rate, None, norms_of, keeps(row_norms), matrix_dims, init
    )


def keeps(row_norms: Any) -> bool:
    """Return whether the option ``row_norms`` is "keep"; raise a ValueError for another
    word.
    """
    if isinstance(row_norms, str):
        check_choice("row_norms", row_norms, ("keep",))
    return isinstance(row_norms, str)


def row_norms_of(row_norms: Any, params: Any, found: Assignment) -> dict[str, Any]:
    """Return the option ``row_norms`` by path; None and "keep" are by role."""
    if row_norms is None or keeps(row_norms):
        return row_norms_by_role(found)
    return dict(zip(found, numbers("row_norms", row_norms, params), strict=True))


def warn_of_an_unusual_rate(
    learning_rate: Any, row_norms: Any, stacklevel: int
) -> None:
    """Warn if the peak of the learning rate looks like AdamW's, about ten times too
    small, or is larger than 1/2.
    """
    peak = 0.0
    if callable(learning_rate):
        with contextlib.suppress(
            Exception
        ):  # a schedule may fail outside a training run
            schedule: Any = learning_rate
            peak = max(
                float(schedule(step)) for step in (0, *(2**k for k in range(21)))
            )
    elif not isinstance(
        learning_rate, jax.Array
    ):  # from optax.inject_hyperparams: the learning rate of one step
        peak = float(learning_rate)
    small = not keeps(row_norms) and 0 < peak < _ADAMS  # fine-tuning has small steps
    if small or peak > 0.5:
        like = ", like AdamW's" if small else ", more than half of the weights"
        warnings.warn(
            f"hyperball: the learning rate is at most {peak:.2g}{like}. Here it is the"
            " size of a step relative to the weights, see learning_rate_by_length;"
            " adam_learning_rate= is that of the AdamW group",
            stacklevel=stacklevel,
        )


def _hyperball(
    learning_rate: Any,
    times: Any,
    norms_of: Callable,
    keep: bool,
    matrix_dims: Any,
    init: Any = init_count,
) -> optax.GradientTransformationExtraArgs:
    """``hyperball`` with numbers by path: factors of the learning rate, and row norms
    of the parameters.
    """

    def step(updates, state, params, dims):
        if params is None:
            raise ValueError(f"hyperball needs the parameters: {PASS_PARAMS}")
        lr: Any = (
            learning_rate(state.count) if callable(learning_rate) else learning_rate
        )
        paths = leaf_paths(params)
        norms = [*map(norms_of(params).get, paths)]
        rates = [lr if times is None else lr * times[path] for path in paths]
        new = map_matrices(
            functools.partial(_step, keep),
            updates,
            params,
            dims,
            norms,
            rates,
            stacked=True,
        )
        return new, CountState(optax.safe_increment(state.count))

    return stage(step, init, matrix_dims)


def _step(
    keep: bool, u: jax.Array, w: jax.Array, dims: MatrixDims, row_norm: Any, rate: Any
) -> jax.Array:
    _, outputs, inputs = split_axes(u.ndim, dims)
    ww, wu, uu = (
        jnp.sum(x, outputs + inputs, keepdims=True) for x in (w * w, w * u, u * u)
    )
    a, b = (
        inverse_root(ww),
        jnp.asarray(rate, u.dtype) * inverse_root(uu),
    )  # N(W) - lr N(U) = a W - b U
    norm = (
        jnp.asarray(row_norm, u.dtype)
        * math.prod(u.shape[axis] for axis in outputs) ** 0.5
    )
    norm = jnp.where((uu == 0) | ((ww != 0) & keep), jnp.sqrt(ww), norm)
    back = norm * inverse_root(a**2 * ww - 2 * a * b * wu + b**2 * uu)
    return (back * a - 1) * w - back * b * u
