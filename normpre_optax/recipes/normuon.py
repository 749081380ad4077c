# SPDX-License-Identifier: Apache-2.0
"""NorMuon: Muon with one second moment a neuron."""

import functools
from typing import Annotated, Unpack

import optax

from normpre_optax.directions import orthogonalized_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import Number, Option, OrthogonalOptions, RestOptions, pick, with_options
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.second_moment import scale_by_row_moment


class NorMuonOptions(OrthogonalOptions, total=False):
    """Of ``scale_by_normuon``."""

    b2: Annotated[
        Number,
        Option(
            0.95, "decay of the rows' second moments, which are kept as one float32 number a row.", least=0, below=1
        ),
    ]


class NorMuonOptimizer(NorMuonOptions, RestOptions, total=False):
    """Of ``normuon``."""


@with_options
def scale_by_normuon(**options: Unpack[NorMuonOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``normuon``: orthogonalised, rows by their second moments; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_normuon
        >>> tx = optax.chain(scale_by_normuon(), optax.scale(-0.02))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    scale = scale_by_shape(lambda rows, columns: max(1, rows / columns) ** 0.5)
    after = [scale_by_row_moment(options["b2"]), scale]
    return orthogonalized_momentum(after=after, **pick(OrthogonalOptions, options))


@with_options
def normuon(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NorMuonOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NorMuon for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; for every row i of (out, in) = m x n
    ``v_i = b2 v_i + (1 - b2) mean(O_i^2)`` and ``O'_i = O_i / (sqrt(v_i) + 1e-10)``; then
    ``W <- W - lr (sqrt(max(1, m / n)) O' ||O||_F / ||O'||_F + wd W)``.

    The authors' code keeps ``(1 - mu)`` times this momentum; orthogonalisation forgets the factor.

    Args:
        learning_rate: number or schedule: the authors' is 0.02 (then give ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import normuon
        >>> tx = normuon(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Li et al., NorMuon, arXiv 2510.05491 (github.com/zichongli5/NorMuon).
    """
    direction = functools.partial(scale_by_normuon, **pick(NorMuonOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
