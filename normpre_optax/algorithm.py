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

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.checks import float_dtype, transformation
from normpre_optax.transforms.oriented import Rescalable, chain
from normpre_optax.transforms.precondition import precondition_globally, precondition_locally
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

ORIENTATIONS = ("alternating", "rows", "columns", "both")


def scale_by_normpre(
    precondition: optax.GradientTransformation,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    tangent: str = "relaxed",
    tangent_radius: jax.typing.ArrayLike = 1.0,
    orientation: str = "alternating",
    rms: jax.typing.ArrayLike | None = 0.2,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
) -> optax.GradientTransformationExtraArgs:
    """The NormPre direction ``R_k(T_t)`` alone: Algorithm 1 without weight decay and learning rate.

    Args:
        precondition: the spectral stage ``T``, on matrices in the last two axes: ``precondition_globally()``,
            ``precondition_locally()``, or any transformation of your own.
        momentum: ``mu`` in ``M = mu M + G``.
        tangent: ``"relaxed"`` (the paper), ``"bounded"``, ``"strict"`` or ``"none"``; see ``project_to_tangent``.
        tangent_radius: row length at which the relaxed radial part vanishes; 1 in the paper.
        orientation: ``"alternating"`` (rows first), ``"rows"``, ``"columns"``, or ``"both"`` (rows, then columns, on
            every step). Rows are output neurons.
        rms: root mean square of every matrix of the update, or None for no scaling.
        mu_dtype: dtype in which momentum is stored; None means the parameter's, at least float32.
        compute_dtype: dtype in which ``Psi`` is handed to ``precondition``; None means at least float32.
        matrix_dims: which axes of a parameter are inputs and outputs; see ``normpre``. Every leaf must be a matrix.

    Returns:
        The transformation. Its updates point uphill, as ``optax.scale_by_*`` do.

    Raises:
        ValueError: if an option is unknown or out of range, or a leaf is no matrix.

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
    if orientation not in ORIENTATIONS:
        raise ValueError(f"{orientation=} is not one of {ORIENTATIONS}")
    transformation("precondition", precondition)
    float_dtype("mu_dtype", mu_dtype)
    if isinstance(momentum, int | float) and not 0 <= momentum < 1:
        raise ValueError(f"momentum must lie in [0, 1), got {momentum}")
    # X_t and Psi_t: project_to_tangent and normalize_rows in one.
    normalized = normalize_tangent_rows(tangent, tangent_radius)
    stage = in_dtype(compute_dtype, precondition)
    if isinstance(stage, Rescalable) and not isinstance(rms, jax.Array):  # R_k without a pass over T_t
        stage, rms = stage.at_rms(rms), None
    return at_least_float32(
        optax.chain(
            optax.trace(momentum, accumulator_dtype=mu_dtype),  # M_t
            as_matrices(
                matrix_dims,
                chain(
                    _oriented(normalized, orientation),  # O_k ... O_k^-1
                    stage,  # T_t
                    scale_to_rms(rms),  # R_k(T_t)
                ),
            ),
        )
    )


def normpre(
    learning_rate: optax.ScalarOrSchedule,
    precondition: optax.GradientTransformation,
    *,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    weight_decay_mask=None,
    tangent: str = "relaxed",
    tangent_radius: jax.typing.ArrayLike = 1.0,
    orientation: str = "alternating",
    rms: jax.typing.ArrayLike | None = 0.2,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike | None = None,
    shardings=None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre with any spectral stage: hidden matrices by NormPre, everything else by AdamW.

    ``W <- W - lr (rms T / RMS(T) + wd W)``, with ``T`` from Algorithm 1.

    Args:
        learning_rate: number or schedule. With ``rms=0.2`` an update has the size of AdamW's: keep AdamW's rate.
        precondition: the spectral stage, a transformation on matrices in the last two axes.
        momentum: ``mu`` in ``M = mu M + G``.
        weight_decay: decoupled, multiplied by the learning rate.
        weight_decay_mask: tree of bools, or a callable ``(params) -> tree``, on the whole tree of parameters; None
            decays everything.
        tangent: ``"relaxed"`` (the paper), ``"bounded"``, ``"strict"`` or ``"none"``; see ``project_to_tangent``.
        tangent_radius: row length at which the relaxed radial part vanishes; 1 in the paper.
        orientation: ``"alternating"`` (rows first), ``"rows"``, ``"columns"``, or ``"both"`` (rows, then columns, on
            every step). Rows are output neurons.
        rms: root mean square of every matrix update before the learning rate, or None for no scaling.
        mu_dtype: dtype in which first moments are stored, AdamW's too; None means at least float32, also for bfloat16
            parameters (whose updates of about ``0.2 lr`` can fall under one unit in the last place).
        compute_dtype: dtype in which ``Psi`` is handed to ``precondition``; None means at least float32.
        matrix_dims: which parameters are matrices, and which of their axes are inputs and outputs: None (the default
            rule, ``default_matrix_dims``); a rule ``(path, leaf) -> MatrixDims | None``; a callable
            ``(params) -> tree``; or a tree (or prefix) of ``MatrixDims`` and None.
            ``optax.contrib.MuonDimensionNumbers`` will do for ``MatrixDims``. None for a leaf means AdamW.
        adam_learning_rate: AdamW's, if it is to differ.
        adam_b1: AdamW's first decay rate.
        adam_b2: AdamW's second decay rate.
        adam_eps: AdamW's epsilon.
        adam_weight_decay: AdamW's, if it is to differ.
        shardings: where the parameters live, which only a mesh with Auto axes does not tell by itself: a tree like the
            parameters (or prefix) of ``NamedSharding`` or ``PartitionSpec``, or a callable ``(params) -> tree``.

    Returns:
        The optimizer.

    Raises:
        ValueError: if an option is unknown or out of range; at ``init``, if a parameter of three or more axes is
            covered by no rule; at ``update``, if the parameters are missing.

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

    def direction(dims):
        return scale_by_normpre(
            precondition,
            momentum=momentum,
            tangent=tangent,
            tangent_radius=tangent_radius,
            orientation=orientation,
            rms=rms,
            mu_dtype=mu_dtype,
            compute_dtype=compute_dtype,
            matrix_dims=dims,
        )

    return assemble(
        direction,
        learning_rate,
        RestOptions(
            weight_decay=weight_decay,
            weight_decay_mask=weight_decay_mask,
            mu_dtype=mu_dtype,
            matrix_dims=matrix_dims,
            adam_learning_rate=adam_learning_rate,
            adam_b1=adam_b1,
            adam_b2=adam_b2,
            adam_eps=adam_eps,
            adam_weight_decay=adam_weight_decay,
            shardings=shardings,
        ),
    )


def normpre_g(
    learning_rate: optax.ScalarOrSchedule,
    *,
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence = "muon",
    divide: bool = True,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    weight_decay_mask=None,
    tangent: str = "relaxed",
    tangent_radius: jax.typing.ArrayLike = 1.0,
    orientation: str = "alternating",
    rms: jax.typing.ArrayLike | None = 0.2,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike | None = None,
    shardings=None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G: global spectral preconditioning. The better update, at the price of Muon's.

    ``T = msign(Psi)`` by Newton-Schulz: every singular value of the normalized update goes to about one.

    Args:
        learning_rate: number or schedule; keep AdamW's.
        ns_steps: Newton-Schulz iterations; None computes ``msign`` exactly.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, a triple, or a triple a step.
        divide: on a mesh, send every matrix whole to one device and back, balanced by their work, instead of gathering
            it for every product; see ``divided``.
        momentum: see ``normpre``, as all that follow.
        weight_decay: see ``normpre``.
        weight_decay_mask: see ``normpre``.
        tangent: see ``normpre``.
        tangent_radius: see ``normpre``.
        orientation: see ``normpre``.
        rms: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype of the Newton-Schulz products' operands, with sums in float32. None is the device's usual
            product: one pass in bfloat16 on a TPU, TF32 on a GPU, float32 on a CPU. ``jnp.float32`` is true float32.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.
        shardings: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: see ``normpre``.
        TypeError: if ``ns_steps`` is traced.

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
    return normpre(
        learning_rate,
        maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide),
        momentum=momentum,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        tangent=tangent,
        tangent_radius=tangent_radius,
        orientation=orientation,
        rms=rms,
        mu_dtype=mu_dtype,
        matrix_dims=matrix_dims,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        shardings=shardings,
    )


def normpre_l(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 32,
    oversample: int = 8,
    power_iterations: int = 1,
    method: str = "sketch",
    seed: int = 0,
    warm_start: bool = False,
    divide: bool = False,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    weight_decay_mask=None,
    tangent: str = "relaxed",
    tangent_radius: jax.typing.ArrayLike = 1.0,
    orientation: str = "alternating",
    rms: jax.typing.ArrayLike | None = 0.2,
    mu_dtype: jax.typing.DTypeLike | None = None,
    compute_dtype: jax.typing.DTypeLike | None = None,
    matrix_dims=None,
    adam_learning_rate: optax.ScalarOrSchedule | None = None,
    adam_b1: jax.typing.ArrayLike = 0.9,
    adam_b2: jax.typing.ArrayLike = 0.95,
    adam_eps: jax.typing.ArrayLike = 1e-8,
    adam_weight_decay: jax.typing.ArrayLike | None = None,
    shardings=None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-L: localized spectral preconditioning. Nearly as good an update, at a fraction of the price.

    ``T`` is the normalized update with its ``rank`` leading singular values clipped to one.

    Args:
        learning_rate: number or schedule; keep AdamW's.
        rank: spectral budget r: how many modes of a matrix may be clipped.
        oversample: o: extra directions of the sketch.
        power_iterations: p: passes that sharpen the sketch.
        method: ``"sketch"`` (thin products only) or ``"exact"`` (an eigendecomposition of the shorter side).
        seed: of the sketch's draws.
        warm_start: start each sketch from the modes of the step before, and ``oversample`` >= 1 fresh directions. With
            ``power_iterations=0`` it is as close to exact clipping as the default, in three products with the matrix
            instead of five; a departure from the paper, and ``rank`` rows more of state a matrix.
        divide: on a mesh, send every matrix whole to one device and back. The sketch's products with a sharded matrix
            need only thin pieces of it, so that is rarely worth it; not with ``warm_start``.
        momentum: see ``normpre``, as all that follow.
        weight_decay: see ``normpre``.
        weight_decay_mask: see ``normpre``.
        tangent: see ``normpre``.
        tangent_radius: see ``normpre``.
        orientation: see ``normpre``.
        rms: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype of the operands of the sketch's products with ``Psi``, with sums in float32. None is
            bfloat16 on a TPU and a GPU, float32 on a CPU. ``jnp.float32`` is true float32; what is small always is.
        matrix_dims: see ``normpre``.
        adam_learning_rate: see ``normpre``.
        adam_b1: see ``normpre``.
        adam_b2: see ``normpre``.
        adam_eps: see ``normpre``.
        adam_weight_decay: see ``normpre``.
        shardings: see ``normpre``.

    Returns:
        The optimizer.

    Raises:
        ValueError: see ``normpre``.
        TypeError: if an argument that shapes the computation (``rank``, ``seed``, ...) is traced.

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
    return normpre(
        learning_rate,
        maybe_divided(
            precondition_locally(rank, oversample, power_iterations, method, seed, compute_dtype, warm_start), divide
        ),
        momentum=momentum,
        weight_decay=weight_decay,
        weight_decay_mask=weight_decay_mask,
        tangent=tangent,
        tangent_radius=tangent_radius,
        orientation=orientation,
        rms=rms,
        mu_dtype=mu_dtype,
        matrix_dims=matrix_dims,
        adam_learning_rate=adam_learning_rate,
        adam_b1=adam_b1,
        adam_b2=adam_b2,
        adam_eps=adam_eps,
        adam_weight_decay=adam_weight_decay,
        shardings=shardings,
    )


def _oriented(stage: optax.GradientTransformation, orientation: str) -> optax.GradientTransformationExtraArgs:
    if orientation == "alternating":
        return alternate_orientation(stage, first="rows")
    if orientation == "both":
        return both_orientations(stage)
    return fixed_orientation(stage, orientation)
