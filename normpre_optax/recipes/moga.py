# SPDX-License-Identifier: Apache-2.0
"""MOGA: rows or columns at length one, at a scale that carries over from one width to another."""

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices, fixed_orientation, in_dtype

# Of (out, in) = m x n, so that a learning rate found at one width holds at another.
SCALES = {
    "rows": lambda rows, columns: columns**-0.5,
    "columns": lambda rows, columns: rows**0.5 / columns,
}


def moga(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mode: str = "rows",
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
    """MOGA (p = 2) for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and with W read as (out, in) = m x n
    ``W_i <- W_i - lr (n^-1/2 U_i / ||U_i|| + wd W_i)`` for every row i (``mode="rows"``), or
    ``W_j <- W_j - lr (m^1/2 / n U_j / ||U_j|| + wd W_j)`` for every column j (``mode="columns"``).

    Its authors give no code; the rule is the paper's as others have ported it, with Nesterov momentum as there.
    Lengths neither overflow nor vanish and zero rows stay zero.

    Args:
        learning_rate: number or schedule. Entries of the direction are about 1 / n: ``0.2 n`` times AdamW's rate makes
            updates as large as AdamW's (then give ``adam_learning_rate`` too).
        mode: ``"rows"`` (output neurons) or ``"columns"``.
        nesterov: whether the update looks one gradient ahead, ``U = G + mu M``, or is ``M`` itself.
        momentum: ``mu``.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype in which rows or columns are normalised; None means at least float32.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ``mode`` is unknown; see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import moga
        >>> tx = moga(0.05, adam_learning_rate=3e-4)  # n = 768
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Xu, Li and Lu, On the Width Scaling of Neural Optimizers, arXiv 2603.09952.
    """
    if mode not in SCALES:
        raise ValueError(f"{mode=} is not one of {tuple(SCALES)}")

    def direction(dims):
        vectors = chain(fixed_orientation(normalize_rows(), mode), scale_by_shape(SCALES[mode]))
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(dims, in_dtype(compute_dtype, vectors)),
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
