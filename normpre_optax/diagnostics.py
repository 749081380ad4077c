# SPDX-License-Identifier: Apache-2.0
r"""What an optimizer does to a matrix, in numbers: spectra, mode energies, alignment, the constants of the theorem.

Pure functions that can be compiled, on matrices ``(..., m, n)`` with output neurons as rows. ``normalized`` makes ``X``
and ``Psi`` of a momentum and a weight; most of the rest starts from these. ``measure`` takes a parameter in its own
layout and gives many diagnostics by name; ``monitor`` records them while a model trains.

Everything is computed in at least float32. Singular values below ``max(m, n) eps`` times the largest count as zero.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from normpre_optax.linalg.eigenspace import Modes, leading_modes_exact, leading_modes_sketch
from normpre_optax.linalg.lapack import singular_values
from normpre_optax.linalg.newton_schulz import unit_frobenius
from normpre_optax.linalg.precision import exact_product, working_dtype
from normpre_optax.linalg.rows import TANGENT_MODES, row_norms, tangent_rows, unit_rows
from normpre_optax.parameters.dims import MatrixDims, to_matrices

ORIENTATIONS = ("rows", "columns")
"""What may be normalised."""


class Signal(NamedTuple):
    """``X``, the momentum after the relaxed tangent, and ``Psi``, its rows at length one; ``(..., m, n)`` both."""

    x: jax.Array
    psi: jax.Array


class Spectra(NamedTuple):
    """Eigenvalues of the Gram matrices, largest first, ``(..., min(m, n))``; both sum to the number of rows."""

    before: jax.Array
    after: jax.Array


class ModeEnergies(NamedTuple):
    """How much of the squared change of singular values by ``msign`` falls to which modes; ``(...,)`` each.

    Attributes:
        top: the at most ``rank`` largest eigenvalues above one: what NormPre-L changes.
        remain: the other eigenvalues above one.
        sub: eigenvalues between zero and one.
    """

    top: jax.Array
    remain: jax.Array
    sub: jax.Array

    def shares(self) -> "ModeEnergies":
        """Each as a fraction of ``E_global = E_top + E_remain + E_sub``; all zero where nothing is to change."""
        total = self.top + self.remain + self.sub
        return ModeEnergies(*(part / jnp.where(total == 0, 1, total) for part in self))


class RowNorms(NamedTuple):
    """Statistics of the lengths of a matrix's rows, ``(...,)`` each."""

    mean: jax.Array
    deviation: jax.Array
    smallest: jax.Array
    largest: jax.Array


class RadialFactor(NamedTuple):
    """Statistics of ``1 - ||w||^2`` over a matrix's rows, ``(...,)`` each; ``reversed`` counts rows below zero."""

    mean: jax.Array
    smallest: jax.Array
    reversed: jax.Array


class SketchError(NamedTuple):
    """How far a sketched eigenspace is from the exact one.

    Attributes:
        angles: principal angles between both, in radians, smallest first, ``(..., k)``.
        preconditioner: ``||P_hat - P||_op``: the least ``delta`` of Corollary 1 for this matrix, ``(...,)``.
    """

    angles: jax.Array
    preconditioner: jax.Array


class Constants(NamedTuple):
    """What Theorem 1 knows of one matrix at one step, ``(...,)`` each.

    Attributes:
        gamma: least ``sin(phi_i)``, ``phi_i`` being the angle between the rows of gradient and weight.
        gamma_prime: largest ``(sum_j cos^2(phi'_ji))^(1/2)``, ``phi'_ji`` being the angle between row j of ``Psi`` and
            row i of the weight.
        nu: largest ``||g_i - x_i|| / ||x_i||``.
        chi_global: ``sigma_1 / sigma_m`` of ``Psi``: ``chi`` of NormPre-G; infinite for m > n.
        chi_local: ``sigma_1``: ``chi`` of NormPre-L.
    """

    gamma: jax.Array
    gamma_prime: jax.Array
    nu: jax.Array
    chi_global: jax.Array
    chi_local: jax.Array

    def epsilon(self) -> tuple[jax.Array, jax.Array]:
        """``1 - nu gamma' chi`` of NormPre-G and of NormPre-L: the theorem's condition is that it is positive."""
        slope = self.nu * self.gamma_prime
        return tuple(1 - jnp.where(slope == 0, 0, slope * chi) for chi in (self.chi_global, self.chi_local))  # pyright: ignore[reportReturnType]


