# SPDX-License-Identifier: Apache-2.0
r"""NormPre: normalize, then precondition. Algorithm 1 of the paper is the chain in ``scale_by_normpre``.

With the weight ``W`` of a layer read as (out, in), its gradient ``G``, and ``O_k`` turning rows into columns on every
other step::

    M   = mu M + G                          momentum, in the parameter's own layout
    X   = rows of O_k(M), less their part along the rows of O_k(W)      relaxed tangent
    Psi = rows of X, each to length one     diagonal-Gram normalization
    T   = msign(Psi)                        NormPre-G, or
          Psi with its leading singular values clipped to one           NormPre-L
    W   = W - lr (0.2 O_k^-1(T) / RMS(T) + wd W)
"""

import functools
from typing import Unpack

import jax
import optax

from normpre_optax.directions import orthogonalize
from normpre_optax.finish import hybrid
from normpre_optax.meshes.exchange import divided
from normpre_optax.options import (
    NewtonSchulzOptions,
    NormPreGOptimizer,
    NormPreGOptions,
    NormPreLOptimizer,
    NormPreLOptions,
    NormPreOptimizer,
    NormPreOptions,
    RestOptions,
    SketchOptions,
    pick,
    with_options,
)
from normpre_optax.transforms.checks import transformation
from normpre_optax.transforms.oriented import Rescalable, chain
from normpre_optax.transforms.precondition import precondition_locally
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.tangent import normalize_tangent_rows
from normpre_optax.transforms.wrappers import (
    alternate_orientation,
    as_matrices,
    at_least_float32,
    both_orientations,
    fixed_orientation,
    in_dtype,
)


@with_options
def scale_by_normpre(
    precondition: optax.GradientTransformation, **options: Unpack[NormPreOptions]
) -> optax.GradientTransformationExtraArgs:
    """The NormPre direction ``R_k(T_t)`` alone: Algorithm 1 without weight decay and learning rate.

    Args:
        precondition: the spectral stage ``T``, on matrices in the last two axes: ``precondition_globally()``,
            ``precondition_locally()``, or any transformation of your own.
        compute_dtype: dtype in which ``Psi`` is handed to ``precondition``; None means at least float32.

    Returns:
        The transformation, of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range, or a leaf is no matrix.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from normpre_optax import precondition_globally, scale_by_normpre
        >>> tx = optax.chain(scale_by_normpre(precondition_globally()), optax.scale(-1e-3))
        >>> params = {"kernel": jnp.ones((4, 8)) / 3}
        >>> grads = {"kernel": jax.random.normal(jax.random.key(0), (4, 8))}
        >>> updates, state = tx.update(grads, tx.init(params), params)
        >>> print(f"{jnp.sqrt(jnp.mean(updates['kernel'] ** 2)):.7f}")
        0.0002000

    References:
        Normalize-Then-Precondition, Algorithm 1.
    """
    transformation("precondition", precondition)
    # X_t and Psi_t: project_to_tangent and normalize_rows in one.
    normalized = normalize_tangent_rows(options["tangent"], options["tangent_radius"])
    stage, rms = in_dtype(options["compute_dtype"], precondition), options["rms"]
    if isinstance(stage, Rescalable) and not isinstance(rms, jax.Array):  # R_k without a pass over T_t
        stage, rms = stage.at_rms(rms), None
    return at_least_float32(
        optax.chain(
            optax.trace(options["momentum"], options["nesterov"], options["mu_dtype"]),  # M_t
            as_matrices(
                options["matrix_dims"],
                chain(
                    _oriented(normalized, options["orientation"]),  # O_k ... O_k^-1
                    stage,  # T_t
                    scale_to_rms(rms),  # R_k(T_t)
                ),
            ),
        )
    )


