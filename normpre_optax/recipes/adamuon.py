# SPDX-License-Identifier: Apache-2.0
"""AdaMuon: Muon of the momentum's signs, with Adam's second moments after it."""

import functools
from typing import Unpack

import optax

from normpre_optax.directions import orthogonalize
from normpre_optax.finish import hybrid
from normpre_optax.options import (
    NewtonSchulzOptions,
    OrthogonalOptimizer,
    OrthogonalOptions,
    RestOptions,
    pick,
    with_options,
)
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.wrappers import as_matrices, at_least_float32


@with_options
def scale_by_adamuon(**options: Unpack[OrthogonalOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``adamuon``: signs, orthogonalised, by Adam's second moments; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_adamuon
        >>> tx = optax.chain(scale_by_adamuon(), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    dims, momentum = options["matrix_dims"], options["momentum"]
    return at_least_float32(
        optax.chain(
            optax.trace(momentum, options["nesterov"], options["mu_dtype"]),
            optax.scale_by_sign(),
            as_matrices(dims, orthogonalize(**pick(NewtonSchulzOptions, options))),
            optax.scale_by_rms(momentum, eps=1e-8, eps_in_sqrt=False),
            as_matrices(dims, scale_to_rms(0.2)),
        )
    )


@with_options
def adamuon(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[OrthogonalOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """AdaMuon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(sign(U))``, ``V = mu V + (1 - mu) O^2`` entry by entry,
    ``O' = O / (sqrt(V) + 1e-8)``, ``W <- W - lr (0.2 sqrt(m n) O' / ||O'||_F + wd W)``: a root mean square of 0.2.

    The authors' code keeps ``(1 - mu)`` times this momentum, which the sign forgets, and guards the last division with
    an epsilon, which is not needed here: a zero matrix gives a zero update. V lies as the parameter does, in float32.

    Args:
        learning_rate: number or schedule; AdamW's.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import adamuon
        >>> tx = adamuon(1e-3)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Si, Zhang and Shen, AdaMuon, arXiv 2507.11005 (github.com/Chongjie-Si/AdaMuon).
    """
    direction = functools.partial(scale_by_adamuon, **pick(OrthogonalOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
