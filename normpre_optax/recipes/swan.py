# SPDX-License-Identifier: Apache-2.0
"""SWAN: the gradient standardised and whitened, without momentum and without state."""

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.normalize import standardize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import whiten
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.wrappers import as_matrices


def swan(
    learning_rate: optax.ScalarOrSchedule,
    *,
    whitening_steps: int = 6,
    divide: bool = True,
    rms: jax.typing.ArrayLike | None = None,
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
    shardings=None,
) -> optax.GradientTransformationExtraArgs:
    """SWAN for hidden matrices, AdamW for everything else.

    For W read as (out, in): ``S_i = (G_i - mean(G_i)) / std(G_i)`` for every row, ``T = Z S`` with
    ``Z ~ (S S^T / ||S S^T||_F)^(-1/2)`` by coupled Newton-Schulz iterations, and ``W <- W - lr (T + wd W)``. There is
    no momentum: matrices have no optimizer state at all.

    The rule is the paper's as others have ported it. The authors whiten with m x m products; here they are as large
    as the shorter side, with the same result. The size of T, about ``n^(1/2) m^(1/4)`` in spectral norm for a wide
    matrix, is the rule's own; ``rms=0.2`` gives it AdamW's.

    Args:
        learning_rate: number or schedule; AdamW's with ``rms=0.2``.
        whitening_steps: iterations for the inverse root.
        divide: see ``normpre_g``.
        rms: root mean square of every matrix update before the learning rate; None leaves the size as it comes.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: of AdamW; see ``normpre``.
        compute_dtype: dtype of the whitening products' operands, sums in float32; None: the device's usual product.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.
        shardings: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: see ``normpre``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import swan
        >>> tx = swan(1e-3, rms=0.2)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148.
    """

    def direction(dims):
        return as_matrices(
            dims,
            chain(standardize_rows(), maybe_divided(whiten(whitening_steps, compute_dtype), divide), scale_to_rms(rms)),
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
            shardings=shardings,
        ),
    )
