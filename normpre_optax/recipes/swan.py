# SPDX-License-Identifier: Apache-2.0
"""SWAN: the gradient standardised and whitened, without momentum and without state."""

import functools
from typing import Annotated, Unpack

import optax

from normpre_optax.finish import hybrid
from normpre_optax.meshes.exchange import divided
from normpre_optax.options import DirectionOptions, Number, Option, RestOptions, pick, with_options
from normpre_optax.transforms.normalize import standardize_rows
from normpre_optax.transforms.oriented import chain
from normpre_optax.transforms.precondition import whiten
from normpre_optax.transforms.scale import scale_to_rms
from normpre_optax.transforms.wrappers import as_matrices, at_least_float32


class SwanOptions(DirectionOptions, total=False):
    """Of ``scale_by_swan``."""

    whitening_steps: Annotated[int, Option(6, "iterations for the inverse root.", least=1)]
    divide: Annotated[bool, Option(True, "on a mesh, send every matrix whole to one device and back; see ``divided``.")]
    rms: Annotated[
        Number | None,
        Option(
            None, "root mean square of every matrix update before the learning rate; None leaves the size as it comes."
        ),
    ]


class SwanOptimizer(SwanOptions, RestOptions, total=False):
    """Of ``swan``."""


@with_options
def scale_by_swan(**options: Unpack[SwanOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``swan``: the gradient standardised and whitened; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_swan
        >>> tx = optax.chain(scale_by_swan(rms=0.2), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    whitened = whiten(options["whitening_steps"], options["compute_dtype"])
    whitened = divided(whitened) if options["divide"] else whitened
    stage = chain(standardize_rows(), whitened, scale_to_rms(options["rms"]))
    return at_least_float32(as_matrices(options["matrix_dims"], stage))


@with_options
def swan(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[SwanOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """SWAN for hidden matrices, AdamW for everything else.

    For W read as (out, in): ``S_i = (G_i - mean(G_i)) / std(G_i)`` for every row, ``T = Z S`` with
    ``Z ~ (S S^T / ||S S^T||_F)^(-1/2)`` by coupled Newton-Schulz iterations, and ``W <- W - lr (T + wd W)``. There is
    no momentum: matrices have no optimizer state at all.

    The rule is the paper's as others have ported it. The authors whiten with m x m products; here they are as large
    as the shorter side, with the same result. The size of T, about ``n^(1/2) m^(1/4)`` in spectral norm for a wide
    matrix, is the rule's own; ``rms=0.2`` gives it AdamW's.

    Args:
        learning_rate: number or schedule; AdamW's with ``rms=0.2``.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import swan
        >>> tx = swan(1e-3, rms=0.2)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Ma, Gong, Scetbon and Meeds, SWAN, arXiv 2412.13148.
    """
    direction = functools.partial(scale_by_swan, **pick(SwanOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
