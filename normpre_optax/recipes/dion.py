# SPDX-License-Identifier: Apache-2.0
"""Dion: the leading directions of the momentum at size one, and the rest kept for later."""

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.transforms.low_rank import discount_low_rank, error_feedback, orthogonalize_low_rank
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices


def dion(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 768,
    seed: int = 0,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    weight_decay_mask=None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Dion for hidden matrices, AdamW for everything else.

    With W read as (out, in) = m x n: ``M = M + G``; ``P = qr(M Q)``, ``R = M^T P``; ``M = M - (1 - mu) P R^T``;
    ``Q = R`` with columns of length one; ``W <- W - lr (sqrt(m / n) P Q^T + wd W)``. ``Q`` (n x rank) starts from
    Gaussian draws. Only products with thin matrices are needed, and what is not found stays in M until it is.

    The authors add 1e-8 to the columns' lengths, and their QR fills directions in which M has nothing with arbitrary
    ones; here such a direction gives nothing and keeps its column of Q, so that a zero gradient gives a zero update and
    does no harm. Q is kept in float32; M lies as the parameter does. Their
    default of weight decay is 0.01.

    Args:
        learning_rate: number or schedule; 0.01 to 0.02 is a start (then give ``adam_learning_rate`` too).
        rank: directions found a step; no more than the shorter side.
        seed: of the draws with which Q starts.
        momentum: ``mu``: ``1 - mu`` of what was found leaves M.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype of the operands of products with M, sums in float32; None: the device's usual product.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ``rank`` or ``seed`` is out of range; see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import dion
        >>> tx = dion(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Ahn et al., Dion, arXiv 2504.05295 (github.com/microsoft/dion).
    """

    def direction(dims):
        return optax.chain(
            error_feedback(
                as_matrices(dims, orthogonalize_low_rank(rank, seed, compute_dtype)),
                as_matrices(dims, discount_low_rank(1 - momentum, compute_dtype)),
                mu_dtype,
            ),
            as_matrices(dims, scale_by_shape(lambda rows, columns: (rows / columns) ** 0.5)),
        )

    return assemble(
        direction,
        learning_rate,
        RestOptions(
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
            matrix_dims=matrix_dims,
            adam_learning_rate=adam_learning_rate,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_eps=adam_eps,
            adam_weight_decay=adam_weight_decay,
        ),
    )
