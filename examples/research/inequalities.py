# SPDX-License-Identifier: Apache-2.0
"""Every inequality of the paper's convergence analysis, as a function of one step.

``Step`` holds what an optimizer was given and gave back, in the row orientation, and
derives from it in NumPy what the analysis speaks of; the preconditioner is that which
must have been used, ``P = T Psi^+``. An inequality is a function that returns what
should be the larger side and what should be the smaller one; ``slack`` compares them.
With ``m > n`` the row-oriented ``Gamma`` has no inverse and the preconditioner does
not follow from the update: ``m <= n`` throughout.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Array = np.ndarray


class Sides(NamedTuple):
    """What should be the larger side, and the smaller one.

    They are numbers, or arrays for several inequalities at once.
    """

    larger: npt.ArrayLike
    smaller: npt.ArrayLike


@dataclasses.dataclass(frozen=True)
class Step:
    """One step ``W - learning_rate T``.

    It is that of a variant without momentum, RMS scaling and weight decay.

    Attributes:
        gradient: ``(m, n)``.
        weight: ``(m, n)``.
        update: ``T``, ``(m, n)``.
        rank: spectral budget of NormPre-L; None for NormPre-G.
        learning_rate: of the step.
        loss: before it.
        next_loss: after it.
        smoothness: ``L``.
    """

    gradient: Array
    weight: Array
    update: Array
    rank: int | None
    learning_rate: float = 0.0
    loss: float = 0.0
    next_loss: float = 0.0
    smoothness: float = 0.0

    @functools.cached_property
    def x(self) -> Array:
        """Relaxed tangent gradient."""
        along = np.sum(self.gradient * self.weight, axis=1, keepdims=True)
        return self.gradient - along * self.weight

    @functools.cached_property
    def psi(self) -> Array:
        """Its rows at length one."""
        return self.x / lengths(self.x)[:, None]

    @functools.cached_property
    def eigen(self) -> tuple[Array, Array]:
        """Eigenvalues of ``Gamma``, largest first, and its eigenvectors in columns."""
        values, vectors = np.linalg.eigh(self.psi @ self.psi.T)
        return values[::-1], vectors[:, ::-1]

    @property
    def values(self) -> Array:
        """Eigenvalues of ``Gamma``, largest first."""
        return self.eigen[0]

    @functools.cached_property
    def preconditioner(self) -> Array:
        """``P`` with ``T = P Psi``."""
        return np.linalg.solve(self.psi @ self.psi.T, self.psi @ self.update.T).T

    @functools.cached_property
    def factors(self) -> Array:
        """Eigenvalues of ``P``, smallest first."""
        return np.linalg.eigvalsh((self.preconditioner + self.preconditioner.T) / 2)

    @functools.cached_property
    def exact_preconditioner(self) -> Array:
        """``P`` as the paper defines it, from the eigendecomposition of ``Gamma``."""
        values, vectors = self.eigen
        factors = values**-0.5
        if self.rank is not None:
            left_alone = (values <= 1) | (np.arange(len(values)) >= self.rank)
            factors = np.where(left_alone, 1, factors)
        return (vectors * factors) @ vectors.T

    def with_exact_update(self) -> "Step":
        """The same step with the update as the paper defines it."""
        return dataclasses.replace(self, update=self.exact_preconditioner @ self.psi)

    @functools.cached_property
    def sines(self) -> Array:
        """``sin(phi_i)``, of the angles between the rows of gradient and weight."""
        direction = unit(self.weight)
        along = np.sum(self.gradient * direction, axis=1, keepdims=True)
        tangent = self.gradient - along * direction
        return lengths(tangent) / lengths(self.gradient)

    @property
    def gamma(self) -> float:
        """``gamma``: the least sine."""
        return float(self.sines.min())

    @functools.cached_property
    def gamma_prime(self) -> float:
        """``gamma'``: the largest norm of a column of cosines.

        These are between the rows of ``Psi`` and a row of the weight.
        """
        cosines = self.psi @ unit(self.weight).T
        return float(np.linalg.norm(cosines, axis=0).max())

    @functools.cached_property
    def nu(self) -> float:
        """``nu``: the largest radial ratio."""
        radial = self.gradient - self.x
        return float((lengths(radial) / lengths(self.x)).max())

    @property
    def chi(self) -> float:
        """``chi``: the spectral factor."""
        least = 1
        if self.rank is None:
            least = self.values[-1]
        return float(np.sqrt(self.values[0] / least))

    @property
    def epsilon(self) -> float:
        """``1 - nu gamma' chi`` of this step; the theorem needs it positive."""
        return 1 - self.nu * self.gamma_prime * self.chi

    @functools.cached_property
    def delta(self) -> float:
        """``||P_hat - P||_op``: of the preconditioner that was used and the paper's."""
        return float(np.linalg.norm(self.preconditioner - self.exact_preconditioner, 2))

    @property
    def side(self) -> int:
        """``max(m, n)``."""
        return max(self.update.shape)


