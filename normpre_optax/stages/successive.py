# SPDX-License-Identifier: Apache-2.0
"""The normalization of Muon+: of rows, of columns, or of one after the other."""

from collections.abc import Sequence
from typing import get_args

import jax
import jax.numpy as jnp
import optax

from normpre_optax.checks import check_choice, check_numbers
from normpre_optax.linalg.products import inverse_root
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.stages.rows import Side
from normpre_optax.stages.stage import per_parameter
from normpre_optax.trees import DimsTree


def normalize_successively(
    sides: Sequence[Side] = ("rows", "columns"),
    eps: float = 1e-7,
    *,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Divide rows or columns by their norms, one side after the other.

    ``X_i / sqrt(||X_i||^2 + eps)`` for every row or column i, with the norms of the
    result of the side before.

    Args:
        sides: "rows" and "columns", in the order of their normalization.
        eps: added to squared norms, so that rows of rounding errors stay small. The
            norms of an orthogonal matrix are of order one.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage. Zero rows and columns stay zero.

    Raises:
        TypeError: if ``sides`` is not a sequence.
        ValueError: if a side is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.stages import normalize_successively
        >>> kernel = jnp.array([[3.0, 0.0], [4.0, 1.0]])  # (in, out)
        >>> print(normalize_successively().update(kernel, ())[0].T.round(3))
        [[1.    0.625]
         [0.    0.781]]

    References:
        Muon+, 2026 (github.com/K1seki221/MuonPlus).
    """
    # A string is a sequence, but one of letters.
    if isinstance(sides, str) or not isinstance(sides, Sequence):
        raise TypeError(f"sides must be a sequence of names, got {sides!r}")
    for side in sides:
        check_choice("sides", side, get_args(Side))
    check_numbers(eps=eps)

    def normalize(x: jax.Array, w: jax.Array | None, dims: MatrixDims) -> jax.Array:
        _, outputs, inputs = split_axes(x.ndim, dims)
        for side in sides:
            along = inputs if side == "rows" else outputs
            x = x * inverse_root(jnp.sum(x * x, along, keepdims=True) + eps)
        return x

    return per_parameter(normalize, matrix_dims)
