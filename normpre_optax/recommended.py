# SPDX-License-Identifier: Apache-2.0
"""The recommended optimizer: momenta of two ages, orthogonalized in a metric of rows and columns, under Hyperball."""

import functools
from collections.abc import Callable
from typing import Any

import optax

from normpre_optax.optimizer import with_adamw
from normpre_optax.options import Coefficients, Number, checked
from normpre_optax.stages import direction, precondition_globally, two_momenta, with_metric


@checked
def scale_by_normpre_h(
    *,
    momentum: Number = 0.85,
    slow_momentum: Number = 0.98,
    slow_weight: Number | Callable = 0.56,
    metric_strength: Number = 0.5,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    compute_dtype: Any = None,
    mu_dtype: Any = None,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-H without its norm constraint: two momenta, orthogonalized in a metric of rows and columns.

    ``U`` mixes the gradient, a fast and a slow average of gradients (``two_momenta``), and
    ``D = diag(a) msign(diag(a) U diag(b)) diag(b)``, where a and b shrink rows and columns with large gradients
    (``with_metric``). D has no particular scale: ``hyperball`` or ``scale_to_rms`` follows.

    Args:
        momentum: decay of the fast average.
        slow_momentum: decay of the slow average.
        slow_weight: share of the slow average, number or schedule.
        metric_strength: exponent of the metric; 0 is none.

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition; Pagliardini et al., AdEMAMix, arXiv 2409.03137.
    """
    spectral = precondition_globally(ns_steps, ns_coefficients, compute_dtype)
    return direction(
        two_momenta(momentum, slow_momentum, slow_weight, accumulator_dtype=mu_dtype),  # U
        with_metric(spectral, metric_strength, matrix_dims=matrix_dims),  # D
        matrix_dims=matrix_dims,
    )


@checked
def normpre_h(
    learning_rate: Number | Callable,
    adam_learning_rate: Number | Callable,
    *,
    row_norms: Any = None,
    momentum: Number = 0.85,
    slow_momentum: Number = 0.98,
    slow_weight: Number | Callable = 0.56,
    metric_strength: Number = 0.5,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    compute_dtype: Any = None,
    learning_rate_multipliers: Any = None,
    adam_b1: Number = 0.9,
    adam_b2: Number = 0.95,
    adam_eps: Number = 1e-8,
    adam_weight_decay: Number | Callable = 0.1,
    weight_decay_mask: Any = None,
    mu_dtype: Any = None,
    matrix_dims: Any = None,
    shardings: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-H, the recommended optimizer: two momenta, orthogonalized in a metric; weights with a fixed norm.

    ``U`` mixes the gradient, a fast and a slow average of gradients (``two_momenta``). With Newton-Schulz iterations,
    ``D = diag(a) msign(diag(a) U diag(b)) diag(b)``, where a and b shrink rows and columns with large gradients
    (``with_metric``). Then ``W <- R N(N(W) - lr N(D))``, see ``hyperball``: the first update sets the norm ``R`` of
    every matrix, so the result does not depend on the scale of the initialization. Everything that is not a hidden
    matrix uses AdamW. It is for training from scratch: the first update would change the norms of trained weights.

    Args:
        learning_rate: of hidden matrices: size of a step relative to the weights, number or schedule. 1.6e-2 is a good
            peak for 1,500 steps; shorter runs need more, longer ones less (``docs/choosing.md``).
        adam_learning_rate: of the AdamW group, number or schedule: what you use with AdamW.
        momentum: decay of the fast average of gradients.
        slow_momentum: decay of the slow average.
        slow_weight: share of the slow average, number or schedule.
        metric_strength: exponent of the metric of rows and columns; 0 is none.
        adam_weight_decay: weight decay of the AdamW group.

    Returns:
        The complete optimizer; its state is that of ``optax.partition``.

    Raises:
        TypeError: if an option does not exist or has the wrong type.
        ValueError: if a number is out of range, or no rule covers a parameter; see ``with_adamw``.

    Example:
        >>> import jax.numpy as jnp, normpre_optax as npo
        >>> tx = npo.normpre_h(1.6e-2, adam_learning_rate=3e-3)
        >>> params = {"dense": {"kernel": jnp.eye(4, 8), "bias": jnp.ones(8)}}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition; Wen et al., Hyperball, arXiv 2606.16899.
    """
    direction = functools.partial(
        scale_by_normpre_h,
        momentum=momentum,
        slow_momentum=slow_momentum,
        slow_weight=slow_weight,
        metric_strength=metric_strength,
        ns_steps=ns_steps,
        ns_coefficients=ns_coefficients,
        compute_dtype=compute_dtype,
        mu_dtype=mu_dtype,
    )
    return with_adamw(
        direction,
        learning_rate,
        norm_control="hyperball",
        row_norms=row_norms,
        adam_learning_rate=adam_learning_rate,
        learning_rate_multipliers=learning_rate_multipliers,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        weight_decay_mask=weight_decay_mask,
        mu_dtype=mu_dtype,
        matrix_dims=matrix_dims,
        shardings=shardings,
    )