def normalized(
    momentum: jax.Array,
    weight: jax.Array,
    tangent: str = "relaxed",
    tangent_radius: jax.typing.ArrayLike = 1.0,
) -> Signal:
    """``x_i = m_i - <m_i, w_i> w_i`` and ``Psi = D(X)^-1 X``: what the spectral stage starts from.

    Args:
        momentum: ``(..., m, n)``; a gradient will do.
        weight: ``(..., m, n)``.
        tangent: ``"relaxed"`` (the paper), ``"bounded"``, ``"strict"`` or ``"none"``; see ``project_to_tangent``.
        tangent_radius: see ``project_to_tangent``.

    Returns:
        ``X`` and ``Psi``.

    Raises:
        ValueError: if ``tangent`` is unknown.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> x, psi = diagnostics.normalized(jnp.array([[3.0, 4.0]]), jnp.array([[0.0, 1.0]]))
        >>> print(x, psi)
        [[3. 0.]] [[1. 0.]]

    References:
        Normalize-Then-Precondition, Algorithm 1.
    """
    if tangent not in TANGENT_MODES:
        raise ValueError(f"{tangent=} is not one of {TANGENT_MODES}")
    momentum, weight = _lifted(momentum), _lifted(weight)
    x = tangent_rows(momentum, weight, tangent, tangent_radius)
    return Signal(x, unit_rows(x))


def trace_matched_spectra(x: jax.Array) -> Spectra:
    """Eigenvalues of ``(m / tr(X X^T)) X X^T`` and of ``Gamma = Psi Psi^T``: before and after normalisation.

    Args:
        x: ``X``, ``(..., m, n)``.

    Returns:
        The ``min(m, n)`` leading eigenvalues of each; there are no other nonzero ones.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> before, after = diagnostics.trace_matched_spectra(jnp.diag(jnp.array([1.0, 3.0])))
        >>> print(f"{before[0]:.3f} {after[0]:.3f}")
        1.800 1.000

    References:
        Normalize-Then-Precondition, "Eigenspectra Before and After Normalization".
    """
    x = _lifted(x)
    return Spectra(_trace_matched(x), singular_values(unit_rows(x)) ** 2)


def mode_energies(psi: jax.Array, rank: int = 32) -> ModeEnergies:
    """``E_top``, ``E_remain`` and ``E_sub``: sums of ``e_i = (sqrt(lambda_i) - 1)^2`` over modes of ``Psi Psi^T``.

    Args:
        psi: ``(..., m, n)``.
        rank: spectral budget r.

    Returns:
        The energies; ``.shares()`` gives them as fractions of their sum.

    Raises:
        ValueError: if ``rank`` is below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> energies = diagnostics.mode_energies(jnp.diag(jnp.array([4.0, 3.0, 0.5])), rank=1)
        >>> print([float(e) for e in energies], f"{energies.shares().top:.2f}")
        [9.0, 4.0, 0.25] 0.68

    References:
        Normalize-Then-Precondition, "Global and Localized Spectral Preconditioning".
    """
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")
    psi = _lifted(psi)
    return _energies(_cleaned(singular_values(psi), psi.shape), rank)


def active_modes(psi: jax.Array) -> jax.Array:
    """``|A|``, the number of eigenvalues of ``Psi Psi^T`` above one: what NormPre-L with any budget could clip.

    Args:
        psi: ``(..., m, n)``.

    Returns:
        int32 ``(...,)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(diagnostics.active_modes(jnp.diag(jnp.array([4.0, 3.0, 0.5]))))
        2
    """
    return _count(singular_values(_lifted(psi)) > 1)


