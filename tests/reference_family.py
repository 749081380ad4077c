# SPDX-License-Identifier: Apache-2.0
"""The relatives in NumPy float64, each transcribed literally with its epsilons: the
oracle of ``test_relatives``.

Matrices are (out, in) = (m, n), one at a time; nothing is shared with the package. A
transcription is a function ``start(shape, **options) -> step`` with the optimizer's
name, and ``step(g, w) -> direction`` keeps its state.
"""

import functools

import numpy as np

from tests.reference import newton_schulz

MU = 0.95
VARIANTS = {}  # name and options: optimizer, options, transcription, tolerance


def follows(tolerance, *options):
    """Compare the optimizer of this name, for each of the options, with the
    transcription.

    The tolerance is relative to the path in float64: rounding (eps64 times 485 a step),
    or the 1e-8 that some rules add to squared norms of order one and the package does
    without, times the slope of Newton-Schulz, 20 to 100.
    """

    def add(start):
        for own in options or ({},):
            name = "-".join([start.__name__, *map(str, own.values())])
            VARIANTS[name] = (
                start.__name__,
                own,
                functools.partial(start, **own),
                tolerance,
            )
        return start

    return add


def momentum(shape, nesterov=True, average=False):
    """M = mu M + G, U = G + mu M; averages multiply G by 1 - mu in both."""
    m, share = np.zeros(shape), 1 - MU if average else 1.0

    def step(g):
        nonlocal m
        m = MU * m + share * g
        return share * g + MU * m if nesterov else m

    return step


def norms(x, axis):
    return np.linalg.norm(x, axis=axis, keepdims=True)


def keller_scale(shape):
    return max(1, shape[0] / shape[1]) ** 0.5


def moonlight_scale(shape):
    return 0.2 * max(shape) ** 0.5


@follows(
    1e-10, {}, {"convention": "keller"}, {"convention": "keller", "nesterov": False}
)
def muon(shape, convention="moonlight", nesterov=True):
    keller = convention == "keller"
    u_of = momentum(shape, nesterov, average=keller)
    scale = keller_scale(shape) if keller else moonlight_scale(shape)
    return lambda g, w: scale * newton_schulz(u_of(g))


@follows(1e-7, {}, {"version": 2, "nesterov": True})
def mano(shape, version=1, nesterov=False):
    """Version 1 has unit weights in the projection, version 2 the weights themselves."""
    u_of, t = momentum(shape, nesterov), 0

    def step(g, w):
        nonlocal t
        axis, t = (
            t % 2,
            t + 1,
        )  # sums run along this axis of (out, in): columns on even steps
        u = u_of(g)
        along = w / np.maximum(norms(w, axis), 1e-8) if version == 1 else w
        x = u - np.sum(u * along, axis=axis, keepdims=True) * along
        unit = (
            x / np.maximum(norms(x, axis), 1e-8)
            if version == 1
            else x / (norms(x, axis) + 1e-8)
        )
        return 0.2 * shape[axis] ** 0.5 * unit

    return step


@follows(1e-13)
def rmnp(shape):
    u_of = momentum(shape)

    def step(g, w):
        u = u_of(g)
        return keller_scale(shape) * u / norms(u, 1)

    return step


@follows(1e-6, {}, {"mode": "columns"}, {"mode": "both"})
def muoneq(shape, mode="rows"):
    u_of = momentum(shape)

    def step(g, w):
        u = u_of(g)
        rows = 1 / np.sqrt(np.sum(u**2, axis=1, keepdims=True) + 1e-8)
        columns = 1 / np.sqrt(np.sum(u**2, axis=0, keepdims=True) + 1e-8)
        equal = {"rows": rows * u, "columns": u * columns, "both": rows * u * columns}[
            mode
        ]
        return moonlight_scale(shape) * newton_schulz(equal)

    return step


@follows(1e-12)
def normuon(shape, b2=0.95):
    u_of, v = momentum(shape, average=True), np.zeros((shape[0], 1))

    def step(g, w):
        nonlocal v
        o = newton_schulz(u_of(g))
        v = b2 * v + (1 - b2) * np.mean(o**2, axis=1, keepdims=True)
        scaled = o / (np.sqrt(v) + 1e-10)
        return keller_scale(shape) * scaled * np.linalg.norm(o) / np.linalg.norm(scaled)

    return step


def hyperball(w, u, lr, row_norm):
    """W <- R N(N(W) - lr N(U)), R = row_norm sqrt(rows), where N divides a matrix by
    its Frobenius norm.
    """
    moved = w / np.linalg.norm(w) - lr * u / np.linalg.norm(u)
    return moved / np.linalg.norm(moved) * row_norm * len(w) ** 0.5


def metric(shape, strength=0.5, clip=2.0, decay=0.95):
    """D = diag(a) T(diag(a) U diag(b)) diag(b); a and b are those of earlier gradients,
    and all ones at first.
    """
    r, c = np.zeros(shape[0]), np.zeros(shape[1])

    def step(g, u, t):
        nonlocal r, c
        a, b = (
            (
                np.clip(np.sqrt(x / x.mean()), 1 / clip, clip) ** -strength
                if x.any()
                else 1 + x
            )
            for x in (r, c)
        )
        r = decay * r + (1 - decay) * np.mean(g**2, axis=1)
        c = decay * c + (1 - decay) * np.mean(g**2, axis=0)
        return a[:, None] * t(a[:, None] * u * b) * b

    return step


def normpre_h(
    shape, momentum=0.85, slow_momentum=0.98, slow_weight=0.56, metric_strength=0.5
):
    """Momenta of two ages, orthogonalized in the metric; without Hyperball."""
    m1, m2, t, d_of = (
        np.zeros(shape),
        np.zeros(shape),
        0,
        metric(shape, metric_strength),
    )

    def step(g):
        nonlocal m1, m2, t
        m1 = momentum * m1 + (1 - momentum) * g
        m2 = slow_momentum * m2 + (1 - slow_momentum) * g
        w = (
            slow_weight(t)
            if callable(slow_weight)
            else slow_weight * (1 - slow_momentum ** (t + 1)) ** 4
        )
        t += 1
        mean = (1 - w) * m1 / (1 - momentum**t) + w * m2 / (1 - slow_momentum**t)
        return d_of(
            g, 0.05 * g + 0.95 * mean, lambda x: newton_schulz(x, scale="schatten")
        )

    return step