def lengths(x: Array) -> Array:
    """Norms of the rows."""
    return np.linalg.norm(x, axis=1)


def unit(x: Array) -> Array:
    """Rows at length one."""
    return x / lengths(x)[:, None]


def inner(a: Array, b: Array) -> float:
    """``<A, B>_F``."""
    return float(np.sum(a * b))


def lemma_1_rows(step: Step) -> Sides:
    """``||x_i|| >= ||g_i|| sin(phi_i)``."""
    return Sides(lengths(step.x), lengths(step.gradient) * step.sines)


def lemma_1(step: Step) -> Sides:
    """``<X, Psi> >= gamma ||G||_F``."""
    return Sides(inner(step.x, step.psi), step.gamma * np.linalg.norm(step.gradient))


def lemma_2_basis(step: Step) -> Sides:
    """``P`` is symmetric and shares the eigenvectors of ``Gamma``.

    In their basis there is nothing beside the diagonal.
    """
    _, vectors = step.eigen
    turned = vectors.T @ step.preconditioner @ vectors
    return Sides(np.linalg.norm(np.diag(turned)), np.linalg.norm(turned))


def lemma_2_a(step: Step) -> Sides:
    """``<X, T> >= lambda_min(P) <X, Psi>``."""
    return Sides(inner(step.x, step.update), step.factors[0] * inner(step.x, step.psi))


def lemma_2_b(step: Step) -> Sides:
    """``max(m, n)^(1/2) >= m^(1/2) >= ||T||_F``."""
    root = len(step.update) ** 0.5
    return Sides(
        np.array([step.side**0.5, root]), np.array([root, np.linalg.norm(step.update)])
    )


def lemma_2_b_spectrum(step: Step) -> Sides:
    """``||T||_F^2`` is m for NormPre-G, and ``sum_C 1 + sum_rest lambda_i`` for -L.

    It is neither more nor less.
    """
    expected = len(step.update)
    if step.rank is not None:
        clipped = step.values[: step.rank]
        expected = expected - np.sum(np.maximum(clipped, 1) - 1)
    found = np.linalg.norm(step.update) ** 2
    return Sides(np.array([found, expected]), np.array([expected, found]))


def lemma_2_c(step: Step) -> Sides:
    """``lambda_min(P) >= lambda_1^(-1/2) >= max(m, n)^(-1/2)``."""
    bound = step.values[0] ** -0.5
    return Sides(np.array([step.factors[0], bound]), np.array([bound, step.side**-0.5]))


def lemma_2_c_equality(step: Step) -> Sides | None:
    """For NormPre-G ``lambda_min(P)`` is no more than ``lambda_1^(-1/2)`` either."""
    if step.rank is not None:
        return None
    return Sides(step.values[0] ** -0.5, step.factors[0])


def lemma_3_factors(step: Step) -> Sides:
    """``chi >= ||P||_op / lambda_min(P)``."""
    return Sides(step.chi * step.factors[0], np.linalg.norm(step.preconditioner, 2))


def lemma_3_operator(step: Step) -> Sides:
    """``nu gamma' ||P||_op sum_i ||x_i|| >= |<G - X, T>|``."""
    slope = step.nu * step.gamma_prime * np.linalg.norm(step.preconditioner, 2)
    return Sides(
        slope * lengths(step.x).sum(), abs(inner(step.gradient - step.x, step.update))
    )


def lemma_3(step: Step) -> Sides:
    """``nu gamma' chi <X, T> >= |<G - X, T>|``."""
    slope = step.nu * step.gamma_prime * step.chi
    return Sides(
        slope * inner(step.x, step.update),
        abs(inner(step.gradient - step.x, step.update)),
    )


def smoothness(step: Step) -> Sides:
    """``loss - lr <G, T> + L lr^2 ||T||^2 / 2 >= next loss``."""
    length = step.learning_rate * np.linalg.norm(step.update)
    change = -step.learning_rate * inner(step.gradient, step.update)
    change += step.smoothness / 2 * length**2
    return Sides(step.loss + change, step.next_loss)


