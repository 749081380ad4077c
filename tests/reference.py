# SPDX-License-Identifier: Apache-2.0
"""The algorithms once more, in NumPy float64: the oracle of the tests.

They are transcribed from the paper line by line. This file shares no code with the
package and uses no shortcut: one matrix (out, in) = (m, n) at a time, dense
decompositions. Where the paper leaves something open (first orientation, zero rows, the
sketched dimension) it follows ``docs/design.md``.
"""

import dataclasses

import numpy as np

Array = np.ndarray


# Marginal scale: Section 2.2 and "Relaxed Tangent Momentum" of Section 3.1.


def row_norms(x: Array) -> Array:
    """||x_i||_2 as a column."""
    return np.sqrt(np.sum(np.square(x), axis=1, keepdims=True))


def unit_rows(x: Array) -> Array:
    """Psi = Diag(diag(X X^T))^(-1/2) X; zero rows stay zero.

    So the inverse of a zero row's norm is taken as zero.
    """
    norms = row_norms(x)
    return np.divide(x, norms, out=np.zeros_like(x), where=norms != 0)


def tangent_rows(m: Array, w: Array, mode: str = "relaxed", eps: float = 0.0) -> Array:
    """X from momentum m and weights w, with the machine epsilon of the tested program.

    Each row is split as m = tangent + radial with radial = <m, w> w / ||w||^2, and the
    mode is how much of the radial part stays: 1 - ||w||^2 (relaxed), nothing (strict),
    all (none).
    """
    if mode == "none":
        return m.copy()
    squares = np.square(row_norms(w))
    dots = np.sum(m * w, axis=1, keepdims=True)
    radial = np.divide(dots * w, squares, out=np.zeros_like(m), where=squares != 0)
    kept = {"relaxed": 1 - squares, "strict": np.zeros_like(squares)}[mode]
    x = (m - radial) + kept * radial
    return np.where(row_norms(x) <= 8 * eps * row_norms(m), 0.0, x)


# Spectral stage: Sections 2.3 and 3.2, Algorithm 2, Propositions 1 and 2.

MUON = (3.4445, -4.7750, 2.0315)
YOU = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
TABLES = {"muon": (MUON,) * 5, "you": YOU, "polar_express": POLAR_EXPRESS}


def newton_schulz(
    x: Array,
    table: tuple = TABLES["muon"],
    headroom: float = 1.0,
    scale: str = "frobenius",
) -> Array:
    """X / (headroom ||X||), then one odd polynomial per triple.

    X <- a X + (b A + c A A) X, with A = X X^T. The norm is Frobenius', or Schatten's of
    order 4. The 1e-7 that others add to the norm is left out: with it the result would
    depend on the scale of the gradient.
    """
    order = {"frobenius": 2, "schatten": 4}[scale]
    norm = np.linalg.norm(np.linalg.svd(x, compute_uv=False), order)
    if norm == 0:
        return np.zeros_like(x)
    if x.shape[0] > x.shape[1]:
        return newton_schulz(x.T, table, headroom, scale).T
    x = x / (headroom * norm)
    for a, b, c in table:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def newton_schulz_scalar(s: Array, table: tuple = TABLES["muon"]) -> Array:
    """What the iteration does to a singular value s, if the Frobenius norm is one."""
    for a, b, c in table:
        s = a * s + b * s**3 + c * s**5
    return s


def newton_schulz_lipschitz(s: Array, table: tuple = TABLES["muon"]) -> float:
    """By how much the iteration can amplify a perturbation, to first order.

    s are the singular values of a matrix. It is the largest of the divided differences
    of the odd polynomial f over plus and minus the singular values and zero (those of f
    at s and -s are f(s) / s): 485 where all are tiny, about 20 where the smallest is a
    twentieth.
    """
    points = np.concatenate([s, -s, [0.0], s * (1 + 1e-6)])
    image = newton_schulz_scalar(points, table)
    gaps = points[:, None] - points[None, :]
    apart = np.abs(gaps) > 1e-12
    return float(np.abs((image[:, None] - image[None, :])[apart] / gaps[apart]).max())


