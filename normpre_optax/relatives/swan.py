# SPDX-License-Identifier: Apache-2.0
"""SWAN: the gradient standardized and whitened, without momentum."""

import optax

from normpre_optax.checks import static_int
from normpre_optax.optimizer import complete
from normpre_optax.options import DimsTree, Number, Operands, checked
from normpre_optax.stages import direction, standardize_rows, whiten


@checked
def scale_by_swan(
    *,
    whitening_steps: int = 6,
    rms: Number | None = None,
    compute_dtype: Operands = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """SWAN: standardized and whitened gradients.

    ``S_i = (G_i - mean(G_i)) / std(G_i)`` for every row of W (out, in) = m x n; the
    direction is ``Z S`` with ``Z ~ (S S^T / ||S S^T||_F)^(-1/2)`` by coupled
    Newton-Schulz iterations. Matrices have no optimizer state. The rule follows
    third-party ports; the authors published no code.

    Args:
        whitening_steps: iterations for the inverse root.
        rms: root mean square of every matrix update; 0.2 gives AdamW's size and
            learning rate. None keeps the rule's own size, about ``n^(1/2) m^(1/4)`` in
            spectral norm.

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148.
    """
    # `whiten` names its own argument `steps`, so the option is checked here.
    static_int("whitening_steps", whitening_steps, least=1, below=1000)
    # No momentum: the rows of a single gradient are standardized.
    return direction(
        standardize_rows(),
        whiten(whitening_steps, compute_dtype, rms),
        matrix_dims=matrix_dims,
    )


swan = complete(scale_by_swan)
