# SPDX-License-Identifier: Apache-2.0
"""MANO: momentum projected against the weights and normalised, columns and rows in turn."""

import functools
from typing import Annotated, Literal, Unpack

import optax

from normpre_optax.directions import matrix_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import MomentumOptions, Option, RestOptions, pick, with_options
from normpre_optax.transforms.tangent import normalize_tangent_rows
from normpre_optax.transforms.wrappers import alternate_orientation

# Version 1 projects against unit vectors of W, version 2 against the vectors themselves.
TANGENTS = {1: "strict", 2: "relaxed"}


class ManoOptions(MomentumOptions, total=False):
    """Of ``scale_by_mano``."""

    version: Annotated[
        Literal[1, 2],
        Option(
            1, "of the authors' code: 1 (``mano.py``) or 2 (``mano_v2.py``, which they run with ``nesterov=True``)."
        ),
    ]
    nesterov: Annotated[bool, Option(False, "whether the update looks one gradient ahead, ``U = G + mu M``.")]


class ManoOptimizer(ManoOptions, RestOptions, total=False):
    """Of ``mano``."""


@with_options
def scale_by_mano(**options: Unpack[ManoOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``mano``: columns and rows in turn, against the weights; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_mano
        >>> tx = optax.chain(scale_by_mano(), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    tangent = TANGENTS[options["version"]]
    vectors = normalize_tangent_rows(tangent, length=lambda rows, columns: 0.2 * columns**0.5)
    stage = alternate_orientation(vectors, first="columns")
    return matrix_momentum(stage, nesterov=options["nesterov"], **pick(MomentumOptions, options))


@with_options
def mano(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[ManoOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """MANO for hidden matrices, AdamW for everything else.

    ``M = mu M + G``; then for every column on the first step, every row on the next, and so on in turn, with ``d``
    entries each: ``X = M - <M, w> w``, where ``w`` is W's unit vector (version 1) or W's own (version 2), and
    ``W <- W - lr (0.2 sqrt(d) X / ||X|| + wd W)``.

    The authors guard their divisions with 1e-8. Here lengths neither overflow nor vanish and zero vectors stay zero, so
    that the result does not depend on the gradient's scale; the two agree to 1e-8 relative to the lengths involved.

    Args:
        learning_rate: number or schedule; AdamW's.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import mano
        >>> tx = mano(1e-3)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Gu and Xie, Mano, 2026 (github.com/xie-lab-ml).
    """
    direction = functools.partial(scale_by_mano, **pick(ManoOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
