# SPDX-License-Identifier: Apache-2.0
"""MANO: tangent projection and normalization without a spectral stage."""

from typing import Literal

import optax

from normpre_optax.optimizer import complete
from normpre_optax.options import DimsTree, Dtype, Number, checked
from normpre_optax.stages import direction, normalize_tangent
from normpre_optax.stages.rows import Tangent

# Version 1 projects with W's unit vectors, version 2 with W's own.
TANGENTS: dict[int, Tangent] = {1: "strict", 2: "relaxed"}


def norm_for_rms(entries: int) -> float:
    """Return the norm of a row whose root mean square is 0.2."""
    return 0.2 * entries**0.5


@checked
def scale_by_mano(
    *,
    version: Literal[1, 2] = 1,
    momentum: Number = 0.95,
    nesterov: bool = False,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """MANO: projected and normalized momentum, by columns and rows in turn.

    ``M = mu M + G``; for every column on the first step, every row on the next, with
    ``d`` entries each: ``X = M - <M, w> w``, where ``w`` is W's unit vector (version 1)
    or W's own (version 2); the direction is ``0.2 sqrt(d) X / ||X||``. Use AdamW's
    learning rate. The authors add 1e-8 to norms; without it, as here, the direction
    does not depend on the scale of the gradient.

    Args:
        version: of the authors' code: 1 (``mano.py``) or 2 (``mano_v2.py``, which they
            run with ``nesterov=True``).

    References:
        Gu and Xie, Mano, 2026 (github.com/xie-lab-ml).
    """
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),
        normalize_tangent(TANGENTS[version], first="columns", norm=norm_for_rms),
        matrix_dims=matrix_dims,
    )


mano = complete(scale_by_mano)
