# SPDX-License-Identifier: Apache-2.0
"""MOGA: rows or columns at length one, at a scale that carries over from one width to another."""

import functools
from typing import Annotated, Literal, Unpack

import optax

from normpre_optax.directions import matrix_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import NesterovOptions, Option, RestOptions, pick, with_options
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import fixed_orientation

# Of (out, in) = m x n, so that a learning rate found at one width holds at another.
SCALES = {"rows": lambda rows, columns: columns**-0.5, "columns": lambda rows, columns: rows**0.5 / columns}


class MogaOptions(NesterovOptions, total=False):
    """Of ``scale_by_moga``."""

    mode: Annotated[Literal["rows", "columns"], Option("rows", '``"rows"`` (output neurons) or ``"columns"``.')]


class MogaOptimizer(MogaOptions, RestOptions, total=False):
    """Of ``moga``."""


@with_options
def scale_by_moga(**options: Unpack[MogaOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``moga``: rows or columns of the momentum at a length; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_moga
        >>> tx = optax.chain(scale_by_moga(), optax.scale(-0.05))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    mode = options["mode"]
    vectors = chain(fixed_orientation(normalize_rows(), mode), scale_by_shape(SCALES[mode]))
    return matrix_momentum(vectors, **pick(NesterovOptions, options))


@with_options
def moga(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[MogaOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """MOGA (p = 2) for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), and with W read as (out, in) = m x n
    ``W_i <- W_i - lr (n^-1/2 U_i / ||U_i|| + wd W_i)`` for every row i (``mode="rows"``), or
    ``W_j <- W_j - lr (m^1/2 / n U_j / ||U_j|| + wd W_j)`` for every column j (``mode="columns"``).

    Its authors give no code; the rule is the paper's as others have ported it, with Nesterov momentum as there.
    Lengths neither overflow nor vanish and zero rows stay zero.

    Args:
        learning_rate: number or schedule. Entries of the direction are about 1 / n: ``0.2 n`` times AdamW's rate makes
            updates as large as AdamW's (then give ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import moga
        >>> tx = moga(0.05, adam_learning_rate=3e-4)  # n = 768
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Xu, Li and Lu, On the Width Scaling of Neural Optimizers, arXiv 2603.09952.
    """
    direction = functools.partial(scale_by_moga, **pick(MogaOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
