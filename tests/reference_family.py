# SPDX-License-Identifier: Apache-2.0
"""The relatives in NumPy float64, each transcribed literally with its epsilons.

They are the oracle of ``test_relatives``. Matrices are (out, in) = (m, n), one at a
time; nothing is shared with the package. A transcription is a function ``start(shape,
**options) -> step`` with the optimizer's name, and ``step(g, w) -> direction`` keeps
its state.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import numpy as np

from tests.reference import newton_schulz

MU = 0.95


class Variant(NamedTuple):
    """An optimizer with some options, and its transcription."""

    optimizer: str
    options: dict[str, Any]
    start: Callable[[tuple[int, int]], Callable]
    tolerance: float


class Properties(NamedTuple):
    """What the tests of all optimizers must know of one.

    Attributes:
        state: arrays that it keeps of a matrix, each with one number per "entry", "row"
            or "column".
        hides_infinity: whether an infinite gradient gives a finite update.
    """

    state: tuple[Literal["entry", "row", "column"], ...] = ("entry",)
    hides_infinity: bool = False


VARIANTS: dict[str, Variant] = {}
PROPERTIES: dict[str, Properties] = {}


def follows(tolerance: float, *options: dict[str, Any], **properties: Any) -> Callable:
    """Compare the optimizer of this name, for each of the options, with the function.

    Args:
        tolerance: relative to the path in float64: rounding (eps64 times 485 a step),
            or the 1e-8 that some rules add to squared norms of order one and the
            package does without, times the slope of Newton-Schulz, 20 to 100.
        *options: to compare, none of them for the defaults.
        **properties: see ``Properties``; by default, the state is the momentum.
    """

    def add(start: Callable) -> Callable:
        name = start.__name__
        PROPERTIES[name] = Properties(**properties)
        for chosen in options or ({},):
            label = "-".join([name, *map(str, chosen.values())])
            of_options = functools.partial(start, **chosen)
            VARIANTS[label] = Variant(name, chosen, of_options, tolerance)
        return start

    return add


def momentum(shape, nesterov=True, average=False):
    """M = mu M + G, U = G + mu M; averages multiply G by 1 - mu in both."""
    m = np.zeros(shape)
    share = 1 - MU if average else 1.0

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


KELLER = {"convention": "keller"}


@follows(1e-10, {}, KELLER, {**KELLER, "nesterov": False})
def muon(shape, convention="moonlight", nesterov=True):
    keller = convention == "keller"
    u_of = momentum(shape, nesterov, average=keller)
    scale_of = keller_scale if keller else moonlight_scale

    def step(g, w):
        return scale_of(shape) * newton_schulz(u_of(g))

    return step


@follows(1e-7, {}, {"version": 2, "nesterov": True})
def mano(shape, version=1, nesterov=False):
    """Version 1 projects with unit weights, version 2 with the weights themselves."""
    u_of = momentum(shape, nesterov)
    t = 0

    def first(u, w, axis):
        along = w / np.maximum(norms(w, axis), 1e-8)
        x = u - np.sum(u * along, axis=axis, keepdims=True) * along
        return x / np.maximum(norms(x, axis), 1e-8)

    def second(u, w, axis):
        x = u - np.sum(u * w, axis=axis, keepdims=True) * w
        return x / (norms(x, axis) + 1e-8)

    def step(g, w):
        nonlocal t
        axis = t % 2  # of (out, in) that sums run along: columns on even steps
        t += 1
        unit = {1: first, 2: second}[version](u_of(g), w, axis)
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
        factor = {"rows": rows, "columns": columns, "both": rows * columns}[mode]
        return moonlight_scale(shape) * newton_schulz(factor * u)

    return step


@follows(1e-12, {}, {"mode": "rows"}, {"mode": "columns"}, {"mode": "columns_rows"})
def muon_plus(shape, mode="both"):
    u_of = momentum(shape)
    summed = {"rows": (1,), "columns": (0,), "both": (1, 0), "columns_rows": (0, 1)}

    def step(g, w):
        o = newton_schulz(u_of(g))
        for axis in summed[mode]:
            o = o / np.sqrt(np.sum(o**2, axis=axis, keepdims=True) + 1e-7)
        return (shape[0] / shape[1]) ** 0.5 * o

    return step


@follows(1e-12, state=("entry", "row"))
def normuon(shape, b2=0.95):
    u_of = momentum(shape, average=True)
    v = np.zeros((shape[0], 1))

    def step(g, w):
        nonlocal v
        o = newton_schulz(u_of(g))
        v = b2 * v + (1 - b2) * np.mean(o**2, axis=1, keepdims=True)
        scaled = o / (np.sqrt(v) + 1e-10)
        return keller_scale(shape) * scaled * np.linalg.norm(o) / np.linalg.norm(scaled)

    return step


@follows(1e-8, state=("entry", "entry"), hides_infinity=True)  # the sign of inf is 1
def adamuon(shape):
    u_of = momentum(shape, average=True)
    v = np.zeros(shape)

    def step(g, w):
        nonlocal v
        o = newton_schulz(np.sign(u_of(g)))
        v = MU * v + (1 - MU) * o**2
        scaled = o / (np.sqrt(v) + 1e-8)
        root = np.sqrt(shape[0] * shape[1])
        return 0.2 * root * scaled / (np.linalg.norm(scaled) + 1e-8)

    return step


@follows(1e-13, {}, {"mode": "columns"})
def moga(shape, mode="rows"):
    m, n = shape
    u_of = momentum(shape)

    def step(g, w):
        u = u_of(g)
        if mode == "rows":
            return u / norms(u, 1) * n**-0.5
        return u / norms(u, 0) * m**0.5 / n

    return step


@follows(1e-12, state=())
def swan(shape, beta=0.5, k=6):
    identity = np.eye(shape[0])

    def step(g, w):
        s = (g - g.mean(axis=1, keepdims=True)) / g.std(axis=1, keepdims=True)
        y = s @ s.T / np.linalg.norm(s @ s.T)
        z = identity
        for _ in range(k):
            factor = 3 * identity - z @ y  # both from the old values
            y = beta * y @ factor
            z = beta * factor @ z
        return z @ s

    return step


def hyperball(w, u, lr, row_norm):
    """W <- R N(N(W) - lr N(U)), R = row_norm sqrt(rows); N divides by the norm."""
    moved = w / np.linalg.norm(w) - lr * u / np.linalg.norm(u)
    return moved / np.linalg.norm(moved) * row_norm * len(w) ** 0.5


def metric(shape, strength=0.5, clip=2.0, decay=0.95):
    """D = diag(a) T(diag(a) U diag(b)) diag(b).

    a and b are those of earlier gradients, and all ones at first.
    """
    r = np.zeros(shape[0])
    c = np.zeros(shape[1])

    def factors(x):
        if not x.any():
            return np.ones(len(x))
        return np.clip(np.sqrt(x / x.mean()), 1 / clip, clip) ** -strength

    def step(g, u, t):
        nonlocal r, c
        a = factors(r)
        b = factors(c)
        r = decay * r + (1 - decay) * np.mean(g**2, axis=1)
        c = decay * c + (1 - decay) * np.mean(g**2, axis=0)
        return a[:, None] * t(a[:, None] * u * b) * b

    return step


def normpre_h(
    shape, momentum=0.85, slow_momentum=0.98, slow_weight=0.56, metric_strength=0.5
):
    """Momenta of two ages, orthogonalized in the metric; without Hyperball."""
    m1 = np.zeros(shape)
    m2 = np.zeros(shape)
    t = 0
    d_of = metric(shape, metric_strength)

    def weight_of_slow():
        if callable(slow_weight):
            return slow_weight(t)
        return slow_weight * (1 - slow_momentum ** (t + 1)) ** 4

    def orthogonalized(x):
        return newton_schulz(x, scale="schatten")

    def step(g):
        nonlocal m1, m2, t
        m1 = momentum * m1 + (1 - momentum) * g
        m2 = slow_momentum * m2 + (1 - slow_momentum) * g
        w = weight_of_slow()
        t += 1
        mean = (1 - w) * m1 / (1 - momentum**t) + w * m2 / (1 - slow_momentum**t)
        return d_of(g, 0.05 * g + 0.95 * mean, orthogonalized)

    return step
