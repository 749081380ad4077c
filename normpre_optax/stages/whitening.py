# SPDX-License-Identifier: Apache-2.0
"""The stages of SWAN: rows of mean 0 and deviation 1, and whitened matrices."""

import jax
import optax
from jax.typing import ArrayLike, DTypeLike

from normpre_optax.checks import check_numbers, static_int
from normpre_optax.linalg import whitening
from normpre_optax.parameters.dims import MatrixDims, split_axes
from normpre_optax.stages.execution import EachMatrix, spectral
from normpre_optax.stages.stage import per_parameter
from normpre_optax.trees import DimsTree


def standardize_rows(
    *, matrix_dims: DimsTree = None
) -> optax.GradientTransformationExtraArgs:
    """Give every row mean 0 and standard deviation 1.

    Args:
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stateless stage. Constant rows become zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.stages import standardize_rows
        >>> kernel = jnp.array([[1.0, 2.0], [5.0, 2.0]])  # (in, out)
        >>> print(standardize_rows().update(kernel, ())[0].round(4))
        [[-1.  0.]
         [ 1.  0.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148 ("GradNorm").
    """

    def standardize(x: jax.Array, w: jax.Array | None, dims: MatrixDims) -> jax.Array:
        _, _, inputs = split_axes(x.ndim, dims)
        return whitening.standardized_rows(x, inputs)

    return per_parameter(standardize, matrix_dims)


def whiten(
    steps: int = 6,
    compute_dtype: DTypeLike | None = None,
    rms: ArrayLike | None = None,
    *,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """Multiply every matrix by the inverse root of its Gram matrix.

    ``T ~ (X X^T / ||X X^T||_F)^(-1/2) X``.

    Args:
        steps: coupled Newton-Schulz iterations for the inverse root.
        compute_dtype: see ``precondition_globally``.
        rms: if given, scale every result to this root mean square. Without it singular
            values approach ``||X X^T||_F^(1/2)``.
        matrix_dims: see ``normpre_g``; ``direction`` overrides it.

    Returns:
        A stage. On a mesh, every matrix is computed on one device, or on several that
        have copies.

    Raises:
        TypeError: if ``steps`` is traced.
        ValueError: if ``steps`` is less than 1, or ``rms`` is not positive.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax.stages import whiten
        >>> tx, x = whiten(steps=12), jnp.diag(jnp.array([4.0, 3.0]))
        >>> print((tx.update(x, tx.init(x))[0] / (4.0**4 + 3.0**4) ** 0.25).round(4))
        [[1. 0.]
         [0. 1.]]

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148.
    """
    check_numbers(rms=rms, compute_dtype=compute_dtype)
    # The iterations are unrolled: their number is limited.
    iterations = static_int("steps", steps, least=1, below=1000)
    options = (("steps", iterations), ("compute_dtype", compute_dtype))
    f = EachMatrix(whitening.whiten, options)
    return spectral(f, rms=rms, matrix_dims=matrix_dims)
