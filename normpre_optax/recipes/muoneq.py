# SPDX-License-Identifier: Apache-2.0
"""MuonEq: Muon of a momentum whose rows, columns or both are made equal first."""

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.normalize import equalize_rows_and_columns, normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices, fixed_orientation

# What is brought to length one before the orthogonalisation.
EQUALIZERS = {
    "R": normalize_rows(),
    "C": fixed_orientation(normalize_rows(), "columns"),
    "RC": equalize_rows_and_columns(),
}


def muoneq(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mode: str = "R",
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
    """MuonEq for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W <- W - lr (0.2 sqrt(max(m, n)) NS5(E(U)) + wd W)`` with W read as
    (out, in) = m x n. ``E`` divides every row of U by its length (``mode="R"``, the default), every column by its own
    (``"C"``), or every entry by both, rows and columns being measured on the same U (``"RC"``).

    The authors add 1e-8 to squared lengths. Here lengths neither overflow nor vanish and zero rows stay zero, so that
    the result does not depend on the gradient's scale; the two agree to 1e-8 over the squared lengths.

    Args:
        learning_rate: number or schedule; AdamW's.
        mode: ``"R"``, ``"C"`` or ``"RC"``.
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
        ValueError: if ``mode`` is unknown; see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import muoneq
        >>> tx = muoneq(1e-3, mode="RC")
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Chang et al., MuonEq, 2026 (github.com/MaeChd/muon-eq).
    """
    if mode not in EQUALIZERS:
        raise ValueError(f"{mode=} is not one of {tuple(EQUALIZERS)}")

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(
                dims,
                chain(
                    EQUALIZERS[mode],
                    maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide),
                    scale_by_shape(lambda rows, columns: 0.2 * max(rows, columns) ** 0.5),
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