def stable_rank(x: jax.Array) -> jax.Array:
    """``||X||_F^2 / ||X||_op^2``, a number between 1 and ``min(m, n)``; 0 for a zero matrix.

    Args:
        x: ``(..., m, n)``.

    Returns:
        ``(...,)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(diagnostics.stable_rank(jnp.diag(jnp.array([2.0, 1.0]))))
        1.25
    """
    return _stable_rank(singular_values(unit_frobenius(_lifted(x))))


def condition_number(x: jax.Array) -> jax.Array:
    """``sigma_1 / sigma_min(m, n)``; infinite for a matrix without full rank.

    Args:
        x: ``(..., m, n)``.

    Returns:
        ``(...,)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(diagnostics.condition_number(jnp.diag(jnp.array([2.0, 1.0]))))
        2.0
    """
    x = unit_frobenius(_lifted(x))
    return _condition_number(_cleaned(singular_values(x), x.shape))


def descent_alignment(gradient: jax.Array, direction: jax.Array) -> jax.Array:
    """``<G, Phi>_F / (||G||_F ||Phi||_F)`` of each matrix; the paper's ``Align`` is its mean over a model's matrices.

    Args:
        gradient: ``G``, ``(..., m, n)``.
        direction: ``Phi``, ``(..., m, n)``: what is subtracted from the weight. An optimizer's finished update is added
            to it, and so counts with the other sign.

    Returns:
        ``(...,)``; 0 where one of both is zero.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> g = jnp.array([[3e-20, 4e-20]])
        >>> print(f"{diagnostics.descent_alignment(g, jnp.array([[1.0, 0.0]])):.4f}")
        0.6000

    References:
        Normalize-Then-Precondition, "Training Dynamics".
    """
    return jnp.sum(unit_frobenius(_lifted(gradient)) * unit_frobenius(_lifted(direction)), axis=(-2, -1))


def update_rms(update: jax.Array) -> jax.Array:
    """``RMS(T) = ||T||_F / sqrt(m n)``.

    Args:
        update: ``(..., m, n)``.

    Returns:
        ``(...,)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(f"{diagnostics.update_rms(jnp.array([[3.0, -3.0], [3.0, 3.0]])):.4f}")
        3.0000
    """
    update = _lifted(update)
    lengths = row_norms(update).mT  # (..., 1, m): the length of that row of lengths is the Frobenius norm
    return row_norms(lengths)[..., 0, 0] / jnp.sqrt(
        jnp.asarray(max(1, update.shape[-1] * update.shape[-2]), update.dtype)
    )


def row_norm_statistics(x: jax.Array) -> RowNorms:
    """Mean, standard deviation and range of ``||x_i||``.

    Args:
        x: ``(..., m, n)``.

    Returns:
        Statistics over the rows of every matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(*diagnostics.row_norm_statistics(jnp.array([[3.0, 4.0], [0.0, 1.0]])))
        3.0 2.0 1.0 5.0
    """
    norms = row_norms(_lifted(x))[..., 0]
    return RowNorms(norms.mean(-1), norms.std(-1), norms.min(-1), norms.max(-1))


def radial_factor(weight: jax.Array, tangent_radius: jax.typing.ArrayLike = 1.0) -> RadialFactor:
    """``1 - ||w_i||^2 / c^2``, by which the relaxed tangent multiplies the radial part of row i of the momentum.

    Below zero the radial part of the step points the wrong way: such a row is longer than ``c``.

    Args:
        weight: ``(..., m, n)``.
        tangent_radius: c; 1 in the paper.

    Returns:
        Statistics over the rows of every matrix.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> print(*diagnostics.radial_factor(jnp.array([[2.0, 0.0], [0.0, 1.0]])))
        -1.5 -3.0 1

    References:
        Normalize-Then-Precondition, "Relaxed Tangent Momentum".
    """
    factor = 1 - (row_norms(_lifted(weight))[..., 0] / tangent_radius) ** 2
    return RadialFactor(factor.mean(-1), factor.min(-1), _count(factor < 0))