def signal(step: Step) -> Sides | None:
    """``<G, T> >= epsilon <X, T> >= epsilon gamma max(m, n)^(-1/2) ||G||``.

    Where the condition holds.
    """
    if step.epsilon <= 0:
        return None
    least = step.epsilon * inner(step.x, step.update)
    last = step.epsilon * step.gamma * step.side**-0.5 * np.linalg.norm(step.gradient)
    return Sides(
        np.array([inner(step.gradient, step.update), least]), np.array([least, last])
    )


def one_step(step: Step) -> Sides | None:
    """``loss - lr epsilon gamma max^(-1/2) ||G|| + L lr^2 max / 2 >= next loss``.

    Where the condition holds.
    """
    if step.epsilon <= 0:
        return None
    change = (
        -step.learning_rate
        * step.epsilon
        * step.gamma
        * step.side**-0.5
        * np.linalg.norm(step.gradient)
    )
    return Sides(
        step.loss + change + step.smoothness / 2 * step.learning_rate**2 * step.side,
        step.next_loss,
    )


def corollary_perturbation(step: Step) -> Sides:
    """``delta lambda_1^(1/2) >= ||T_hat - T||_op``."""
    return Sides(
        step.delta * step.values[0] ** 0.5,
        np.linalg.norm(step.update - step.with_exact_update().update, 2),
    )


def corollary_nuclear(step: Step) -> Sides:
    """``<X, Psi> / gamma >= ||G||_*``."""
    return Sides(
        inner(step.x, step.psi) / step.gamma, np.linalg.norm(step.gradient, "nuc")
    )


def corollary_duality(step: Step) -> Sides:
    """``<G, T_hat> >= <G, T> - ||G||_* ||T_hat - T||_op``."""
    exact = step.with_exact_update().update
    lost = np.linalg.norm(step.gradient, "nuc") * np.linalg.norm(step.update - exact, 2)
    return Sides(inner(step.gradient, step.update), inner(step.gradient, exact) - lost)


def corollary_norm(step: Step) -> Sides:
    """``max(m, n)^(1/2) >= ||Psi||_F >= ||T_hat||_F``."""
    size = np.linalg.norm(step.psi)
    return Sides(
        np.array([step.side**0.5, size]), np.array([size, np.linalg.norm(step.update)])
    )


def corollary_signal(step: Step) -> Sides | None:
    """``<G, T_hat> >= (epsilon gamma - delta lambda_1) max(m, n)^(-1/2) ||G||``.

    Where the condition holds.
    """
    rate = step.epsilon * step.gamma - step.delta * step.values[0]
    if step.epsilon <= 0 or rate <= 0:
        return None
    return Sides(
        inner(step.gradient, step.update),
        rate * step.side**-0.5 * np.linalg.norm(step.gradient),
    )


Inequality = Callable[[Step], Sides | None]  # None where it does not apply.

LEMMAS: tuple[Inequality, ...] = (
    lemma_1_rows,
    lemma_1,
    lemma_2_basis,
    lemma_2_a,
    lemma_2_b,
    lemma_2_b_spectrum,
    lemma_2_c,
    lemma_2_c_equality,
    lemma_3_factors,
    lemma_3_operator,
    lemma_3,
)
THEOREM: tuple[Inequality, ...] = (smoothness, signal, one_step)
COROLLARY: tuple[Inequality, ...] = (
    smoothness,
    corollary_perturbation,
    corollary_nuclear,
    corollary_duality,
    corollary_norm,
    corollary_signal,
)


def tolerance(step: Step) -> float:
    """Rounding that is forgiven, as a share of the larger side.

    It is that of sums, and of the inversion of ``Gamma`` for ``P``.
    """
    return float(1e-12 + 64 * np.finfo(float).eps * step.values[0] / step.values[-1])


def slack(sides: Sides) -> float:
    """By how much the larger side is the larger one, as a share of the two.

    Negative where it is not.
    """
    larger, smaller = np.broadcast_arrays(*map(np.asarray, sides))
    size = np.maximum(np.abs(larger), np.abs(smaller))
    size = np.maximum(size, np.finfo(float).tiny)
    return float(((larger - smaller) / size).min())


def slacks(step: Step, inequalities: tuple[Inequality, ...]) -> dict[str, float]:
    """The slack of every inequality that applies, by its name.

    Args:
        step: the matrices.
        inequalities: such as ``LEMMAS``.

    Returns:
        Slacks; a violated inequality is below ``-tolerance(step)``.
    """
    found = {}
    for inequality in inequalities:
        sides = inequality(step)
        if sides is not None:
            found[inequality.__name__] = slack(sides)
    return found
