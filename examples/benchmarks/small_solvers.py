# SPDX-License-Identifier: Apache-2.0
"""Solvers that ``small_eigh`` compares: what clipping needs of small symmetric matrices, by eigenpairs or without.

All take ``G`` ``(..., l, l)`` and give ``Z diag(s) Z^T`` with ``s_i = lambda_i^-1/2 - 1`` for the ``rank`` largest
eigenvalues where they exceed one, else 0. Two are written here. Jacobi's method turns all pairs of a round at once. The
filter needs no eigenvectors: it looks for a threshold with just ``rank`` eigenvalues above it, then takes a sign
function and an inverse square root, nearly all of it matrix products.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax.linalg import EighImplementation

from normpre_optax.linalg.lapack import eigh
from normpre_optax.linalg.newton_schulz import coefficient_table, unit_frobenius
from normpre_optax.linalg.precision import product

Clip = tuple[jax.Array, jax.Array | None]
"""``Z diag(s) Z^T`` and, from the filter, the rounds that its search took."""


def clip_by_modes(values: jax.Array, vectors: jax.Array) -> Clip:
    """From the leading eigenvalues and eigenvectors, these in columns."""
    return product(vectors * (1 / jnp.sqrt(jnp.maximum(values, 1)) - 1)[..., None, :], vectors.mT), None


def clip_by_eigh(g: jax.Array, rank: int) -> Clip:
    """By the library."""
    values, vectors = eigh(g)
    return clip_by_modes(values[..., :rank], vectors[..., :rank])


def clip_by_jax(g: jax.Array, rank: int, implementation: EighImplementation | None) -> Clip:
    """By one call for the whole stack."""
    vectors, values = jax.lax.linalg.eigh(g, implementation=implementation)
    return clip_by_modes(values[..., -rank:], vectors[..., -rank:])


def clip_by_jacobi(g: jax.Array, rank: int, sweeps: int) -> Clip:
    """Parallel cyclic Jacobi. Row ``i`` meets row ``i + half``; between rounds all but the first move on one seat."""
    size = g.shape[-1]
    half = (size + 1) // 2
    g = jnp.pad(g, [(0, 0)] * (g.ndim - 2) + [(0, 2 * half - size)] * 2)  # a zero row is never turned
    seats = np.r_[0, half, 1 : half - 1, half + 1 : 2 * half, half - 1]

    def turn(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        p, q = x[..., :half, :], x[..., half:, :]
        return jnp.concatenate([cos * p - sin * q, sin * p + cos * q], axis=-2)[..., seats, :]

    def one_round(_, both: jax.Array) -> jax.Array:
        a = both[..., : 2 * half]
        diagonal = jnp.diagonal(a, axis1=-2, axis2=-1)
        off = jnp.diagonal(a[..., :half, half:], axis1=-2, axis2=-1)
        tau = (diagonal[..., half:] - diagonal[..., :half]) / (2 * jnp.where(off == 0, 1, off))
        tan = jnp.where(tau < 0, -1, 1) / (jnp.abs(tau) + jnp.sqrt(1 + tau**2))
        tan = jnp.where(off == 0, 0, tan)[..., None]
        cos = 1 / jnp.sqrt(1 + tan**2)
        both = turn(both, cos, tan * cos)
        return jnp.concatenate([turn(both[..., : 2 * half].mT, cos, tan * cos), both[..., 2 * half :]], axis=-1)

    both = jnp.concatenate([g, jnp.broadcast_to(jnp.eye(2 * half, dtype=g.dtype), g.shape)], axis=-1)
    both = jax.lax.fori_loop(0, sweeps * (2 * half - 1), one_round, both)
    values, leading = jax.lax.top_k(jnp.diagonal(both[..., : 2 * half], axis1=-2, axis2=-1), rank)
    rows = jnp.take_along_axis(both[..., 2 * half :], leading[..., None], axis=-2)
    return clip_by_modes(values, rows[..., :size].mT)


def triples(growth: int) -> jax.Array:
    """Odd quintics that bring ``[4^-growth / 1000, 1]`` to one: Polar Express, then three steps that settle there."""
    first, second, *rest = coefficient_table("polar_express", 5)
    return jnp.asarray([first, *[second] * (growth + 1), *rest, *[(1.875, -1.25, 0.375)] * 3])


def sign(a: jax.Array) -> jax.Array:
    """The matrix sign function."""

    def step(y: jax.Array, abc: jax.Array):
        square = product(y, y)
        return abc[0] * y + product(y, abc[1] * square + abc[2] * product(square, square)), None

    return jax.lax.scan(step, unit_frobenius(a), triples(6))[0]


def inverse_square_root(a: jax.Array) -> jax.Array:
    """Of positive definite matrices with condition numbers up to a million: the same steps on a pair."""
    identity = jnp.eye(a.shape[-1], dtype=a.dtype)

    def step(yz: tuple[jax.Array, jax.Array], abc: jax.Array):
        y, z = yz
        w = product(z, y)
        factor = abc[0] * identity + abc[1] * w + abc[2] * product(w, w)
        return (product(y, factor), product(factor, z)), None

    scale = jnp.linalg.norm(a, axis=(-2, -1), keepdims=True)
    start = a / scale, jnp.broadcast_to(identity, a.shape)
    return jax.lax.scan(step, start, triples(0))[0][1] / jnp.sqrt(scale)


def positive_by_sign(a: jax.Array) -> jax.Array:
    """How many eigenvalues are positive, by the trace of the sign function."""
    return jnp.round((a.shape[-1] + jnp.trace(sign(a), axis1=-2, axis2=-1)) / 2)


def positive_by_pivots(a: jax.Array) -> jax.Array:
    """How many eigenvalues are positive, by the signs of the pivots of ``L D L^T`` (unpivoted, hence fallible)."""
    tiny = jnp.finfo(a.dtype).eps * jnp.max(jnp.abs(a), axis=(-2, -1), keepdims=True)

    def eliminate(j: jax.Array, carry: tuple[jax.Array, jax.Array]):
        a, count = carry
        row = jax.lax.dynamic_slice_in_dim(a, j, 1, axis=-2)
        column = jax.lax.dynamic_slice_in_dim(a, j, 1, axis=-1)
        pivot = jax.lax.dynamic_slice_in_dim(row, j, 1, axis=-1)
        pivot = jnp.where(jnp.abs(pivot) < tiny, tiny, pivot)
        return a - column / pivot * row, count + (pivot[..., 0, 0] > 0)

    return jax.lax.fori_loop(0, a.shape[-1], eliminate, (a, jnp.zeros(a.shape[:-2], a.dtype)))[1]


def threshold(g: jax.Array, rank: int, positive: Callable, shifts: int) -> Clip:
    """A number with ``rank`` eigenvalues above it, or one if no more than ``rank`` exceed one; and the rounds taken.

    After 24 halvings of the interval's logarithm the search gives up and takes the middle of what is left.
    """
    identity = jnp.eye(g.shape[-1], dtype=g.dtype)
    inner = jnp.arange(1, shifts + 1) / (shifts + 1)
    limit = math.ceil(24 / math.log2(shifts + 1))

    def narrow(state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        i, low, high, found = state
        places = low[..., None] + (high - low)[..., None] * inner  # logarithms
        count = positive(g[..., None, :, :] - jnp.exp(places)[..., None, None] * identity)
        hit = count == rank
        middle = jnp.sum(places * hit, axis=-1) / jnp.maximum(jnp.sum(hit, axis=-1), 1)
        new_low = jnp.max(jnp.where(count > rank, places, low[..., None]), axis=-1)
        new_high = jnp.min(jnp.where(count < rank, places, high[..., None]), axis=-1)
        hit = jnp.any(hit, axis=-1)
        ends = (jnp.where(found, old, jnp.where(hit, middle, new)) for old, new in ((low, new_low), (high, new_high)))
        return i + 1, *ends, found | hit

    few = positive(g - identity) <= rank
    high = jnp.where(few, 0, jnp.log(jnp.maximum(jnp.linalg.norm(g, axis=(-2, -1)), 1)))
    state = jnp.int32(0), jnp.zeros_like(high), high, few
    rounds, low, high, _ = jax.lax.while_loop(lambda s: (s[0] < limit) & ~jnp.all(s[3]), narrow, state)
    return jnp.exp((low + high) / 2), rounds


def clip_by_filter(g: jax.Array, rank: int, positive: Callable, shifts: int) -> Clip:
    """With ``P`` onto the modes above the threshold, ``(I + P (G - I))^-1/2 - I``: modes near one do not matter."""
    identity = jnp.eye(g.shape[-1], dtype=g.dtype)
    at, rounds = threshold(g, rank, positive, shifts)
    kept = product((identity + sign(g - at[..., None, None] * identity)) / 2, g - identity)
    return inverse_square_root(identity + (kept + kept.mT) / 2) - identity, rounds
