# SPDX-License-Identifier: Apache-2.0
r"""NormPre: normalize, then precondition.

Algorithm 1 of the paper is the chain in ``scale_by_normpre``. The other two functions
choose its spectral stage.

A layer with weights ``W`` (out, in) and gradient ``G``; ``O_k`` transposes on every
other step, k = step mod 2::

    M   = mu M + G                                                momentum
    X   = rows of O_k(M) minus their part along rows of O_k(W)    relaxed tangent
    Psi = rows of X, divided by their norms                       normalization
    T   = msign(Psi)                                              NormPre-G, or
          Psi with its leading singular values clipped to one     NormPre-L
    W   = W - lr (0.2 O_k^-1(T) / RMS(T) + wd W)

Nothing is transposed: stages receive the axes, and ``O_k`` selects whether sums run
over the inputs or the outputs.
"""

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
from normpre_optax.stages.rows import Orientation, Tangent, normalize_tangent
from normpre_optax.stages.scale import scale_to_rms
from normpre_optax.stages.spectral import precondition_globally, precondition_locally
from normpre_optax.stages.stage import check_transformation, direction


@checked
def scale_by_normpre(
    precondition: optax.GradientTransformation,
    *,
    momentum: Number = 0.95,
    nesterov: bool = False,
    tangent: Tangent = "relaxed",
    orientation: Orientation = "alternating",
    rms: Number | None = 0.2,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre with any spectral stage: Algorithm 1.

    Args:
        precondition: the spectral stage ``T``: ``precondition_globally()``,
            ``precondition_locally()``, or any optax transformation.
        tangent: "relaxed" (the paper), "strict" or "none"; see ``project_to_tangent``.
        orientation: "alternating" (rows first), "rows", "columns", or "both" (rows,
            then columns, at every step). Rows are output neurons.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from normpre_optax import precondition_globally, scale_by_normpre
        >>> tx = optax.chain(
        ...     scale_by_normpre(precondition_globally()), optax.scale(-1e-3)
        ... )
        >>> params = {"kernel": jnp.ones((4, 8)) / 3}
        >>> grads = {"kernel": jax.random.normal(jax.random.key(0), (4, 8))}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(f"{jnp.sqrt(jnp.mean(updates['kernel'] ** 2)):.7f}")
        0.0002000

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition, Algorithm 1.
    """
    check_transformation("precondition", precondition)
    return direction(
        optax.trace(momentum, nesterov, mu_dtype),  # M
        normalize_tangent(tangent, orientation),  # X, Psi
        precondition,  # T
        scale_to_rms(rms),  # 0.2 T / RMS(T); nothing if the stage above has scaled it
        matrix_dims=matrix_dims,
    )


@checked
def scale_by_normpre_g(
    *,
    momentum: Number = 0.95,
    nesterov: bool = False,
    tangent: Tangent = "relaxed",
    orientation: Orientation = "alternating",
    rms: Number | None = 0.2,
    ns_steps: int | None = 5,
    ns_coefficients: Coefficients = "muon",
    ns_norm: Norm = "frobenius",
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G: global spectral preconditioning, ``T = msign(Psi)``.

    With an RMS of 0.2, updates have the size of AdamW's: start from AdamW's learning
    rate.

    Args:
        tangent: "relaxed" (the paper), "strict" or "none"; see ``project_to_tangent``.
        orientation: "alternating" (rows first), "rows", "columns", or "both" (rows,
            then columns, at every step). Rows are output neurons.

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition, "NormPre-G".
    """
    # T, and its scale.
    spectral = precondition_globally(
        ns_steps, ns_coefficients, compute_dtype, rms, ns_norm
    )
    return scale_by_normpre(
        spectral,
        momentum=momentum,
        nesterov=nesterov,
        tangent=tangent,
        orientation=orientation,
        rms=None,  # the spectral stage scales
        mu_dtype=mu_dtype,
        matrix_dims=matrix_dims,
    )


@checked
def scale_by_normpre_l(
    *,
    rank: int | float = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: Literal["sketch", "products", "exact"] = "sketch",
    seed: int = 0,
    relative_threshold: Number | None = None,
    momentum: Number = 0.95,
    nesterov: bool = False,
    tangent: Tangent = "relaxed",
    orientation: Orientation = "alternating",
    rms: Number | None = 0.2,
    compute_dtype: Operands = None,
    mu_dtype: Dtype | None = None,
    matrix_dims: DimsTree = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-L: local spectral preconditioning, by clipping singular values.

    The ``rank`` leading singular values of ``Psi`` are clipped to one.

    With an RMS of 0.2, updates have the size of AdamW's: start from AdamW's learning
    rate.

    Args:
        rank: r, how many singular values may be clipped; between zero and one, the
            share of the smaller dimension.
        oversample: o; the sketch has ``min(m, n, r + o)`` directions.
        power_iterations: p, iterations that sharpen the sketch.
        method: "sketch" (the paper), "products" (without an eigensolver) or "exact";
            see ``precondition_locally``.
        seed: of the sketch's Gaussian draws.
        relative_threshold: None clips to one, as in the paper; a number clips to this
            multiple of the root mean square of the remaining singular values. See
            ``precondition_locally``.
        tangent: "relaxed" (the paper), "strict" or "none"; see ``project_to_tangent``.
        orientation: "alternating" (rows first), "rows", "columns", or "both" (rows,
            then columns, at every step). Rows are output neurons.

    References:
        Gong, Gan, Teng and Liu, Normalize-Then-Precondition, "NormPre-L" and Algorithm
        2.
    """
    # T, and its scale.
    spectral = precondition_locally(
        rank,
        oversample=oversample,
        power_iterations=power_iterations,
        method=method,
        seed=seed,
        compute_dtype=compute_dtype,
        relative_threshold=relative_threshold,
        rms=rms,
    )
    return scale_by_normpre(
        spectral,
        momentum=momentum,
        nesterov=nesterov,
        tangent=tangent,
        orientation=orientation,
        rms=None,  # the spectral stage scales
        mu_dtype=mu_dtype,
        matrix_dims=matrix_dims,
    )


normpre = complete(scale_by_normpre, example="1e-3, npo.precondition_locally(rank=8)")
normpre_g = complete(scale_by_normpre_g)
normpre_l = complete(scale_by_normpre_l)