def msign(x: Array) -> Array:
    """U V^T over the nonzero singular values."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    keep = s > max(x.shape) * np.finfo(np.float64).eps * s.max(initial=0.0)
    return (u * keep) @ vt


def active_modes(gamma: Array, rank: int) -> tuple[Array, Array]:
    """(U_C, Lambda_C): the leading eigenpairs of gamma with eigenvalue above one.

    There are at most ``rank``.
    """
    values, vectors = np.linalg.eigh(gamma)
    order = np.argsort(values)[::-1][:rank]
    order = order[values[order] > 1]
    return vectors[:, order], values[order]


def local_preconditioner(u: Array, values: Array) -> Array:
    """P = I + U (Lambda^(-1/2) - I) U^T."""
    return np.eye(u.shape[0]) + u @ np.diag(values**-0.5 - 1) @ u.T


def precondition_exact(psi: Array, rank: int) -> Array:
    """T^L = P^L Psi with the eigenvectors of Psi Psi^T."""
    u, values = active_modes(psi @ psi.T, rank)
    return local_preconditioner(u, values) @ psi


def precondition_adaptively(psi: Array, rank: int, factor: float) -> Array:
    """The leading singular values, clipped to a factor times the RMS of the others.

    That RMS is at least a tenth of the RMS of all singular values.
    """
    u, s, vt = np.linalg.svd(psi, full_matrices=False)
    rank = min(rank, len(s) - 1)
    if rank > 0:
        rms_of_others = np.sqrt(np.mean(s[rank:] ** 2))
        rms_of_all = np.sqrt(np.mean(s**2))
        level = factor * max(rms_of_others, 0.1 * rms_of_all)
        s = np.where(np.arange(len(s)) < rank, np.minimum(s, level), s)
    return (u * s) @ vt


def sketched_modes(
    psi: Array, omega: Array, rank: int, power_iterations: int
) -> tuple[Array, Array]:
    """(U_C, Lambda_C) by Algorithm 2 for a matrix with no more rows than columns.

    Its draws omega are (columns, l).
    """
    y = psi @ omega
    for _ in range(power_iterations):
        y = psi @ (psi.T @ y)
    q, _ = np.linalg.qr(y)
    b = q.T @ psi
    z, values = active_modes(b @ b.T, rank)
    return q @ z, values


def precondition_sketch(
    psi: Array, omega: Array, rank: int, power_iterations: int
) -> Array:
    """T^L by Algorithm 2 on the smaller dimension (rows when square)."""
    if psi.shape[0] > psi.shape[1]:
        return precondition_sketch(psi.T, omega, rank, power_iterations).T
    u, values = sketched_modes(psi, omega, rank, power_iterations)
    return local_preconditioner(u, values) @ psi


def projection_on_unit_ball(psi: Array) -> Array:
    """Proposition 1: all singular values above one become one."""
    u, s, vt = np.linalg.svd(psi, full_matrices=False)
    return (u * np.minimum(s, 1)) @ vt


def root_mean_square(t: Array) -> float:
    """RMS(T) = ||T||_F / sqrt(m n)."""
    return float(np.sqrt(np.sum(np.square(t)) / t.size))


# Algorithm 1.


@dataclasses.dataclass(frozen=True)
class NormPre:
    """One step of Algorithm 1 as a pure function.

    Its arguments are the weights, the momentum and the step number. ``stage``:
    "newton_schulz" (G), "msign" (G, exact), "exact" (L) or "sketch" (L, needs omega).
    """

    stage: str
    orientation: str = "alternating"
    tangent: str = "relaxed"
    momentum: float = 0.95
    rms: float = 0.2
    rank: int = 32
    power_iterations: int = 1
    table: tuple = TABLES["muon"]
    headroom: float = 1.0
    scale: str = "frobenius"
    eps: float = 0.0

    def normalized(self, m: Array, w: Array, step: int) -> Array:
        """Psi_t, in the parameter's own layout.

        The step counts from 0, and step 0 is row-oriented.
        """

        def on_rows(m: Array, w: Array) -> Array:
            return unit_rows(tangent_rows(m, w, self.tangent, self.eps))

        if self.orientation == "both":
            return on_rows(on_rows(m, w).T, w.T).T
        is_odd_step = self.orientation == "alternating" and step % 2 == 1
        if self.orientation == "columns" or is_odd_step:
            return on_rows(m.T, w.T).T
        return on_rows(m, w)

    def preconditioned(self, psi: Array, omega: Array | None = None) -> Array:
        """T_t."""
        if self.stage == "newton_schulz":
            return newton_schulz(psi, self.table, self.headroom, self.scale)
        if self.stage == "msign":
            return msign(psi)
        if self.stage == "exact":
            return precondition_exact(psi, self.rank)
        return precondition_sketch(psi, omega, self.rank, self.power_iterations)

    def direction(
        self, m: Array, w: Array, step: int, omega: Array | None = None
    ) -> Array:
        """R(T_t): what the learning rate multiplies, before weight decay.

        Zero stays zero.
        """
        t = self.preconditioned(self.normalized(m, w, step), omega)
        return self.rms * t / (root_mean_square(t) or 1.0)


def decoupled_step(
    w: Array, direction: Array, learning_rate: float, weight_decay: float
) -> Array:
    """W_(t+1) = W_t - eta (R(T_t) + wd W_t)."""
    return w - learning_rate * (direction + weight_decay * w)
