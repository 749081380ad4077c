# SPDX-License-Identifier: Apache-2.0
"""Dion: the leading directions of the momentum at size one, and the rest kept for later."""

import functools
from typing import Annotated, Unpack

import optax

from normpre_optax.finish import hybrid
from normpre_optax.options import MomentumOptions, Option, RestOptions, pick, with_options
from normpre_optax.transforms.low_rank import error_feedback, orthogonalize_low_rank
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import as_matrices, at_least_float32


class DionOptions(MomentumOptions, total=False):
    """Of ``scale_by_dion``."""

    rank: Annotated[int, Option(768, "directions found a step; no more than the shorter side.", least=1)]
    seed: Annotated[int, Option(0, "of the draws with which Q starts.", least=0, below=2**32)]


class DionOptimizer(DionOptions, RestOptions, total=False):
    """Of ``dion``."""


@with_options
def scale_by_dion(**options: Unpack[DionOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``dion``: leading directions at size one, the rest kept; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_dion
        >>> tx = optax.chain(scale_by_dion(rank=2), optax.scale(-0.02))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    dims, kept = options["matrix_dims"], options["momentum"]
    low_rank = orthogonalize_low_rank(options["rank"], options["seed"], options["compute_dtype"], share=1 - kept)
    return at_least_float32(
        optax.chain(
            error_feedback(as_matrices(dims, low_rank), options["mu_dtype"]),
            as_matrices(dims, scale_by_shape(lambda rows, columns: (rows / columns) ** 0.5)),
        )
    )


@with_options
def dion(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[DionOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """Dion for hidden matrices, AdamW for everything else.

    With W read as (out, in) = m x n: ``M = M + G``; ``P = qr(M Q)``, ``R = M^T P``; ``M = M - (1 - mu) P R^T``;
    ``Q = R`` with columns of length one; ``W <- W - lr (sqrt(m / n) P Q^T + wd W)``. ``Q`` (n x rank) starts from
    Gaussian draws. Only products with thin matrices are needed, and what is not found stays in M until it is.

    The authors add 1e-8 to the columns' lengths, and their QR fills directions in which M has nothing with arbitrary
    ones; here such a direction gives nothing and keeps its column of Q, so that a zero gradient gives a zero update and
    does no harm. Q is kept in float32; M lies as the parameter does. Their
    default of weight decay is 0.01.

    Args:
        learning_rate: number or schedule; 0.01 to 0.02 is a start (then give ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import dion
        >>> tx = dion(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Ahn et al., Dion, arXiv 2504.05295 (github.com/microsoft/dion).
    """
    direction = functools.partial(scale_by_dion, **pick(DionOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
