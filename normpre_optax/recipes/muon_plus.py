# SPDX-License-Identifier: Apache-2.0
"""Muon+: Muon whose orthogonalised update is normalised along rows, columns, or one after the other."""

import functools
from typing import Annotated, Literal, Unpack

import optax

from normpre_optax.directions import orthogonalized_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import Option, OrthogonalOptions, RestOptions, pick, with_options
from normpre_optax.transforms.normalize import normalize_rows
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import fixed_orientation

# The authors' guard: the orthogonalised matrix has unit scale, so it does not see that of the gradients.
EPS = 1e-7
ORDERS = {"rows": ("rows",), "columns": ("columns",), "both": ("rows", "columns"), "columns_rows": ("columns", "rows")}
AUTHORS = {"row": "rows", "col": "columns", "row_col": "both", "col_row": "columns_rows"}


class MuonPlusOptions(OrthogonalOptions, total=False):
    """Of ``scale_by_muon_plus``."""

    mode: Annotated[
        Literal["rows", "columns", "both", "columns_rows", "row", "col", "row_col", "col_row"],
        Option(
            "both",
            'what is normalised: ``"rows"``, ``"columns"``, ``"both"`` (rows, then columns, as its authors '
            'run it) or ``"columns_rows"``; ``norm_mode`` in their code, with ``"row"``, ``"col"``, '
            '``"row_col"`` and ``"col_row"``.',
        ),
    ]


class MuonPlusOptimizer(MuonPlusOptions, RestOptions, total=False):
    """Of ``muon_plus``."""


@with_options
def scale_by_muon_plus(**options: Unpack[MuonPlusOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``muon_plus``: orthogonalised, then normalised; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_muon_plus
        >>> tx = optax.chain(scale_by_muon_plus(), optax.scale(-0.02))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    mode = options["mode"]
    lengths = [fixed_orientation(normalize_rows(EPS), axis) for axis in ORDERS[AUTHORS.get(mode, mode)]]
    scale = scale_by_shape(lambda rows, columns: (rows / columns) ** 0.5)
    return orthogonalized_momentum(after=[*lengths, scale], **pick(OrthogonalOptions, options))


@with_options
def muon_plus(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[MuonPlusOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """Muon+ for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``O = NS5(U)``; then ``O <- O / sqrt(sum O^2 + 1e-7)`` with sums
    along every row, every column, or the one after the other; and ``W <- W - lr (sqrt(m / n) O + wd W)`` with W read as
    (out, in) = m x n. The factor is below one for wide matrices, unlike Muon's.

    Args:
        learning_rate: number or schedule; about 0.02 is a start (then give ``adam_learning_rate`` too).

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import muon_plus
        >>> tx = muon_plus(0.02, adam_learning_rate=3e-4)
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Muon+, 2026 (github.com/K1seki221/MuonPlus).
    """
    direction = functools.partial(scale_by_muon_plus, **pick(MuonPlusOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
