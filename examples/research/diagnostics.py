# SPDX-License-Identifier: Apache-2.0
"""Numbers about matrices: spectra, mode energies, ranks, alignment, norms.

Functions of matrices ``(..., m, n)`` with output neurons as rows. ``normalized``
returns ``X`` and ``Psi`` of a momentum and a weight. ``measure`` takes a parameter in
its own layout and returns many diagnostics by name.

Everything is computed in at least float32. Singular values below ``max(m, n) eps``
times the largest count as zero.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax import MatrixDims
from normpre_optax.linalg.batches import one_at_a_time
from normpre_optax.linalg.products import at_least_float32, exact_product
from normpre_optax.linalg.rows import tangent_rows, unit_rows
from normpre_optax.linalg.sketch import clip_by_sketch, sum_of_squares, to_threshold
from normpre_optax.parameters.dims import to_matrices

ORIENTATIONS = ("rows", "columns")
NAMES = (
    "spectra",
    "mode_energies",
    "active_modes",
    "stable_rank",
    "condition_number",
    "row_norms",
    "radial_factor",
    "alignment",
    "update_rms",
)


class Signal(NamedTuple):
    """``X``, the momentum after the tangent projection, and ``Psi``.

    The rows of ``Psi`` are those of ``X`` divided by their norms.
    """

    x: jax.Array
    psi: jax.Array


class Spectra(NamedTuple):
    """Eigenvalues of the Gram matrices, largest first, ``(..., min(m, n))``.

    Both sum to the number of rows.
    """

    before: jax.Array
    after: jax.Array


class ModeEnergies(NamedTuple):
    """The squared change of singular values by ``msign``, by modes, ``(...,)`` each.

    Attributes:
        top: the at most ``rank`` largest eigenvalues above one: what NormPre-L changes.
        remain: the other eigenvalues above one.
        sub: eigenvalues between zero and one.
    """

    top: jax.Array
    remain: jax.Array
    sub: jax.Array

    def shares(self) -> "ModeEnergies":
        """Return each as a fraction of their sum; all are zero if the sum is."""
        total = self.top + self.remain + self.sub
        total = jnp.where(total == 0, 1, total)
        return ModeEnergies(self.top / total, self.remain / total, self.sub / total)


class RowNorms(NamedTuple):
    """Statistics of the row norms of a matrix, ``(...,)`` each."""

    mean: jax.Array
    deviation: jax.Array
    smallest: jax.Array
    largest: jax.Array


class RadialFactor(NamedTuple):
    """Statistics of ``1 - ||w||^2`` over the rows of a matrix, ``(...,)`` each.

    ``reversed`` counts negative ones.
    """

    mean: jax.Array
    smallest: jax.Array
    reversed: jax.Array


class SketchError(NamedTuple):
    """Distance of a sketched eigenspace from the exact one.

    Attributes:
        angles: principal angles in radians, smallest first, ``(..., k)``.
        preconditioner: ``||P_hat - P||_op``: the least ``delta`` of Corollary 1 for
            this matrix, ``(...,)``.
    """

    angles: jax.Array
    preconditioner: jax.Array


def normalized(
    momentum: jax.Array, weight: jax.Array, tangent: str = "relaxed"
) -> Signal:
    """Return ``X`` and ``Psi``, the input of the spectral stage, with rows normalized.

    Example:
        >>> x, psi = normalized(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 1.0]]))
        >>> print(x, psi)
        [[3. 0.]] [[1. 0.]]
    """
    m = at_least_float32(momentum)
    w = at_least_float32(weight)
    x = tangent_rows(m, w, (-1,), tangent)
    return Signal(x, unit_rows(x, (-1,)))


def trace_matched_spectra(x: jax.Array) -> Spectra:
    """Return eigenvalues of Gram matrices before and after normalization.

    They are those of ``(m / tr(X X^T)) X X^T`` and of ``Psi Psi^T``.

    Example:
        >>> before, after = trace_matched_spectra(jnp.diag(jnp.array([1.0, 3.0])))
        >>> print(f"{before[0]:.3f} {after[0]:.3f}")
        1.800 1.000

    References:
        Normalize-Then-Precondition, "Eigenspectra Before and After Normalization".
    """
    x = _unit_frobenius(x)
    before = singular_values(x) ** 2 * x.shape[-2]
    after = singular_values(unit_rows(x, (-1,))) ** 2
    return Spectra(before, after)


def mode_energies(psi: jax.Array, rank: int = 32) -> ModeEnergies:
    """Return sums of ``(sqrt(lambda_i) - 1)^2`` over the modes of ``Psi Psi^T``.

    Example:
        >>> energies = mode_energies(jnp.diag(jnp.array([4.0, 3.0, 0.5])), rank=1)
        >>> print(*map(float, energies))
        9.0 4.0 0.25

    References:
        Normalize-Then-Precondition, "Global and Localized Spectral Preconditioning".
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    values = singular_values(psi)
    energy = jnp.where(values == 0, 0, (values - 1) ** 2)
    top = (values > 1) & (jnp.arange(values.shape[-1]) < rank)

    def energy_of(part):
        return jnp.sum(jnp.where(part, energy, 0), axis=-1)

    return ModeEnergies(
        top=energy_of(top),
        remain=energy_of((values > 1) & ~top),
        sub=energy_of(values < 1),
    )