@with_options
def normpre(
    learning_rate: optax.ScalarOrSchedule,
    precondition: optax.GradientTransformation,
    **options: Unpack[NormPreOptimizer],
) -> optax.GradientTransformationExtraArgs:
    """NormPre with any spectral stage: hidden matrices by NormPre, everything else by AdamW.

    ``W <- W - lr (rms T / RMS(T) + wd W)``, with ``T`` from Algorithm 1.

    Args:
        learning_rate: number or schedule. With ``rms=0.2`` an update has the size of AdamW's: keep AdamW's rate.
        precondition: the spectral stage, a transformation on matrices in the last two axes.
        compute_dtype: dtype in which ``Psi`` is handed to ``precondition``; None means at least float32.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; at ``init``, if a parameter of three or more axes is covered by no rule; at
            ``update``, if the parameters are missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normpre, precondition_locally
        >>> tx = normpre(1e-3, precondition_locally(rank=8), tangent="none")
        >>> params = {"dense": {"kernel": jnp.ones((4, 8)), "bias": jnp.zeros(8)}}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Normalize-Then-Precondition, Algorithm 1 and "Default Optimizer Configurations".
    """
    direction = functools.partial(scale_by_normpre, precondition, **pick(NormPreOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))


@with_options
def scale_by_normpre_g(**options: Unpack[NormPreGOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``normpre_g``: ``scale_by_normpre`` with Newton-Schulz; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_normpre_g
        >>> tx = optax.chain(scale_by_normpre_g(tangent="none"), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    spectral = orthogonalize(**pick(NewtonSchulzOptions, options))
    return scale_by_normpre(spectral, **pick(NormPreOptions, options) | {"compute_dtype": None})


@with_options
def scale_by_normpre_l(**options: Unpack[NormPreLOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``normpre_l``: ``scale_by_normpre`` with leading modes clipped; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_normpre_l
        >>> tx = optax.chain(scale_by_normpre_l(rank=2), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    spectral = precondition_locally(**pick(SketchOptions, options))
    spectral = divided(spectral) if options["divide"] else spectral
    return scale_by_normpre(spectral, **pick(NormPreOptions, options) | {"compute_dtype": None})


@with_options
def normpre_g(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NormPreGOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G: global spectral preconditioning. The better update, at the price of Muon's.

    ``T = msign(Psi)`` by Newton-Schulz: every singular value of the normalized update goes to about one.

    Args:
        learning_rate: number or schedule; keep AdamW's.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type, or ``ns_steps`` is traced.
        ValueError: see ``normpre``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from normpre_optax import normpre_g
        >>> tx = normpre_g(1e-3)  # was: optax.adamw(1e-3)
        >>> params = {"dense": {"kernel": jnp.eye(4, 8), "bias": jnp.zeros(8)}}
        >>> loss = lambda p: jnp.sum((jnp.ones(4) @ p["dense"]["kernel"] + p["dense"]["bias"]) ** 2)
        >>> updates, state = tx.update(jax.grad(loss)(params), tx.init(params), params)
        >>> bool(loss(optax.apply_updates(params, updates)) < loss(params))
        True

    References:
        Normalize-Then-Precondition, "NormPre-G".
    """
    direction = functools.partial(scale_by_normpre_g, **pick(NormPreGOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))


@with_options
def normpre_l(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NormPreLOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NormPre-L: localized spectral preconditioning. Nearly as good an update, at a fraction of the price.

    ``T`` is the normalized update with its ``rank`` leading singular values clipped to one.

    Args:
        learning_rate: number or schedule; keep AdamW's.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type, or one that shapes the computation (``rank``, ``seed``,
            ...) is traced.
        ValueError: see ``normpre``.

    Example:
        >>> import jax, jax.numpy as jnp, optax
        >>> from normpre_optax import normpre_l
        >>> tx = normpre_l(optax.cosine_decay_schedule(1e-3, 100), rank=2)
        >>> params = {"dense": {"kernel": jnp.eye(4, 8), "bias": jnp.zeros(8)}}
        >>> loss = lambda p: jnp.sum((jnp.ones(4) @ p["dense"]["kernel"] + p["dense"]["bias"]) ** 2)
        >>> updates, state = tx.update(jax.grad(loss)(params), tx.init(params), params)
        >>> bool(loss(optax.apply_updates(params, updates)) < loss(params))
        True

    References:
        Normalize-Then-Precondition, "NormPre-L" and Algorithm 2.
    """
    direction = functools.partial(scale_by_normpre_l, **pick(NormPreLOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))


def _oriented(stage: optax.GradientTransformation, orientation: str) -> optax.GradientTransformationExtraArgs:
    if orientation == "alternating":
        return alternate_orientation(stage, first="rows")
    if orientation == "both":
        return both_orientations(stage)
    return fixed_orientation(stage, orientation)
