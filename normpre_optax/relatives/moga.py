# SPDX-License-Identifier: Apache-2.0
"""MOGA: normalized rows or columns at a scale that transfers over widths."""

from typing import Literal

import optax

from normpre_optax.optimizer import complete
from normpre_optax.options import DimsTree, Dtype, Number, checked
from normpre_optax.stages import direction, normalize_rows, scale_by_shape


def scale_of_rows(m: int, n: int) -> float:
    """Return the norm of every row of the direction."""
    return n**-0.5


def scale_of_columns(m: int, n: int) -> float:
    """Return the norm of every column of the direction."""
    return m**0.5 / n


SCALES = {"rows": scale_of_rows, "columns": scale_of_columns}


@checked
def scale_by_moga(
    *,
    mode: Literal["rows", "columns"] = "rows",
    momentum: Number = 0.95,
    nesterov: bool = True,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """MOGA (p = 2): rows or columns of the momentum divided by their norms.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and for W (out, in) = m x n the
    direction ``n^-1/2 U_i / ||U_i||`` for every row i, or ``m^1/2 / n U_j / ||U_j||``
    for every column j. Entries are about 1 / n: start from ``0.2 n`` times AdamW's
    learning rate, and pass ``adam_learning_rate``. The authors published no code.

    Args:
        mode: "rows" (output neurons) or "columns".

    References:
        Xu, Li and Lu, On the Width Scaling of Neural Optimizers, arXiv 2603.09952.
    """
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        normalize_rows(mode),
        scale_by_shape(SCALES[mode]),
        matrix_dims=matrix_dims,
    )


moga = complete(scale_by_moga)