def active_modes(psi: jax.Array) -> jax.Array:
    """Return how many eigenvalues of ``Psi Psi^T`` are above one, int32 ``(...,)``."""
    return jnp.sum(singular_values(psi) > 1, axis=-1, dtype=jnp.int32)


def stable_rank(x: jax.Array) -> jax.Array:
    """Return ``||X||_F^2 / ||X||_op^2``, between 1 and ``min(m, n)``.

    0 if X is zero.
    """
    values = singular_values(_unit_frobenius(x))
    largest = values[..., :1]
    largest = jnp.where(largest == 0, 1, largest)
    return jnp.sum((values / largest) ** 2, axis=-1)


def condition_number(x: jax.Array) -> jax.Array:
    """Return ``sigma_1 / sigma_min(m, n)``; infinite without full rank."""
    values = singular_values(_unit_frobenius(x))
    smallest = values[..., -1]
    is_singular = smallest == 0
    ratio = values[..., 0] / jnp.where(is_singular, 1, smallest)
    return jnp.where(is_singular, jnp.inf, ratio)


def descent_alignment(gradient: jax.Array, direction: jax.Array) -> jax.Array:
    """Return the cosine between a gradient and what is subtracted from the weight.

    0 if one of them is zero.

    References:
        Normalize-Then-Precondition, "Training Dynamics".
    """
    products = _unit_frobenius(gradient) * _unit_frobenius(direction)
    return jnp.sum(products, axis=(-2, -1))


def update_rms(update: jax.Array) -> jax.Array:
    """Return ``||T||_F / sqrt(m n)``."""
    update = at_least_float32(update)
    # Squares of very large or small entries would not be finite, or zero.
    largest = jnp.max(jnp.abs(update), (-2, -1), keepdims=True)
    squares = jnp.square(update / jnp.where(largest == 0, 1, largest))
    return largest[..., 0, 0] * jnp.sqrt(jnp.mean(squares, (-2, -1)))


def row_norm_statistics(x: jax.Array) -> RowNorms:
    """Return mean, standard deviation and range of the row norms.

    Example:
        >>> print(*row_norm_statistics(jnp.array([[3.0, 4.0], [0.0, 1.0]])))
        3.0 2.0 1.0 5.0
    """
    norms = _row_norms(at_least_float32(x))[..., 0]
    return RowNorms(norms.mean(-1), norms.std(-1), norms.min(-1), norms.max(-1))


def radial_factor(weight: jax.Array) -> RadialFactor:
    """Return statistics of ``1 - ||w_i||^2``.

    By it the relaxed tangent multiplies the radial part of row i.

    Example:
        >>> print(*radial_factor(jnp.array([[2.0, 0.0], [0.0, 1.0]])))
        -1.5 -3.0 1

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum".
    """
    factor = 1 - _row_norms(at_least_float32(weight))[..., 0] ** 2
    negative = jnp.sum(factor < 0, axis=-1, dtype=jnp.int32)
    return RadialFactor(factor.mean(-1), factor.min(-1), negative)


