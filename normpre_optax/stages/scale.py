# SPDX-License-Identifier: Apache-2.0
"""Stages that scale: to an RMS, by a factor of the shape, by second moments of rows."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike

from normpre_optax.checks import check_function, check_numbers
from normpre_optax.linalg.products import inverse_norm, inverse_root
from normpre_optax.parameters.dims import MatrixDims, matrix_shape, split_axes
from normpre_optax.parameters.rules import assigned
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.metric import average, mean_squares
from normpre_optax.stages.stage import check_state_axes, per_parameter, stage
from normpre_optax.trees import DimsTree


def moonlight_scale(m: int, n: int) -> float:
    """RMS 0.2, at AdamW's learning rate (MoonshotAI/Moonlight)."""
    # The min(m, n) singular values of an orthogonal matrix are one, so its root mean
    # square is sqrt(min(m, n) / (m n)) = 1 / sqrt(max(m, n)).
    return 0.2 * max(m, n) ** 0.5


def keller_scale(m: int, n: int) -> float:
    """Spectral norm 1 or more, at a learning rate near 0.02 (KellerJordan/Muon)."""
    return max(1, m / n) ** 0.5


# Scale conventions of an orthogonal update (out, in) = m x n.
CONVENTIONS: dict[str, Callable[[int, int], float]] = {
    "moonlight": moonlight_scale,
    "keller": keller_scale,
}


def scale_to_rms(
    rms: ArrayLike | None = 0.2, *, matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Scale every matrix to a root mean square: ``R(T) = rms T / RMS(T)``.

    Args:
        rms: root mean square of the entries afterwards; None leaves the matrices as
            they are.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage. A zero matrix stays zero.

    Raises:
        ValueError: if ``rms`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import scale_to_rms
        >>> print(scale_to_rms(0.5).update(jnp.array([[2.0, -2.0], [2.0, 2.0]]), ())[0])
        [[ 0.5 -0.5]
         [ 0.5  0.5]]

    References:
        Normalize-Then-Precondition, "Consistent Update RMS"; Liu et al., arXiv
        2502.16982.
    """
    check_numbers(rms=rms)
    if rms is None:
        return optax.with_extra_args_support(optax.identity())

    def scaled(t, w, dims):
        return with_rms(t, dims, rms)

    return per_parameter(scaled, matrix_dims)


def with_rms(t: jax.Array, dims: MatrixDims, rms: ArrayLike) -> jax.Array:
    """Return the matrices of a parameter scaled to a root mean square."""
    _, outputs, inputs = split_axes(t.ndim, dims)
    _, m, n = matrix_shape(t.shape, dims)
    # The root mean square is the norm over sqrt(m n).
    return t * (rms * (m * n) ** 0.5 * inverse_norm(t, outputs + inputs))


def scale_by_shape(
    factor: Callable[[int, int], float], *, matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Multiply every matrix by a factor of its shape: the scale conventions of Muon.

    Args:
        factor: ``(outputs, inputs) -> factor``.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import scale_by_shape
        >>> tx = scale_by_shape(lambda outputs, inputs: max(1, outputs / inputs) ** 0.5)
        >>> print(tx.update(jnp.ones((2, 8)), ())[0])  # (in, out)
        [[2. 2. 2. 2. 2. 2. 2. 2.]
         [2. 2. 2. 2. 2. 2. 2. 2.]]
    """
    check_function("factor", factor, "(outputs, inputs) -> number")

    def scaled(t, w, dims):
        _, outputs, inputs = matrix_shape(t.shape, dims)
        return t * factor(outputs, inputs)

    return per_parameter(scaled, matrix_dims)


class RowMomentState(NamedTuple):
    """Averages of the mean squares of all rows.

    ``moment`` is a tree like the parameters; its arrays have size one along the inputs.
    """

    moment: optax.Updates


def scale_by_row_moment(
    b2: ArrayLike = 0.95, eps: float = 1e-10, *, matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Divide rows by the roots of their second moments; keep the matrix's norm.

    ``v_i = b2 v_i + (1 - b2) mean(O_i^2)``, ``O'_i = O_i / (sqrt(v_i) + eps)``, and
    then ``O' ||O||_F / ||O'||_F``.

    Args:
        b2: decay of the second moments.
        eps: added to the root.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage whose state has one float32 number per row, sharded as the parameter.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.stages import scale_by_row_moment
        >>> tx = scale_by_row_moment()
        >>> o = jnp.array([[3.0, 1.0], [3.0, 1.0]])  # (in, out)
        >>> print(tx.update(o, tx.init(o))[0].round(4))
        [[2.2361 2.2361]
         [2.2361 2.2361]]

    References:
        Li et al., NorMuon, arXiv 2510.05491 (github.com/zichongli5/NorMuon).
    """
    check_numbers(b2=b2, eps=eps)

    def init(params, *, matrix_dims=matrix_dims):
        found = assigned(params, None, matrix_dims)
        # Those of zeros: arrays with the shapes and shardings that `update` computes.
        zeros = optax.tree.zeros_like(params)
        moment, _ = mean_squares(zeros, found)
        return RowMomentState(moment)

    def scaled(o, w, dims, moment):
        _, outputs, inputs = split_axes(o.ndim, dims)
        new = o / (jnp.sqrt(moment) + eps)
        before = jnp.sum(o * o, outputs + inputs, keepdims=True)
        after = jnp.sum(new * new, outputs + inputs, keepdims=True)
        return new * jnp.sqrt(before) * inverse_root(after)

    def step(updates, state, params, matrix_dims):
        found = assigned(updates, params, matrix_dims)
        check_state_axes(state.moment, updates, found)
        new_moment, _ = mean_squares(updates, found)
        moment = average(state.moment, new_moment, b2)
        new = map_matrices(scaled, updates, params, found, moment)
        return new, RowMomentState(moment)

    return stage(step, init, matrix_dims)
