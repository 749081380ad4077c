# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: Muon on the signs of the momentum, with second moments of entries."""

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
from normpre_optax.stages import direction, precondition_globally, scale_to_rms


@checked
def scale_by_adamuon(
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """AdaMuon: orthogonalized signs of the momentum over their root second moments.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(sign(U))``; per entry ``V =
    mu V + (1 - mu) O^2`` and ``O' = O / (sqrt(V) + 1e-8)``; the direction is ``0.2 O' /
    RMS(O')``. Use AdamW's learning rate.

    References:
        Si, Zhang and Shen, AdaMuon, arXiv 2507.11005 (github.com/Chongjie-Si/AdaMuon).
    """
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, ns_norm=ns_norm
    )
    # Second moments decay as the momentum, in the authors' code.
    moments = optax.scale_by_rms(momentum, eps=1e-8, eps_in_sqrt=False)
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        optax.scale_by_sign(),
        spectral,
        moments,
        scale_to_rms(0.2),
        matrix_dims=matrix_dims,
    )


adamuon = complete(scale_by_adamuon)
