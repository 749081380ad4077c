# SPDX-License-Identifier: Apache-2.0
"""Momentum of two ages."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from normpre_optax.checks import check_numbers


class TwoMomentaState(NamedTuple):
    """Number of updates so far, int32 ``()``, and two averages of the updates.

    ``fast`` and ``slow`` are trees like the parameters.
    """

    count: ArrayLike  # pyright: ignore[reportIncompatibleMethodOverride]
    fast: optax.Updates
    slow: optax.Updates


def two_momenta(
    fast: ArrayLike = 0.85,
    slow: ArrayLike = 0.98,
    slow_weight: ArrayLike | Callable = 0.56,
    gradient_share: ArrayLike = 0.05,
    accumulator_dtype: DTypeLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Mix a fast and a slow average of the gradients with the gradient.

    ``M1 = b1 M1 + (1 - b1) G`` and ``M2 = b2 M2 + (1 - b2) G``, each with Adam's bias
    correction, and ``U = s G + (1 - s) ((1 - w) M1 + w M2)``. The age of an average is
    ``1 / (1 - b)`` steps. While the slow average is young it hurts, so a constant
    weight is multiplied by ``(1 - b2^t)^4`` at step t: 0.16 after one age, 0.93 after
    four.

    Args:
        fast: b1, decay of the fast average.
        slow: b2, decay of the slow average.
        slow_weight: w, share of the slow average: a number, which is approached as
            above, or a schedule (which ``optax.inject_hyperparams`` turns into a
            number, unless it is in ``static_args``).
        gradient_share: s, share of the gradient: Nesterov's term.
        accumulator_dtype: dtype of both averages; None means that of the updates.

    Returns:
        An optax transformation. Its state is twice the size of the parameters.

    Raises:
        ValueError: if a number is not in [0, 1).

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import two_momenta
        >>> tx = two_momenta(
        ...     fast=0.5, slow=0.75, slow_weight=lambda step: 0.5, gradient_share=0.0
        ... )
        >>> _, state = tx.update(jnp.ones(1), tx.init(jnp.zeros(1)))
        >>> print(tx.update(jnp.zeros(1), state)[0])  # half of 1/3 and of 3/7
        [0.38095...]

    References:
        Pagliardini, Ablin and Grangier, AdEMAMix, arXiv 2409.03137.
    """
    check_numbers(fast=fast, slow=slow, slow_weight=slow_weight)
    check_numbers(gradient_share=gradient_share, accumulator_dtype=accumulator_dtype)

    def init(params):
        def zeros():
            return optax.tree.zeros_like(params, accumulator_dtype)

        return TwoMomentaState(jnp.zeros((), jnp.int32), fast=zeros(), slow=zeros())

    def update(updates, state, params=None, **_):
        count = optax.safe_increment(state.count)
        t = jnp.asarray(count, float)
        if callable(slow_weight):
            weight = slow_weight(state.count)
        else:
            weight = slow_weight * (1 - slow**t) ** 4
        m1 = optax.tree.update_moment(updates, state.fast, fast, 1)
        m2 = optax.tree.update_moment(updates, state.slow, slow, 1)
        # The divisors are Adam's bias corrections.
        share1 = (1 - gradient_share) * (1 - weight) / (1 - fast**t)
        share2 = (1 - gradient_share) * weight / (1 - slow**t)

        def mixed(g, a, b):
            return (gradient_share * g + share1 * a + share2 * b).astype(g.dtype)

        new = jax.tree.map(mixed, updates, m1, m2)
        return new, TwoMomentaState(
            count,
            optax.tree.cast(m1, accumulator_dtype),
            optax.tree.cast(m2, accumulator_dtype),
        )

    return optax.GradientTransformationExtraArgs(init, update)
