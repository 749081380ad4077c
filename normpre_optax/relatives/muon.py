# SPDX-License-Identifier: Apache-2.0
"""Muon, with its two scale conventions."""

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
    CONVENTIONS,
    direction,
    precondition_globally,
    scale_by_shape,
)


@checked
def scale_by_muon(
    *,
    convention: Literal["moonlight", "keller"] = "moonlight",
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Muon: orthogonalized momentum.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and for W (out, in) = m x n the
    direction ``s NS5(U)`` with ``s = 0.2 sqrt(max(m, n))`` ("moonlight": use AdamW's
    learning rate) or ``s = sqrt(max(1, m / n))`` ("keller": start from a learning rate
    of 0.02, and pass ``adam_learning_rate``).

    Args:
        convention: "moonlight" or "keller".

    References:
        Jordan et al., Muon, 2024; Liu et al., arXiv 2502.16982.
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        spectral,
        scale_by_shape(CONVENTIONS[convention]),
        matrix_dims=matrix_dims,
    )


muon = complete(scale_by_muon)
