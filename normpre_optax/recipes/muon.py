# SPDX-License-Identifier: Apache-2.0
"""Muon: orthogonalised momentum, with its two conventions of scale."""

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices

SCALES = {
    # Liu et al., arXiv 2502.16982 (github.com/MoonshotAI/Moonlight): the update RMS of AdamW, at AdamW's learning rate.
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    # github.com/KellerJordan/Muon: unit spectral norm, longer for tall matrices, at a learning rate near 0.02.
    "keller": lambda rows, columns: max(1, rows / columns) ** 0.5,
}


def muon(
    learning_rate: optax.ScalarOrSchedule,
    *,
    convention: str = "moonlight",
    nesterov: bool = True,
    ns_steps: int | None = 5,
    ns_coefficients: str | Sequence = "muon",
    divide: bool = True,
    momentum: jax.typing.ArrayLike = 0.95,
    weight_decay: jax.typing.ArrayLike = 0.1,
    weight_decay_mask=None,
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
    """Muon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W <- W - lr (s NS5(U) + wd W)`` with W read as (out, in) = m x n
    and ``s = 0.2 sqrt(max(m, n))`` (``"moonlight"``) or ``s = sqrt(max(1, m / n))`` (``"keller"``).

    Keller Jordan's code keeps ``(1 - mu)`` times this momentum; orthogonalisation forgets the factor. Weight decay is
    0.1 for both, as NormPre's authors run them (Keller Jordan's default is 0).

    Args:
        learning_rate: number or schedule: AdamW's for ``"moonlight"``, about 0.02 for ``"keller"`` (then give
            ``adam_learning_rate`` too).
        convention: ``"moonlight"`` or ``"keller"``.
        nesterov: whether the update looks one gradient ahead.
        ns_steps: Newton-Schulz iterations; None orthogonalises exactly.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, a triple, or a triple a step.
        divide: see ``normpre_g``.
        momentum: ``mu``.
        weight_decay: see ``normpre``, as all that follow.
        weight_decay_mask: see ``normpre``.
        mu_dtype: see ``normpre``.
        compute_dtype: dtype of the Newton-Schulz products' operands, sums in float32; None: the device's usual product.
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
        ValueError: if ``convention`` is unknown; see ``normpre`` for the rest.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import muon
        >>> tx = muon(0.02, convention="keller", adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Jordan et al., Muon, 2024; Liu et al., arXiv 2502.16982.
    """
    if convention not in SCALES:
        raise ValueError(f"{convention=} is not one of {tuple(SCALES)}")

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            as_matrices(
                dims,
                chain(
                    maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide),
                    scale_by_shape(SCALES[convention]),
                ),
            ),
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
