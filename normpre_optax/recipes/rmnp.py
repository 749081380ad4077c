# SPDX-License-Identifier: Apache-2.0
"""RMNP: every row of the momentum at length one, in place of Muon's orthogonalisation."""

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices, in_dtype


def rmnp(
    learning_rate: optax.ScalarOrSchedule,
    *,
    nesterov: bool = True,
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
    """RMNP for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W_i <- W_i - lr (sqrt(max(1, m / n)) U_i / ||U_i|| + wd W_i)`` for
    every row i of W read as (out, in) = m x n: rows are output neurons for tall matrices too.

    The authors' default is no weight decay; 0.1 here as in the other optimizers of this library. Lengths neither
    overflow nor vanish and zero rows stay zero, so that the result does not depend on the gradient's scale.

    Args:
        learning_rate: number or schedule: the authors' is 0.02 (then give ``adam_learning_rate`` too).
        nesterov: whether the update looks one gradient ahead, ``U = G + mu M``, or is ``M`` itself.
        momentum: ``mu``.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype in which rows are normalised; None means at least float32.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: see ``normpre``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import rmnp
        >>> tx = rmnp(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        RMNP, arXiv 2603.20527 (github.com/Dominator-Index/RMNP).
    """

    def direction(dims):
        rows = chain(normalize_rows(), scale_by_shape(lambda rows, columns: max(1, rows / columns) ** 0.5))
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(dims, in_dtype(compute_dtype, rows)),
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
