# SPDX-License-Identifier: Apache-2.0
"""The size of a matrix update: measured, or a nominal factor of the matrix's shape."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from normpre_optax.linalg.newton_schulz import unit_frobenius
from normpre_optax.linalg.precision import in_working_dtype
from normpre_optax.transforms.checks import check_rms, number, same_trees
from normpre_optax.transforms.oriented import UPRIGHT, OrientedTransformation, in_context


def scale_to_rms(rms: jax.typing.ArrayLike | None = 0.2) -> OrientedTransformation:
    """Scale every matrix to a root mean square entry of ``rms``: ``R(T) = rms T / RMS(T)``.

    Args:
        rms: root mean square of the entries of every matrix afterwards; None leaves the matrices as they are.

    Returns:
        A stateless transformation on matrices in the last two axes. A zero matrix stays zero.

    Raises:
        ValueError: if ``rms`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import scale_to_rms
        >>> tx = scale_to_rms(0.2)
        >>> t = jnp.array([[3.0, -3.0], [3.0, 3.0]])
        >>> print(tx.update(t, tx.init(t))[0])
        [[ 0.2 -0.2]
         [ 0.2  0.2]]

    References:
        Normalize-Then-Precondition, "Consistent Update RMS"; Liu et al., arXiv 2502.16982.
    """
    check_rms(rms)

    def scale(t: jax.Array) -> jax.Array:
        return t if rms is None else unit_frobenius(t) * (in_context(rms) * math.sqrt(t.shape[-2] * t.shape[-1]))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        return jax.tree.map(in_working_dtype(scale), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)


def scale_by_shape(factor: Callable[[int, int], float]) -> OrientedTransformation:
    """Multiply every matrix by a factor of its shape: the nominal scale rules of Muon and MANO.

    Args:
        factor: ``(rows, columns) -> factor``.

    Returns:
        A stateless transformation on matrices in the last two axes.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.transforms.scale import scale_by_shape
        >>> tx = scale_by_shape(lambda rows, columns: max(1, rows / columns) ** 0.5)
        >>> t = jnp.ones((4, 1))
        >>> print(tx.update(t, tx.init(t))[0].T)
        [[2. 2. 2. 2.]]
    """

    def update(updates, state, params=None, *, matrix_layout=UPRIGHT, **extra_args):
        del params, extra_args

        def scale(t: jax.Array) -> jax.Array:
            return t * factor(*t.shape[-2:][:: -1 if matrix_layout.transposed else 1])

        return jax.tree.map(in_working_dtype(scale), updates), state

    return OrientedTransformation(lambda params: optax.EmptyState(), update)


def add_cautious_decay(weight_decay: optax.ScalarOrSchedule, mask: Any = None) -> optax.GradientTransformation:
    """``optax.add_decayed_weights`` for those entries only that the update itself would bring nearer to zero.

    ``u + wd w`` where ``u w >= 0``, and u elsewhere: what the loss wants larger is left to it.

    Args:
        weight_decay: wd, number or schedule.
        mask: tree of bools, or ``(params) -> tree``: which parameters decay; None means all.

    Returns:
        A transformation to stand before the learning rate, stateless but for a schedule's count. It needs ``params``.

    Raises:
        ValueError: if the parameters are missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import add_cautious_decay
        >>> tx, w = add_cautious_decay(0.5), jnp.array([2.0, 2.0])
        >>> print(tx.update(jnp.array([1.0, -1.0]), tx.init(w), w)[0])
        [ 2. -1.]

    References:
        Chen et al., Cautious Weight Decay, arXiv 2510.12402.
    """
    if not callable(weight_decay):
        number("weight_decay", weight_decay, least=0)

    def init(params):
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32)) if callable(weight_decay) else optax.EmptyState()

    def update(updates, state, params=None):
        if params is None:
            raise ValueError("weight decay needs the parameters: call update(grads, state, params)")
        same_trees(updates, params)
        decay = in_context(weight_decay(state.count) if callable(weight_decay) else weight_decay)
        if callable(weight_decay):
            state = optax.ScaleByScheduleState(optax.safe_increment(state.count))
        return jax.tree.map(
            lambda u, w: jnp.where(u * w >= 0, u + (decay * w).astype(u.dtype), u), updates, params
        ), state

    tx = optax.GradientTransformation(init, update)
    return tx if mask is None else optax.masked(tx, mask)
