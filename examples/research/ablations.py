# SPDX-License-Identifier: Apache-2.0
"""Variants of NormPre for comparison with it.

``normpre_from_x`` builds the preconditioner from X instead of Psi. The paper's ablation
on the source of interaction geometry applies a preconditioner to the same normalized
update ``Psi`` and builds it from the update before normalization, ``X``. It does not
say how to read a threshold of one, or a whole spectrum, from a matrix without unit
rows. In our implementation

- ``Gram(X)`` is scaled to the trace of ``Gram(Psi)``, as in the paper's figures of
  spectra;
- NormPre-G's preconditioner is the polynomial that Newton-Schulz would apply to ``X``,
  on the range of ``X``;
- NormPre-L's is that of the exact eigenspace.

If all rows of ``X`` have the same norm, both equal NormPre-G and NormPre-L
(``method="exact"``).
"""

from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from normpre_optax import direction, scale_to_rms
from normpre_optax.linalg.batches import one_at_a_time
from normpre_optax.linalg.newton_schulz import coefficient_table
from normpre_optax.linalg.rows import tangent_rows, unit_rows
from normpre_optax.optimizer import complete
from normpre_optax.options import checked
from normpre_optax.parameters.dims import from_matrices, to_matrices
from normpre_optax.stages.mapping import map_matrices
from normpre_optax.stages.rows import Tangent
from normpre_optax.stages.stage import CountState, init_count

Alternating = Literal["alternating"]


@checked
def scale_by_normpre_from_x(
    *,
    variant: Literal["normpre_g", "normpre_l"] = "normpre_g",
    rank: int | float = 32,
    momentum: float = 0.95,
    nesterov: bool = False,
    tangent: Tangent = "relaxed",
    orientation: Alternating = "alternating",
    rms: float | None = 0.2,
    ns_steps: int = 5,
    ns_coefficients: str = "muon",
    mu_dtype: Any = None,
    matrix_dims: Any = None,
) -> optax.GradientTransformationExtraArgs:
    """NormPre whose preconditioner is built from ``X``."""

    def polynomial(s: jax.Array) -> jax.Array:
        start = s / jnp.where(s.any(), jnp.linalg.norm(s), 1)
        y = start
        for a, b, c in coefficient_table(ns_coefficients, ns_steps):
            y = a * y + b * y**3 + c * y**5
        return jnp.where(start > 0, y / jnp.where(start > 0, start, 1), 0)

    def clipping(s: jax.Array) -> jax.Array:
        is_clipped = jnp.arange(len(s)) < modes(rank, len(s))
        return jnp.where(is_clipped, 1 / jnp.maximum(s, 1), 1)

    def precondition(u: jax.Array, s: jax.Array, psi: jax.Array) -> jax.Array:
        if variant == "normpre_g":
            return u @ (polynomial(s)[:, None] * (u.T @ psi))
        return psi + u @ ((clipping(s) - 1)[:, None] * (u.T @ psi))

    stages = (
        optax.trace(momentum, nesterov, mu_dtype),
        _from_x(precondition, tangent),
        scale_to_rms(rms),
    )
    return direction(*stages, matrix_dims=matrix_dims)


def modes(rank: int | float, side: int) -> int:
    """How many modes of a matrix with this smaller dimension a rank selects.

    ``rank`` is a number, or a share.
    """
    if isinstance(rank, int):
        return min(rank, side)
    return max(1, round(rank * side))


def _from_x(
    precondition: Callable, tangent: Tangent
) -> optax.GradientTransformationExtraArgs:
    """Apply ``precondition(u, s, psi)`` in alternating orientations.

    ``u`` and ``s`` are left singular vectors and values of X, scaled to the Frobenius
    norm of Psi.
    """

    @one_at_a_time
    def svd(x: jax.Array) -> tuple[jax.Array, ...]:
        return tuple(jnp.linalg.svd(x, full_matrices=False))

    def of_rows(m: jax.Array, w: jax.Array) -> jax.Array:
        x = tangent_rows(m, w, (1,), tangent)
        psi = unit_rows(x, (1,))
        u, s, _ = svd(x)
        scale = jnp.linalg.norm(psi) / jnp.where(s.any(), jnp.linalg.norm(s), 1)
        return precondition(u, s * scale, psi)

    def of_columns(m: jax.Array, w: jax.Array) -> jax.Array:
        return of_rows(m.T, w.T).T

    def update(updates, state, params=None, *, matrix_dims=None, **extra_args):
        def one(m, w, dims):
            new = jax.lax.cond(
                state.count % 2 == 0,
                jax.vmap(of_rows),
                jax.vmap(of_columns),
                to_matrices(m, dims),
                to_matrices(w, dims),
            )
            return from_matrices(new, dims, m.shape)

        new = map_matrices(one, updates, params, matrix_dims)
        return new, CountState(jnp.asarray(optax.safe_increment(state.count)))

    return optax.GradientTransformationExtraArgs(init_count, update)


normpre_from_x = complete(scale_by_normpre_from_x)