@functools.partial(jax.jit, static_argnames=("rank", "power_iterations"))
def sketch_error(
    psi: jax.Array, omega: jax.Array, rank: int = 32, power_iterations: int = 1
) -> SketchError:
    """Compare the sketch of Algorithm 2 with the exact eigenspace of ``Psi Psi^T``.

    It is that of the smaller dimension.
    ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over the ``rank`` leading modes with
    ``lambda_i > 1``; ``P_hat`` is the same of the sketched modes.

    Args:
        psi: ``(..., m, n)``.
        omega: Gaussian draws ``(..., l, max(m, n))``; l is rank + oversampling.
        rank: r.
        power_iterations: p.

    Example:
        >>> psi = jnp.diag(jnp.array([5.0, 3.0, 1.0, 0.1]))
        >>> draws = jax.random.normal(jax.random.key(0), (3, 4))
        >>> error = sketch_error(psi, draws, rank=2, power_iterations=8)
        >>> print(bool(error.angles.max() < 1e-3), bool(error.preconditioner < 1e-3))
        True True

    References:
        Normalize-Then-Precondition, Algorithm 2 and Corollary 1.
    """
    wide = at_least_float32(psi)
    if wide.shape[-2] > wide.shape[-1]:
        wide = wide.mT
    draws = at_least_float32(omega)[..., : wide.shape[-2], :]
    to_one = to_threshold(sum_of_squares(wide), rank)
    # Only the basis is used: orthonormal rows of the subspace that the library's sketch
    # finds.
    ((basis, *_),) = clip_by_sketch(
        [wide], [draws], [to_one], power_iterations, True, wide.dtype
    )
    basis = jnp.vectorize(_qr, signature="(n,l)->(n,l)")(basis.mT).mT
    seen = exact_product(basis, wide)
    values, rows = _leading(exact_product(seen, seen.mT), rank)
    found = exact_product(rows, basis)
    p_hat = _clips_to_one(values, found)
    values, exact = _leading(exact_product(wide, wide.mT), rank)
    p = _clips_to_one(values, exact)
    angles = principal_angles(found, exact)
    return SketchError(angles, singular_values(p_hat - p)[..., 0])


def _leading(gram: jax.Array, rank: int) -> tuple[jax.Array, jax.Array]:
    """The largest eigenvalues, and their eigenvectors as rows."""
    eigh = jnp.vectorize(_eigh, signature="(m,m)->(m),(m,m)")
    values, vectors = eigh(gram)
    largest = values[..., ::-1][..., :rank]
    return largest, vectors.mT[..., ::-1, :][..., :rank, :]


def _clips_to_one(values: jax.Array, rows: jax.Array) -> jax.Array:
    """The preconditioner that clips modes with these eigenvalues to one."""
    change = jax.lax.rsqrt(jnp.maximum(values, 1)) - 1
    changed = exact_product((rows * change[..., None]).mT, rows)
    return jnp.eye(rows.shape[-1], dtype=rows.dtype) + changed