@functools.partial(jax.jit, static_argnames=("rank", "power_iterations"))
def sketch_error(psi: jax.Array, omega: jax.Array, rank: int = 32, power_iterations: int = 1) -> SketchError:
    """The randomized sketch of Algorithm 2 against the exact eigenspace of ``Psi Psi^T``, on the shorter side.

    ``P = I + sum_i (lambda_i^-1/2 - 1) u_i u_i^T`` over the leading modes with ``lambda_i > 1``, and ``P_hat`` is the
    same of the sketched modes.

    Args:
        psi: ``(..., m, n)``.
        omega: Gaussian draws ``(..., l, max(m, n))``: Algorithm 2's Omega, transposed; l is rank + oversampling.
        rank: spectral budget r.
        power_iterations: p.

    Returns:
        Principal angles of the ``rank`` leading modes, and the distance of the preconditioners.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> psi = jnp.diag(jnp.array([5.0, 3.0, 1.0, 0.1]))
        >>> omega = jax.random.normal(jax.random.key(0), (3, 4))
        >>> error = diagnostics.sketch_error(psi, omega, rank=2, power_iterations=8)
        >>> print(bool(error.angles.max() < 1e-3), bool(error.preconditioner < 1e-3))
        True True

    References:
        Normalize-Then-Precondition, Algorithm 2 and Corollary 1.
    """
    psi, omega = _lifted(psi), _lifted(omega)
    wide = psi.mT if psi.shape[-2] > psi.shape[-1] else psi
    draws = omega[..., : wide.shape[-2], :]
    found = leading_modes_sketch(wide, draws, rank, power_iterations, wide.dtype)
    exact = leading_modes_exact(wide, found.values.shape[-1])
    distance = singular_values(preconditioner(found) - preconditioner(exact))[..., 0]
    return SketchError(principal_angles(found.vectors, exact.vectors), distance)


def preconditioner(modes: Modes) -> jax.Array:
    """``P = I + U (Lambda^-1/2 - I) U^T`` of NormPre-L over the modes with ``lambda > 1``.

    Args:
        modes: leading modes of wide matrices ``(..., s, n)``, as ``linalg.eigenspace`` finds them.

    Returns:
        ``(..., s, s)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> from normpre_optax.linalg.eigenspace import leading_modes_exact
        >>> print(diagnostics.preconditioner(leading_modes_exact(jnp.diag(jnp.array([2.0, 0.5])), rank=2)).round(4))
        [[0.5 0. ]
         [0.  1. ]]
    """
    change = 1 / jnp.sqrt(jnp.maximum(modes.values, 1)) - 1
    identity = jnp.eye(modes.vectors.shape[-1], dtype=modes.vectors.dtype)
    return identity + exact_product((modes.vectors * change[..., None]).mT, modes.vectors)


def principal_angles(a: jax.Array, b: jax.Array) -> jax.Array:
    """Angles between two subspaces, in radians, smallest first.

    Small angles are taken from their sines and large ones from their cosines, so that neither are lost to rounding.

    Args:
        a: orthonormal rows ``(..., k, n)``.
        b: orthonormal rows ``(..., k, n)``.

    Returns:
        ``(..., k)``.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> a, b = jnp.array([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]), jnp.array([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]])
        >>> print(diagnostics.principal_angles(a, b).round(4))
        [0.     0.9273]
    """
    a, b = _lifted(a), _lifted(b)
    overlap = exact_product(a, b.mT)
    cosines = jnp.minimum(singular_values(overlap), 1)
    sines = jnp.minimum(singular_values(a - exact_product(overlap, b))[..., ::-1], 1)
    return jnp.where(sines**2 < 0.5, jnp.arcsin(sines), jnp.arccos(cosines))


