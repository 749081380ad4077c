# SPDX-License-Identifier: Apache-2.0
"""Muon+: Muon whose orthogonalised update is normalised along rows, columns, or one after the other."""

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices, fixed_orientation

# The authors' guard: the orthogonalised matrix has unit scale, so it does not see that of the gradients.
EPS = 1e-7
ORDERS = {"row": ("rows",), "col": ("columns",), "row_col": ("rows", "columns"), "col_row": ("columns", "rows")}


def muon_plus(
    learning_rate: optax.ScalarOrSchedule,
    *,
    mode: str = "row_col",
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
    """Muon+ for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; then ``O <- O / sqrt(sum O^2 + 1e-7)`` with sums
    along every row, every column, or the one after the other; and ``W <- W - lr (sqrt(m / n) O + wd W)`` with W read as
    (out, in) = m x n. The factor is below one for wide matrices, unlike Muon's.

    Args:
        learning_rate: number or schedule; about 0.02 is a start (then give ``adam_learning_rate`` too).
        mode: what is normalised, in order: ``"row"``, ``"col"``, ``"row_col"`` (the authors' default) or ``"col_row"``;
            ``norm_mode`` in their code.
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
        >>> from normpre_optax import muon_plus
        >>> tx = muon_plus(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Muon+, 2026 (github.com/K1seki221/MuonPlus).
    """
    if mode not in ORDERS:
        raise ValueError(f"{mode=} is not one of {tuple(ORDERS)}")

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(
                dims,
                chain(
                    maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide),
                    *(fixed_orientation(normalize_rows(EPS), orientation) for orientation in ORDERS[mode]),
                    scale_by_shape(lambda rows, columns: (rows / columns) ** 0.5),
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
