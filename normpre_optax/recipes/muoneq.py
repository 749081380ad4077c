# SPDX-License-Identifier: Apache-2.0
"""MuonEq: Muon of a momentum whose rows, columns or both are made equal first."""

import functools
from typing import Annotated, Literal, Unpack

import optax

from normpre_optax.directions import orthogonalized_momentum
from normpre_optax.finish import hybrid
from normpre_optax.options import Option, OrthogonalOptions, RestOptions, pick, with_options
from normpre_optax.transforms.normalize import equalize_rows_and_columns, normalize_rows
from normpre_optax.transforms.scale import scale_by_shape
from normpre_optax.transforms.wrappers import fixed_orientation

# What is brought to length one before the orthogonalisation.
EQUALIZERS = {
    "rows": normalize_rows(),
    "columns": fixed_orientation(normalize_rows(), "columns"),
    "both": equalize_rows_and_columns(),
}
AUTHORS = {"R": "rows", "C": "columns", "RC": "both"}


class MuonEqOptions(OrthogonalOptions, total=False):
    """Of ``scale_by_muoneq``."""

    mode: Annotated[
        Literal["rows", "columns", "both", "R", "C", "RC"],
        Option(
            "rows",
            '``"rows"``, ``"columns"`` or ``"both"`` at once; ``"R"``, ``"C"`` and ``"RC"`` in the code of '
            "its authors.",
        ),
    ]


class MuonEqOptimizer(MuonEqOptions, RestOptions, total=False):
    """Of ``muoneq``."""


@with_options
def scale_by_muoneq(**options: Unpack[MuonEqOptions]) -> optax.GradientTransformationExtraArgs:
    """The direction of ``muoneq``: rows, columns or both made equal, then orthogonalised; no decay, no learning rate.

    Returns:
        A transformation of matrices alone. Its updates point uphill, as ``optax.scale_by_*`` do.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> from normpre_optax import scale_by_muoneq
        >>> tx = optax.chain(scale_by_muoneq(mode="both"), optax.scale(-1e-3))
        >>> state = tx.init({"kernel": jnp.ones((4, 8))})
    """
    mode = options["mode"]
    return orthogonalized_momentum(
        before=[EQUALIZERS[AUTHORS.get(mode, mode)]],
        after=[scale_by_shape(lambda rows, columns: 0.2 * max(rows, columns) ** 0.5)],
        **pick(OrthogonalOptions, options),
    )


@with_options
def muoneq(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[MuonEqOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """MuonEq for hidden matrices, AdamW for everything else.

    ``M = mu M + G``, ``U = G + mu M`` (Nesterov), ``W <- W - lr (0.2 sqrt(max(m, n)) NS5(E(U)) + wd W)`` with W read as
    (out, in) = m x n. ``E`` divides every row of U by its length (``mode="rows"``, the default), every column by its
    own (``"columns"``), or every entry by both, rows and columns being measured on the same U (``"both"``).

    The authors add 1e-8 to squared lengths. Here lengths neither overflow nor vanish and zero rows stay zero, so that
    the result does not depend on the gradient's scale; the two agree to 1e-8 over the squared lengths.

    Args:
        learning_rate: number or schedule; AdamW's.

    Returns:
        The optimizer.

    Raises:
        TypeError: if an option is misspelt or of another type.
        ValueError: if one is out of range; see ``hybrid``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import muoneq
        >>> tx = muoneq(1e-3, mode="both")
        >>> params = {"kernel": jnp.eye(4), "bias": jnp.ones(4)}
        >>> sorted(tx.init(params).inner_states)
        ['adamw', 'matrix']

    References:
        Chang et al., MuonEq, 2026 (github.com/MaeChd/muon-eq).
    """
    direction = functools.partial(scale_by_muoneq, **pick(MuonEqOptions, options))
    return hybrid(direction, learning_rate, **pick(RestOptions, options))