def convergence_constants(gradient: jax.Array, weight: jax.Array) -> Constants:
    """``gamma``, ``gamma'``, ``nu`` and ``chi`` of Theorem 1 at one step, for the row orientation.

    A row whose angle is not defined, because it or the other one is zero, does not count.

    Args:
        gradient: ``G``, ``(..., m, n)``.
        weight: ``W``, ``(..., m, n)``.

    Returns:
        The constants of every matrix; a run's are the least ``gamma`` and the largest of the others.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import diagnostics
        >>> found = diagnostics.convergence_constants(jnp.array([[1.0, 1.0]]), jnp.array([[0.5, 0.0]]))
        >>> print(*(f"{c:.3f}" for c in found))
        0.707 0.600 0.200 1.000 1.000

    References:
        Normalize-Then-Precondition, Theorem 1 and Lemma 3.
    """
    gradient, weight = _lifted(gradient), _lifted(weight)
    psi = normalized(gradient, weight).psi
    along, unit = unit_rows(weight), unit_rows(gradient)
    defined = (row_norms(gradient) != 0) & (row_norms(weight) != 0)
    sines = row_norms(tangent_rows(unit, weight, "strict"))
    cosines = jnp.abs(jnp.sum(unit * along, axis=-1, keepdims=True))
    ratio = cosines * row_norms(weight) ** 2 / row_norms(tangent_rows(unit, weight))  # ||g - x|| = |<g, w>| ||w||
    values = _cleaned(singular_values(psi), psi.shape)
    full = values.shape[-1] == psi.shape[-2]
    return Constants(
        gamma=jnp.min(jnp.where(defined, sines, 1), axis=(-2, -1)),
        gamma_prime=jnp.max(row_norms(exact_product(along, psi.mT)), axis=(-2, -1)),
        nu=jnp.max(jnp.where(defined, ratio, 0), axis=(-2, -1)),
        chi_global=_condition_number(values) if full else jnp.full(values.shape[:-1], jnp.inf, values.dtype),
        chi_local=values[..., 0],
    )


@dataclasses.dataclass(frozen=True)
class _Case:
    """Stacks of matrices in the orientation asked for, and what several diagnostics need of them, found once."""

    momentum: jax.Array
    weight: jax.Array
    gradient: Any  # None only where nothing that is asked for needs it
    update: Any
    rank: int
    tangent: str
    tangent_radius: jax.typing.ArrayLike

    @functools.cached_property
    def signal(self) -> Signal:
        return normalized(self.momentum, self.weight, self.tangent, self.tangent_radius)

    @functools.cached_property
    def values(self) -> jax.Array:
        """Singular values of Psi."""
        return _cleaned(singular_values(self.signal.psi), self.signal.psi.shape)


_MEASURES: Mapping[str, Callable[[_Case], Any]] = {
    "spectra": lambda case: Spectra(_trace_matched(case.signal.x), case.values**2),
    "mode_energies": lambda case: _energies(case.values, case.rank),
    "active_modes": lambda case: _count(case.values > 1),
    "stable_rank": lambda case: _stable_rank(case.values),
    "condition_number": lambda case: _condition_number(case.values),
    "row_norms": lambda case: row_norm_statistics(case.weight),
    "radial_factor": lambda case: radial_factor(case.weight, case.tangent_radius),
    "alignment": lambda case: descent_alignment(case.gradient, -case.update),
    "update_rms": lambda case: update_rms(case.update),
}
_NEEDS = {"alignment": ("gradient", "update"), "update_rms": ("update",)}

