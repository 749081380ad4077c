# SPDX-License-Identifier: Apache-2.0
"""MuonEq: Muon after a normalization of rows, columns or both."""

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
    moonlight_scale,
    normalize_rows,
    precondition_globally,
    scale_by_shape,
)


@checked
def scale_by_muoneq(
    *,
    mode: Literal["rows", "columns", "both"] = "rows",
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """MuonEq: normalized, then orthogonalized momentum.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and for W (out, in) = m x n the
    direction ``0.2 sqrt(max(m, n)) NS5(E(U))``, where ``E`` divides every row or every
    column by its norm, or every entry by the norms of both. Use AdamW's learning rate.
    The authors add 1e-8 to squared norms; without it, as here, the direction does not
    depend on the scale of the gradient.

    Args:
        mode: "rows" (R in the authors' code), "columns" (C) or "both" (RC).

    References:
        Chang et al., MuonEq, 2026 (github.com/MaeChd/muon-eq).
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        normalize_rows(mode),
        spectral,
        scale_by_shape(moonlight_scale),
        matrix_dims=matrix_dims,
    )


muoneq = complete(scale_by_muoneq)
