# SPDX-License-Identifier: Apache-2.0
"""MANO: momentum projected against the weights and normalised, columns and rows in turn."""

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.transforms.tangent import normalize_tangent_rows
from normpre_optax.transforms.wrappers import alternate_orientation, as_matrices, in_dtype

# Version 1 projects against unit vectors of W, version 2 against the vectors themselves.
TANGENTS = {1: "strict", 2: "relaxed"}


def mano(
    learning_rate: optax.ScalarOrSchedule,
    *,
    version: int = 1,
    nesterov: bool = False,
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
    """MANO for hidden matrices, AdamW for everything else.

    ``M = mu M + G``; then for every column on the first step, every row on the next, and so on in turn, with ``d``
    entries each: ``X = M - <M, w> w``, where ``w`` is W's unit vector (version 1) or W's own (version 2), and
    ``W <- W - lr (0.2 sqrt(d) X / ||X|| + wd W)``.

    The authors guard their divisions with 1e-8. Here lengths neither overflow nor vanish and zero vectors stay zero, so
    that the result does not depend on the gradient's scale; the two agree to 1e-8 relative to the lengths involved.

    Args:
        learning_rate: number or schedule; AdamW's.
        version: of the authors' code: 1 (``mano.py``) or 2 (``mano_v2.py``, which they run with ``nesterov=True``).
        nesterov: whether the update looks one gradient ahead, ``U = G + mu M``.
        momentum: ``mu``.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype in which the momentum is projected and normalised; None means at least float32.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: if ``version`` is unknown; see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import mano
        >>> tx = mano(1e-3)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Gu and Xie, Mano, 2026 (github.com/xie-lab-ml).
    """
    if isinstance(version, jax.Array) or version not in TANGENTS:
        raise ValueError(f"{version=} is neither 1 nor 2 (under optax.inject_hyperparams it must be a static argument)")
    vectors = normalize_tangent_rows(TANGENTS[version], length=lambda rows, columns: 0.2 * columns**0.5)

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(dims, in_dtype(compute_dtype, alternate_orientation(vectors, first="columns"))),
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