NAMES = tuple(_MEASURES)
"""The diagnostics that ``measure`` and ``monitor`` know."""


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
    tangent_radius: jax.typing.ArrayLike = 1.0,
) -> dict[str, Any]:
    """Diagnostics of one parameter in its own layout, by name.

    ``spectra`` are those of ``X``; ``mode_energies``, ``active_modes``, ``stable_rank`` and ``condition_number`` those
    of ``Psi``; ``row_norms`` and ``radial_factor`` those of the weight; ``alignment`` and ``update_rms`` those of the
    update.

    Args:
        momentum: of the parameter, in its layout; a gradient will do.
        weight: the parameter.
        dims: its axes; None for matrices ``(..., out, in)``.
        names: which diagnostics, of ``NAMES``; None for all that the arguments allow.
        gradient: for ``alignment``.
        update: for ``alignment`` and ``update_rms``; a finished update, which is added to the weight.
        rank: spectral budget r of ``mode_energies``.
        orientation: ``"rows"`` or ``"columns"``: which of them are normalised.
        tangent: see ``normalized``.
        tangent_radius: see ``normalized``.

    Returns:
        A dict from name to arrays, or named tuples of arrays, with a leading axis for the parameter's matrices.

    Raises:
        ValueError: if a name or the orientation is unknown, or a name needs an argument that is missing.

    Example:
        >>> import jax.numpy as jnp
        >>> from normpre_optax import MatrixDims, diagnostics
        >>> kernel = jnp.array([[0.0, 0.6], [0.0, 0.8]])  # (in, out)
        >>> found = diagnostics.measure(jnp.eye(2), kernel, MatrixDims(0, 1), names=["row_norms", "active_modes"])
        >>> print(found["row_norms"].largest, found["active_modes"])
        [1.] [1]
    """
    given = {"gradient": gradient, "update": update}
    missing = {name: [need for need in _NEEDS.get(name, ()) if given[need] is None] for name in NAMES}
    names = check_names([name for name in NAMES if not missing[name]] if names is None else names)
    for name in names:
        if missing[name]:
            raise ValueError(f"the diagnostic {name!r} needs the argument {missing[name][0]}")
    if orientation not in ORIENTATIONS:
        raise ValueError(f"{orientation=} is not one of {ORIENTATIONS}")
    if rank < 1:
        raise ValueError(f"rank must be at least 1, got {rank}")

    def laid(x: jax.Array | None) -> Any:
        if x is None:
            return None
        stack = _lifted(x if dims is None else to_matrices(x, dims))
        return stack.mT if orientation == "columns" else stack

    case = _Case(laid(momentum), laid(weight), laid(gradient), laid(update), rank, tangent, tangent_radius)
    return {name: _MEASURES[name](case) for name in names}


def check_names(names: Iterable[str]) -> tuple[str, ...]:
    """``names`` as a tuple, if all of them are diagnostics.

    Args:
        names: names of diagnostics.

    Returns:
        The same.

    Raises:
        ValueError: if one is not in ``NAMES``, or there is none.

    Example:
        >>> from normpre_optax import diagnostics
        >>> diagnostics.check_names(["stable_rank"])
        ('stable_rank',)
    """
    found = (names,) if isinstance(names, str) else tuple(names)
    unknown = [name for name in found if name not in NAMES]
    if unknown or not found:
        raise ValueError(f"unknown diagnostics {unknown}; choose from {', '.join(NAMES)}")
    return found


def _lifted(x: jax.Array) -> jax.Array:
    x = jnp.asarray(x)
    return x.astype(working_dtype(x.dtype))


def _trace_matched(x: jax.Array) -> jax.Array:
    return singular_values(unit_frobenius(x)) ** 2 * x.shape[-2]


def _cleaned(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Singular values of matrices of this shape, with zeros in place of rounding noise."""
    noise = max(shape[-2:]) * jnp.finfo(values.dtype).eps * values[..., :1]
    return jnp.where(values <= noise, 0, values)


def _count(chosen: jax.Array) -> jax.Array:
    return jnp.sum(chosen, axis=-1, dtype=jnp.int32)


def _energies(values: jax.Array, rank: int) -> ModeEnergies:
    energy = jnp.where(values == 0, 0, (values - 1) ** 2)
    above = values > 1
    top = above & (jnp.arange(values.shape[-1]) < rank)

    parts = (top, above & ~top, values < 1)
    return ModeEnergies(*(jnp.sum(jnp.where(part, energy, 0), axis=-1) for part in parts))


def _stable_rank(values: jax.Array) -> jax.Array:
    largest = values[..., :1]
    return jnp.sum((values / jnp.where(largest == 0, 1, largest)) ** 2, axis=-1)


def _condition_number(values: jax.Array) -> jax.Array:
    smallest = values[..., -1]
    return jnp.where(smallest == 0, jnp.inf, values[..., 0] / jnp.where(smallest == 0, 1, smallest))
