# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: Muon of the momentum's signs, with Adam's second moments after it."""

from collections.abc import Sequence

import jax
import optax

from normpre_optax.assemble import RestOptions, assemble
from normpre_optax.meshes.exchange import maybe_divided
from normpre_optax.transforms.precondition import precondition_globally
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.wrappers import as_matrices


def adamuon(
    learning_rate: optax.ScalarOrSchedule,
    *,
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
    """AdaMuon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(sign(U))``, ``V = mu V + (1 - mu) O^2`` entry by entry,
    ``O' = O / (sqrt(V) + 1e-8)``, ``W <- W - lr (0.2 sqrt(m n) O' / ||O'||_F + wd W)``: a root mean square of 0.2.

    The authors' code keeps ``(1 - mu)`` times this momentum, which the sign forgets, and guards the last division with
    an epsilon, which is not needed here: a zero matrix gives a zero update. V lies as the parameter does, in float32.

    Args:
        learning_rate: number or schedule; AdamW's.
        nesterov: whether the update looks one gradient ahead, ``U = G + mu M``, or is ``M`` itself.
        ns_steps: Newton-Schulz iterations; None orthogonalises exactly.
        ns_coefficients: ``"muon"``, ``"you"``, ``"polar_express"``, a triple, or a triple a step.
        divide: see ``normpre_g``.
        momentum: ``mu``, of both moments.
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
        ValueError: see ``normpre``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import adamuon
        >>> tx = adamuon(1e-3)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> updates, state = tx.update(params, tx.init(params), params)

    References:
        Si, Zhang and Shen, AdaMuon, arXiv 2507.11005 (github.com/Chongjie-Si/AdaMuon).
    """

    def direction(dims):
        return optax.chain(
            optax.trace(momentum, nesterov, mu_dtype),
            optax.scale_by_sign(),
            as_matrices(dims, maybe_divided(precondition_globally(ns_steps, ns_coefficients, compute_dtype), divide)),
            optax.scale_by_rms(momentum, eps=1e-8, eps_in_sqrt=False),
            as_matrices(dims, scale_to_rms(0.2)),
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
