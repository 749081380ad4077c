# SPDX-License-Identifier: Apache-2.0
"""Muon+: Muon with rows and columns normalized afterwards."""

from typing import Literal

import optax

from normpre_optax.optimizer import complete
from normpre_optax.options import (
    Coefficients,
    DimsTree,
    Dtype,
    Norm,
    Number,
    Operands,
    checked,
)
from normpre_optax.stages import (
    direction,
    normalize_successively,
    precondition_globally,
    scale_by_shape,
)

ORDERS = {
    "rows": ("rows",),
    "columns": ("columns",),
    "both": ("rows", "columns"),
    "columns_rows": ("columns", "rows"),
}


def root_aspect(m: int, n: int) -> float:
    """Return ``sqrt(m / n)``, without the maximum of Keller Jordan's Muon."""
    return (m / n) ** 0.5


@checked
def scale_by_muon_plus(
    *,
    mode: Literal["rows", "columns", "both", "columns_rows"] = "both",
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon+: orthogonalized, then normalized momentum.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; then ``O / sqrt(sum
    O^2 + 1e-7)`` over rows, columns, or one after the other; the direction is ``sqrt(m
    / n) O`` for W (out, in) = m x n. Start from a learning rate of 0.02, and pass
    ``adam_learning_rate``.

    Args:
        mode: "rows", "columns", "both" (rows, then columns, the authors' default) or
            "columns_rows".

    References:
        Muon+, 2026 (github.com/K1seki221/MuonPlus).
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        spectral,
        # Rows that are rounding errors of the orthogonalization stay below norm one.
        normalize_successively(ORDERS[mode], eps=1e-7),
        scale_by_shape(root_aspect),
        matrix_dims=matrix_dims,
    )


muon_plus = complete(scale_by_muon_plus)
