# SPDX-License-Identifier: Apache-2.0
"""Variants of NormPre that exist to be compared with it.

``normpre_g_from_x`` and ``normpre_l_from_x`` build the preconditioner from X instead of Psi. The paper's ablation on
the source of interaction geometry applies a preconditioner to the same normalised update ``Psi`` and builds it from the
update before normalisation, ``X``. It does not say how a threshold of one, or a whole spectrum, is to be read off a
matrix that has no unit rows; here

- ``Gram(X)`` is scaled to the trace of ``Gram(Psi)``, as in the paper's figures of spectra;
- NormPre-G's preconditioner is the polynomial that Newton-Schulz would apply to ``X``, on the range of ``X``;
- NormPre-L's is that of the exact eigenspace.

Where ``X`` has rows of equal length, both give what NormPre-G and NormPre-L (``method="exact"``) do.

``normpre_g_tangent_on`` has the tangent stage on steps of rows only, or on those of columns.
"""

from collections.abc import Callable
from typing import Literal, Unpack

import jax
import jax.numpy as jnp
import optax

from normpre_optax import (
    alternate_orientation,
    as_matrices,
    chain,
    hybrid,
    normalize_rows,
    project_to_tangent,
    scale_to_rms,
)
from normpre_optax.directions import orthogonalize
from normpre_optax.linalg.lapack import svd
from normpre_optax.linalg.newton_schulz import coefficient_table, unit_frobenius
from normpre_optax.linalg.rows import unit_rows
from normpre_optax.options import (
    NewtonSchulzOptions,
    NormPreGOptimizer,
    NormPreLOptimizer,
    NormPreOptimizer,
    RestOptions,
    pick,
    with_options,
)
from normpre_optax.transforms.checks import count_or_share
from normpre_optax.transforms.wrappers import fixed_orientation


@with_options
def normpre_g_from_x(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NormPreGOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G whose preconditioner is built from ``X``."""
    if options["ns_steps"] is None:
        raise ValueError("ns_steps=None: this variant is a polynomial")
    table = coefficient_table(options["ns_coefficients"], options["ns_steps"])

    def factors(s: jax.Array) -> jax.Array:
        start = s / jnp.where(s.any(axis=-1, keepdims=True), jnp.linalg.norm(s, axis=-1, keepdims=True), 1)
        y = start
        for a, b, c in table:
            y = a * y + b * y**3 + c * y**5
        return jnp.where(start > 0, y / jnp.where(start > 0, start, 1), 0)

    def precondition(u: jax.Array, s: jax.Array, psi: jax.Array) -> jax.Array:
        return u @ (factors(s)[..., None] * (u.mT @ psi))

    return _finished(learning_rate, _from_x(precondition, options), options)


@with_options
def normpre_l_from_x(
    learning_rate: optax.ScalarOrSchedule, **options: Unpack[NormPreLOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NormPre-L whose preconditioner is built from ``X``."""
    budget = count_or_share("rank", options["rank"])

    def precondition(u: jax.Array, s: jax.Array, psi: jax.Array) -> jax.Array:
        rank = budget(s.shape[-1])
        s, u = s[..., :rank], u[..., :rank]
        change = jnp.where(s > 1, 1 / jnp.maximum(s, 1) - 1, 0)
        return psi + u @ (change[..., None] * (u.mT @ psi))

    return _finished(learning_rate, _from_x(precondition, options), options)


FROM_X = {"normpre_g": normpre_g_from_x, "normpre_l": normpre_l_from_x}


@with_options
def normpre_g_tangent_on(
    learning_rate: optax.ScalarOrSchedule, tangent_on: Literal["rows", "columns"], **options: Unpack[NormPreGOptimizer]
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G that leaves the radial part alone on the steps that normalise the others, rows or columns."""

    def turn(orientation: Literal["rows", "columns"], number: int) -> optax.GradientTransformation:
        tangent = options["tangent"] if orientation == tangent_on else "none"
        stage = chain(project_to_tangent(tangent, options["tangent_radius"]), normalize_rows())
        its_turn = lambda step, **_: jnp.mod(step, 2) == number  # noqa: E731
        return optax.conditionally_transform(fixed_orientation(stage, orientation), its_turn)

    spectral = orthogonalize(**pick(NewtonSchulzOptions, options))
    stages = optax.chain(turn("rows", 0), turn("columns", 1), spectral)
    return _finished(learning_rate, stages, options)


def _from_x(precondition: Callable, options: NormPreOptimizer) -> optax.GradientTransformation:
    """``precondition(u, s, psi)`` with the left singular vectors and values of X, its Gram's trace matched to Psi's."""

    def stage(x: jax.Array) -> jax.Array:
        psi = unit_rows(x)
        u, s, _ = svd(unit_frobenius(x))
        return precondition(u, s * jnp.linalg.norm(psi, axis=(-2, -1))[..., None], psi)

    spectral = optax.stateless(lambda updates, params: jax.tree.map(stage, updates))
    return alternate_orientation(chain(project_to_tangent(options["tangent"], options["tangent_radius"]), spectral))


def _finished(
    learning_rate: optax.ScalarOrSchedule, stages: optax.GradientTransformation, options: NormPreOptimizer
) -> optax.GradientTransformationExtraArgs:
    """Algorithm 1 with ``stages`` between momentum and scale."""
    if options["orientation"] != "alternating":
        raise ValueError(f"orientation={options['orientation']!r}: this variant alternates")
    momentum = optax.trace(options["momentum"], options["nesterov"], options["mu_dtype"])

    def direction(matrix_dims) -> optax.GradientTransformation:
        return optax.chain(momentum, as_matrices(matrix_dims, chain(stages, scale_to_rms(options["rms"]))))

    return hybrid(direction, learning_rate, **pick(RestOptions, options))