def principal_angles(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the angles between two subspaces in radians, smallest first, ``(..., k)``.

    Small angles are computed from their sines and large ones from their cosines,
    against rounding.

    Args:
        a: orthonormal rows ``(..., k, n)``.
        b: orthonormal rows ``(..., k, n)``.

    Example:
        >>> a = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
        >>> b = jnp.array([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
        >>> print(principal_angles(a, b).round(4))
        [0.     0.9273]
    """
    overlap = exact_product(a, b.mT)
    cosines = jnp.minimum(_svd(overlap), 1)
    sines = jnp.minimum(_svd(a - exact_product(overlap, b))[..., ::-1], 1)
    return jnp.where(sines**2 < 0.5, jnp.arcsin(sines), jnp.arccos(cosines))


def measure(
    momentum: jax.Array,
    weight: jax.Array,
    dims: MatrixDims | None = None,
    *,
    names: Iterable[str] | None = None,
    gradient: jax.Array | None = None,
    update: jax.Array | None = None,
    rank: int = 32,
    orientation: str = "rows",
    tangent: str = "relaxed",
) -> dict[str, Any]:
    """Return diagnostics of one parameter in its own layout, by name.

    ``spectra`` are those of ``X``; ``mode_energies``, ``active_modes``, ``stable_rank``
    and ``condition_number`` those of ``Psi``; ``row_norms`` and ``radial_factor`` those
    of the weight; ``alignment`` and ``update_rms`` those of the update.

    Args:
        momentum: of the parameter, or its gradient.
        weight: the parameter.
        dims: its axes; None for matrices ``(..., out, in)``.
        names: which of ``NAMES``; None for all that the arguments allow.
        gradient: for "alignment".
        update: for "alignment" and "update_rms": the final update, which is added to
            the weight.
        rank: r of ``mode_energies``.
        orientation: "rows" or "columns": which of them are normalized.
        tangent: see ``normpre_optax.project_to_tangent``.

    Returns:
        Arrays, or named tuples of arrays, with a leading axis for the matrices of the
        parameter.

    Raises:
        ValueError: if a name or the orientation is unknown, or a name needs an argument
            that is missing.

    Example:
        >>> kernel = jnp.array([[0.0, 0.6], [0.0, 0.8]])  # (in, out)
        >>> names = ["row_norms", "active_modes"]
        >>> found = measure(jnp.eye(2), kernel, MatrixDims(0, 1), names=names)
        >>> print(found["row_norms"].largest, found["active_modes"])
        [1.] [1]
    """
    missing = {
        "alignment": gradient is None or update is None,
        "update_rms": update is None,
    }
    if names is None:
        names = [name for name in NAMES if not missing.get(name)]
    names = check_names(names)
    for name in names:
        if missing.get(name):
            needed = "update"
            if update is not None:
                needed = "gradient"
            raise ValueError(f"the diagnostic {name!r} needs the argument {needed}")
    if orientation not in ORIENTATIONS:
        raise ValueError(f"{orientation=} is not one of {ORIENTATIONS}")
    turn = functools.partial(_oriented, dims=dims, orientation=orientation)
    m, w, g, u = map(turn, (momentum, weight, gradient, update))
    x, psi = normalized(m, w, tangent)
    functions = {
        "spectra": lambda: trace_matched_spectra(x),
        "mode_energies": lambda: mode_energies(psi, rank),
        "active_modes": lambda: active_modes(psi),
        "stable_rank": lambda: stable_rank(psi),
        "condition_number": lambda: condition_number(psi),
        "row_norms": lambda: row_norm_statistics(w),
        "radial_factor": lambda: radial_factor(w),
        "alignment": lambda: descent_alignment(g, -u),
        "update_rms": lambda: update_rms(u),
    }
    return {name: functions[name]() for name in names}


def _oriented(x: Any, dims: MatrixDims | None, orientation: str) -> Any:
    """A parameter as matrices whose rows are normalized; None stays None."""
    if x is None:
        return None
    if dims is not None:
        x = to_matrices(x, dims)
    stack = at_least_float32(x)
    if orientation == "columns":
        return stack.mT
    return stack


def check_names(names: str | Iterable[str]) -> tuple[str, ...]:
    """Return ``names`` as a tuple; raise a ValueError if one is not a diagnostic."""
    found = tuple(names)
    if isinstance(names, str):
        found = (names,)
    unknown = [name for name in found if name not in NAMES]
    if unknown or not found:
        raise ValueError(
            f"unknown diagnostics {unknown}; choose from {', '.join(NAMES)}"
        )
    return found


def singular_values(x: jax.Array) -> jax.Array:
    """Return singular values, largest first, ``(..., min(m, n))``.

    Those that are rounding errors are zero.
    """
    values = _svd(at_least_float32(x))
    rounding = max(x.shape[-2:]) * jnp.finfo(values.dtype).eps * values[..., :1]
    return jnp.where(values <= rounding, 0, values)


@jax.jit
def _svd(x: jax.Array) -> jax.Array:
    """Singular values of every matrix, one after the other."""
    one = one_at_a_time(lambda y: jnp.linalg.svd(y, compute_uv=False))
    return jnp.vectorize(one, signature="(m,n)->(k)")(x)


def _qr(x: jax.Array) -> jax.Array:
    """Orthonormal columns of every matrix, one after the other."""
    return one_at_a_time(lambda y: jnp.linalg.qr(y)[0])(x)


def _eigh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues and eigenvectors of every matrix, one after the other."""
    return one_at_a_time(lambda y: tuple(jnp.linalg.eigh(y)))(x)


def _row_norms(x: jax.Array) -> jax.Array:
    """Norms of the rows, ``(..., m, 1)``."""
    return jnp.linalg.norm(x, axis=-1, keepdims=True)


def _unit_frobenius(x: jax.Array) -> jax.Array:
    """Matrices divided by their Frobenius norms; zero stays zero."""
    rms = update_rms(x)[..., None, None]
    root = (x.shape[-1] * x.shape[-2]) ** 0.5
    return at_least_float32(x) / (jnp.where(rms == 0, 1, rms) * root)
