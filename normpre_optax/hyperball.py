# SPDX-License-Identifier: Apache-2.0
"""Hyperball: every matrix has a fixed Frobenius norm.

Steps have a size relative to that norm.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from normpre_optax.checks import PASS_PARAMS, warn_user
from normpre_optax.linalg.products import inverse_root
from normpre_optax.options import DimsTree, PyTree, checked
from normpre_optax.parameters.cautions import cautions
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.parameters.roles import keeps_norms, row_norms_by_path
from normpre_optax.parameters.rules import assign
from normpre_optax.parameters.tree import leaf_paths
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.stage import CountState, init_count, stage

_ADAMS = 5e-3  # a lower peak looks like AdamW's learning rate
# After a step of this size, float32 has nothing of the weights before it.
_REPLACES = 1 / float(jnp.finfo(jnp.float32).eps)


@checked
def hyperball(
    learning_rate: optax.ScalarOrSchedule,
    *,
    row_norms: PyTree = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Set the norm of every matrix, and make steps of a size relative to it.

    ``W <- R N(N(W) - lr N(U))``, where ``N`` divides a matrix (out, in) by its
    Frobenius norm and ``R = row_norm sqrt(out)``. The first update sets the norms, so
    neither the initial norm nor the scale of the update ``U`` has an effect. A matrix
    whose update is zero stays as it is. There is no weight decay. It is the last
    transformation of a chain: its update is the new matrix minus the old one, so what
    accumulates, averages or scales updates after it (``optax.apply_every``,
    ``optax.ema``, ``optax.trace``) breaks the norms, and ``optax.MultiSteps`` around
    the chain does not.

    Args:
        learning_rate: size of a step relative to the weights, number or schedule. A
            schedule is called a few times at construction, to check it.
        row_norms: root mean square of the norms of a matrix's rows (one output neuron
            each): a number for all matrices, or a tree of numbers like the parameters,
            or a function ``(params) -> tree``. None means 1, but ``sqrt(in / (out k))``
            for the ``k`` matrices that write into the residual stream, found by their
            shapes, neighbors and names: the outputs of a block then have a size that
            does not depend on its width or on the depth. ``explain`` shows them. "keep"
            keeps the norm that every matrix has, to fine-tune trained weights; a matrix
            of zeros, such as a new layer, gets the norm of its first step: ``lr`` times
            the norm of None. In bfloat16 weights, the norm may change by several
            percent in 20,000 steps.
        matrix_dims: see ``normpre_g``.

    Returns:
        A transformation of matrices that replaces ``optax.scale_by_learning_rate``. It
        needs params; its state is a step counter.

    Raises:
        TypeError: if ``row_norms`` has an unsupported type.
        ValueError: if params are missing, or a number is out of range: a learning rate
            above eight million would replace the weights.

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
    keep = keeps_norms(row_norms)
    check_relative_rate(learning_rate, keep)

    def norms_of(params: optax.Params) -> dict[str, ArrayLike]:
        return row_norms_by_path(row_norms, params, assign(params, matrix_dims))

    def init(params: optax.Params) -> CountState:
        if leaf_paths(params):  # optax.tree.map_params passes none
            assignment = assign(params, matrix_dims)
            row_norms_by_path(row_norms, params, assignment)
            for caution in cautions(assignment, params, row_norms is None):
                warn_user(caution)
        return init_count(params)

    return constrain_norms(
        learning_rate, norms_of, keep, matrix_dims=matrix_dims, init=init
    )


def check_relative_rate(
    learning_rate: ArrayLike | Callable[..., Any], keep: bool
) -> None:
    """Warn or raise an error if the peak of the learning rate is much too small or
    large.

    Too small is like AdamW's, about ten times below a good one. Too large is above 1/2.

    Args:
        learning_rate: number or schedule.
        keep: whether norms are kept, as in fine-tuning, which has small steps.

    Raises:
        ValueError: if nothing would be left of the weights after a step.
    """
    peak = _peak(learning_rate)
    relative = (
        "Here it is the size of a step relative to the weights, see"
        " learning_rate_by_length; adam_learning_rate= is that of the AdamW group"
    )
    if peak >= _REPLACES:
        raise ValueError(
            f"hyperball: the learning rate is {peak:.2g}, so every step would replace"
            f" the weights. {relative}"
        )
    small = not keep and 0 < peak < _ADAMS
    if small:
        like = "like AdamW's"
    elif peak > 0.5:
        like = "more than half of the weights"
    else:
        return
    warn_user(f"hyperball: the learning rate is at most {peak:.2g}, {like}. {relative}")


def _peak(learning_rate: ArrayLike | Callable[..., Any]) -> float:
    """Return the largest learning rate, at steps that are powers of two; 0 if unknown.

    A schedule may fail outside a training run. It is called once, for all steps, as
    one that prints or counts should be. An array is the learning rate of one step,
    from optax.inject_hyperparams.
    """
    if callable(learning_rate):
        steps = jnp.array([0, *(2**k for k in range(21))])
        with contextlib.suppress(Exception):
            return float(jnp.max(jax.vmap(learning_rate)(steps)))
        return 0.0
    if isinstance(learning_rate, jax.Array):
        return 0.0
    number: Any = learning_rate
    return float(number)


def constrain_norms(
    learning_rate: optax.ScalarOrSchedule,
    row_norms: Callable[[optax.Params], Mapping[str, ArrayLike]],
    keep: bool,
    multipliers: Mapping[str, ArrayLike] | None = None,
    matrix_dims: DimsTree = None,
    init: Callable[[optax.Params], CountState] = init_count,
) -> optax.GradientTransformationExtraArgs:
    """``hyperball`` with numbers by path.

    Args:
        learning_rate: see ``hyperball``.
        row_norms: function of the parameters that returns the row norms.
        keep: whether a matrix that is not zero keeps its norm instead.
        multipliers: of the learning rate; None is one for all.
        matrix_dims: see ``hyperball``.
        init: function of the parameters that returns the state.
    """

    def step(updates, state, params, matrix_dims):
        if params is None:
            raise ValueError(f"hyperball needs the parameters: {PASS_PARAMS}")
        lr: Any = learning_rate
        if callable(learning_rate):
            lr = learning_rate(state.count)
        paths = leaf_paths(params)
        rates = [lr] * len(paths)
        if multipliers is not None:
            rates = [lr * multipliers[path] for path in paths]
        by_path = row_norms(params)
        norms = [by_path.get(path) for path in paths]
        f = functools.partial(_step, keep)
        new = map_matrices(f, updates, params, matrix_dims, norms, rates, stacked=True)
        return new, CountState(optax.safe_increment(state.count))

    return stage(step, init, matrix_dims)


def _step(
    keep: bool,
    u: jax.Array,
    w: jax.Array,
    dims: MatrixDims,
    row_norm: ArrayLike,
    rate: ArrayLike,
) -> jax.Array:
    """Return the change of a matrix, ``R N(N(W) - lr N(U)) - W``.

    ``N`` divides by the Frobenius norm, ``R`` is the row norm times ``sqrt(out)``.
    """
    _, outputs, inputs = split_axes(u.ndim, dims)
    axes = outputs + inputs
    # |W|^2, <W, U> and |U|^2 of every matrix.
    ww = jnp.sum(w * w, axes, keepdims=True)
    wu = jnp.sum(w * u, axes, keepdims=True)
    uu = jnp.sum(u * u, axes, keepdims=True)

    # N(W) - lr N(U) is a W - b U.
    a = inverse_root(ww)
    # The square of a larger rate overflows, and the matrix would become zero.
    rate = jnp.minimum(jnp.asarray(rate, u.dtype), _REPLACES)
    b = rate * inverse_root(uu)

    # R
    rows = math.prod(u.shape[axis] for axis in outputs)
    norm = jnp.asarray(row_norm, u.dtype) * rows**0.5
    if keep:
        # Zeros, as of a new layer, become as large as a step on a matrix of this role.
        norm = jnp.where(ww == 0, rate * norm, jnp.sqrt(ww))
    # A matrix whose update is zero stays as it is.
    norm = jnp.where(uu == 0, jnp.sqrt(ww), norm)

    # |a W - b U|^2 from the sums: the matrix itself need not be stored to be summed.
    squared = a**2 * ww - 2 * a * b * wu + b**2 * uu
    back = norm * inverse_root(squared)
    # Minus W, because optax adds the update to W.
    return (back * a - 1) * w - back * b * u
