# SPDX-License-Identifier: Apache-2.0
"""RMNP: every row of the momentum at length one, in place of Muon's orthogonalisation."""

import functools
from typing import Unpack

import optax

from normpre_optax.directions import matrix_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import NesterovOptimizer, NesterovOptions, RestOptions, pick, with_options
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.scale import scale_by_shape


@with_options
def scale_by_rmnp(**options: Unpack[NesterovOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``rmnp``: rows of the momentum at length one; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_rmnp
        >>> tx = optax.chain(scale_by_rmnp(), optax.scale(-0.02))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    scale = scale_by_shape(lambda rows, columns: max(1, rows / columns) ** 0.5)
    return matrix_momentum(chain(normalize_rows(), scale), **options)


@with_options
def rmnp(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NesterovOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """RMNP for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W_i <- W_i - lr (sqrt(max(1, m / n)) U_i / ||U_i|| + wd W_i)`` for
    every row i of W read as (out, in) = m x n: rows are output neurons for tall matrices too.

    The authors' default is no weight decay; 0.1 here as in the other optimizers of this library. Lengths neither
    overflow nor vanish and zero rows stay zero, so that the result does not depend on the gradient's scale.

    Args:
        learning_rate: number or schedule: the authors' is 0.02 (then give ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import rmnp
        >>> tx = rmnp(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        RMNP, arXiv 2603.20527 (github.com/Dominator-Index/RMNP).
    """
    direction = functools.partial(scale_by_rmnp, **pick(NesterovOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
