# SPDX-License-Identifier: Apache-2.0
"""NorMuon: Muon with one second moment per neuron."""

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
    keller_scale,
    precondition_globally,
    scale_by_row_moment,
    scale_by_shape,
)


@checked
def scale_by_normuon(
    *,
    b2: Number = 0.95,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """NorMuon: orthogonalized momentum, rows divided by root second moments.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; per row ``v_i = b2
    v_i + (1 - b2) mean(O_i^2)`` and ``O'_i = O_i / (sqrt(v_i) + 1e-10)``; the direction
    is ``sqrt(max(1, m / n)) O' ||O||_F / ||O'||_F`` for W (out, in) = m x n. Start from
    a learning rate of 0.02, and pass ``adam_learning_rate``.

    Args:
        b2: decay of the second moments of rows.

    References:
        Li et al., NorMuon, arXiv 2510.05491 (github.com/zichongli5/NorMuon).
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        spectral,
        scale_by_row_moment(b2),
        scale_by_shape(keller_scale),
        matrix_dims=matrix_dims,
    )


normuon = complete(scale_by_normuon)
