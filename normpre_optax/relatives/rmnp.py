# SPDX-License-Identifier: Apache-2.0
"""RMNP: rows of the momentum, normalized."""

import optax

from normpre_optax.optimizer import complete
from normpre_optax.options import DimsTree, Dtype, Number, checked
from normpre_optax.stages import direction, keller_scale, normalize_rows, scale_by_shape


@checked
def scale_by_rmnp(
    *,
    momentum: Number = 0.95,
    nesterov: bool = True,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """RMNP: every row of the momentum divided by its norm.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and for every row i of W (out, in) =
    m x n the direction ``sqrt(max(1, m / n)) U_i / ||U_i||``. Start from a learning
    rate of 0.02, and pass ``adam_learning_rate``. The authors use no weight decay.

    References:
        RMNP, arXiv 2603.20527 (github.com/Dominator-Index/RMNP).
    """
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        normalize_rows(),
        scale_by_shape(keller_scale),
        matrix_dims=matrix_dims,
    )


rmnp = complete(scale_by_rmnp)
