# SPDX-License-Identifier: Apache-2.0
"""NorMuon: Muon with one second moment a neuron."""

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.second_moment import scale_by_row_moment
from normpre_optax.transforms.wrappers import as_matrices


def normuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    b2: jax.typing.ArrayLike = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence = "muon",
    divide: bool = True,
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
    shardings=None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; for every row i of (out, in) = m x n
    ``v_i = b2 v_i + (1 - b2) mean(O_i^2)`` and ``O'_i = O_i / (sqrt(v_i) + 1e-10)``; then
    ``W <- W - lr (sqrt(max(1, m / n)) O' ||O||_F / ||O'||_F + wd W)``.

    The authors' code keeps ``(1 - mu)`` times this momentum; orthogonalisation forgets the factor.

    Args:
        learning_rate: number or schedule: the authors' is 0.02 (then give ``adam_learning_rate`` too).
        b2: decay of the rows' second moments, which are kept as one float32 number a row.
        nesterov: whether the update looks one gradient ahead, ``U = G + mu M``, or is ``M`` itself.
        ns_steps: Newton-Schulz iterations; None orthogonalises exactly.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, a triple, or a triple a step.
        divide: see ``normpre_g``.
        momentum: ``mu``.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype of the Newton-Schulz products' operands, sums in float32; None: the device's usual product.
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
        ValueError: if ``b2`` is not in [0, 1); see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normuon
        >>> tx = normuon(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Li et al., NorMuon, arXiv 2510.05491 (github.com/zichongli5/NorMuon).
    """

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(
                dims,
                chain(
                    maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide),
                    scale_by_row_moment(b2),
                    scale_by_shape(lambda rows, columns: max(1, rows / columns) ** 0.5),
                ),
            ),
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
