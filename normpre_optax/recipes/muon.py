# SPDX-License-Identifier: Apache-2.0
"""Muon: orthogonalised momentum, with its two conventions of scale."""

import functools
from typing import Annotated, Literal, Unpack

import optax

from normpre_optax.directions import orthogonalized_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import Option, OrthogonalOptions, RestOptions, pick, with_options
from normpre_optax.transforms.scale import scale_by_shape

SCALES = {
    # Liu et al., arXiv 2502.16982 (github.com/MoonshotAI/Moonlight): the update RMS of AdamW, at AdamW's learning rate.
    "moonlight": lambda rows, columns: 0.2 * max(rows, columns) ** 0.5,
    # github.com/KellerJordan/Muon: unit spectral norm, longer for tall matrices, at a learning rate near 0.02.
    "keller": lambda rows, columns: max(1, rows / columns) ** 0.5,
}


class MuonOptions(OrthogonalOptions, total=False):
    """Of ``scale_by_muon``."""

    convention: Annotated[
        Literal["moonlight", "keller"], Option("moonlight", 'the scale: ``"moonlight"`` or ``"keller"``.')
    ]


class MuonOptimizer(MuonOptions, RestOptions, total=False):
    """Of ``muon``."""


@with_options
def scale_by_muon(**options: Unpack[MuonOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``muon``: orthogonalised momentum at a nominal scale, without decay and learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_muon
        >>> tx = optax.chain(scale_by_muon(), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    scale = scale_by_shape(SCALES[options["convention"]])
    return orthogonalized_momentum(after=[scale], **pick(OrthogonalOptions, options))


@with_options
def muon(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[MuonOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """Muon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W <- W - lr (s NS5(U) + wd W)`` with W read as (out, in) = m x n
    and ``s = 0.2 sqrt(max(m, n))`` (``"moonlight"``) or ``s = sqrt(max(1, m / n))`` (``"keller"``).

    Keller Jordan's code keeps ``(1 - mu)`` times this momentum; orthogonalisation forgets the factor. Weight decay is
    0.1 for both, as NormPre's authors run them (Keller Jordan's default is 0).

    Args:
        learning_rate: number or schedule: AdamW's for ``"moonlight"``, about 0.02 for ``"keller"`` (then give
            ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import muon
        >>> tx = muon(0.02, convention="keller", adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Jordan et al., Muon, 2024; Liu et al., arXiv 2502.16982.
    """
    direction = functools.partial(scale_by_muon, **pick(MuonOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
