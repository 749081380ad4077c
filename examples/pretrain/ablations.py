# SPDX-License-Identifier: Apache-2.0
"""Variants of NormPre that exist to be compared with it: the preconditioner built from X instead of Psi.

The paper's ablation on the source of interaction geometry applies a preconditioner to the same normalised update
``Psi`` and builds it from the update before normalisation, ``X``. It does not say how a threshold of one, or a whole
spectrum, is to be read off a matrix that has no unit rows; here

- ``Gram(X)`` is scaled to the trace of ``Gram(Psi)``, as in the paper's figures of spectra;
- NormPre-G's preconditioner is the polynomial that Newton-Schulz would apply to ``X``, on the range of ``X``;
- NormPre-L's is that of the exact eigenspace.

Where ``X`` has rows of equal length, both give what NormPre-G and NormPre-L (``method="exact"``) do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from normpre_optax import alternate_orientation, as_matrices, chain, hybrid, project_to_tangent, scale_to_rms
from normpre_optax.linalg.lapack import svd
from normpre_optax.linalg.newton_schulz import coefficient_table, unit_frobenius
from normpre_optax.linalg.rows import unit_rows


def normpre_g_from_x(
    learning_rate: optax.ScalarOrSchedule,
    *,
    ns_steps: int = 5,
    ns_coefficients: str = "muon",
    momentum: float = 0.95,
    tangent: str = "relaxed",
    tangent_radius: float = 1.0,
    rms: float = 0.2,
    weight_decay: float = 0.1,
    matrix_dims=None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-G whose preconditioner is built from ``X``; arguments as those of ``normpre_optax.normpre_g``."""

    def factors(s: jax.Array) -> jax.Array:
        start = s / jnp.where(s.any(axis=-1, keepdims=True), jnp.linalg.norm(s, axis=-1, keepdims=True), 1)
        y = start
        for a, b, c in coefficient_table(ns_coefficients, ns_steps):
            y = a * y + b * y**3 + c * y**5
        return jnp.where(start > 0, y / jnp.where(start > 0, start, 1), 0)

    def precondition(u: jax.Array, s: jax.Array, psi: jax.Array) -> jax.Array:
        return u @ (factors(s)[..., None] * (u.mT @ psi))

    direction = _direction(precondition, momentum, tangent, tangent_radius, rms)
    rest = {"weight_decay": weight_decay, "matrix_dims": matrix_dims, "adam_b1": adam_b1, "adam_b2": adam_b2}
    return hybrid(direction, learning_rate, **rest)


def normpre_l_from_x(
    learning_rate: optax.ScalarOrSchedule,
    *,
    rank: int = 32,
    momentum: float = 0.95,
    tangent: str = "relaxed",
    tangent_radius: float = 1.0,
    rms: float = 0.2,
    weight_decay: float = 0.1,
    matrix_dims=None,
    adam_b1: float = 0.9,
    adam_b2: float = 0.95,
) -> optax.GradientTransformationExtraArgs:
    """NormPre-L whose preconditioner is built from ``X``; arguments as those of ``normpre_optax.normpre_l``."""

    def precondition(u: jax.Array, s: jax.Array, psi: jax.Array) -> jax.Array:
        s, u = s[..., :rank], u[..., :rank]
        change = jnp.where(s > 1, 1 / jnp.maximum(s, 1) - 1, 0)
        return psi + u @ (change[..., None] * (u.mT @ psi))

    direction = _direction(precondition, momentum, tangent, tangent_radius, rms)
    rest = {"weight_decay": weight_decay, "matrix_dims": matrix_dims, "adam_b1": adam_b1, "adam_b2": adam_b2}
    return hybrid(direction, learning_rate, **rest)


FROM_X = {"normpre_g": normpre_g_from_x, "normpre_l": normpre_l_from_x}


def _direction(precondition: Callable, momentum: float, tangent: str, radius: float, rms: float) -> Callable:
    """Algorithm 1 with ``precondition(u, s, psi)``: left singular vectors and values of X, its Gram's trace matched."""

    def stage(x: jax.Array) -> jax.Array:
        psi = unit_rows(x)
        u, s, _ = svd(unit_frobenius(x))
        return precondition(u, s * jnp.linalg.norm(psi, axis=(-2, -1))[..., None], psi)

    spectral = optax.stateless(lambda updates, params: jax.tree.map(stage, updates))

    def direction(matrix_dims):
        stages = chain(
            alternate_orientation(chain(project_to_tangent(tangent, radius), spectral)),
            scale_to_rms(rms),
        )
        return optax.chain(optax.trace(momentum), as_matrices(matrix_dims, stages))

    return direction
