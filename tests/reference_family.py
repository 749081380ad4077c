# SPDX-License-Identifier: Apache-2.0
"""The relatives in NumPy float64, each transcribed literally, with its epsilons: the oracle of ``test_relatives``.

Matrices are (out, in) = (m, n), one at a time; nothing is shared with the package. Every oracle is a function
``start(shape) -> step`` of one matrix; ``step(g) -> direction`` keeps the state between steps.
"""

import numpy as np

from tests.reference import newton_schulz

Array = np.ndarray
MU = 0.95


def signal(shape, mu=MU, nesterov=True):
    """M = mu M + G; U = G + mu M."""
    m = np.zeros(shape)

    def step(g):
        nonlocal m
        m = mu * m + g
        return g + mu * m if nesterov else m

    return step


def keller_signal(shape, mu=MU):
    """M = mu M + (1 - mu) G; U = (1 - mu) G + mu M."""
    m = np.zeros(shape)

    def step(g):
        nonlocal m
        m = mu * m + (1 - mu) * g
        return (1 - mu) * g + mu * m

    return step


def keller_scale(shape):
    return max(1, shape[0] / shape[1]) ** 0.5


def moonlight_scale(shape):
    return 0.2 * max(shape) ** 0.5


def rmnp(shape):
    u_of = signal(shape)

    def step(g):
        u = u_of(g)
        return keller_scale(shape) * u / np.linalg.norm(u, axis=1, keepdims=True)

    return step


def moga(shape, mode="rows"):
    m, n = shape
    u_of = signal(shape)

    def step(g):
        u = u_of(g)
        if mode == "rows":
            return u / np.linalg.norm(u, axis=1, keepdims=True) * n**-0.5
        return u / np.linalg.norm(u, axis=0, keepdims=True) * m**0.5 / n

    return step


def muoneq(shape, mode="R"):
    u_of = signal(shape)

    def step(g):
        u = u_of(g)
        rows = 1 / np.sqrt(np.sum(u**2, axis=1, keepdims=True) + 1e-8)
        columns = 1 / np.sqrt(np.sum(u**2, axis=0, keepdims=True) + 1e-8)
        equal = {"R": rows * u, "C": u * columns, "RC": rows * u * columns}[mode]
        return moonlight_scale(shape) * newton_schulz(equal)

    return step


def muon_plus(shape, mode="row_col"):
    u_of = signal(shape)

    def step(g):
        o = newton_schulz(u_of(g))
        for part in mode.split("_"):
            o = o / np.sqrt(np.sum(o**2, axis={"row": 1, "col": 0}[part], keepdims=True) + 1e-7)
        return (shape[0] / shape[1]) ** 0.5 * o

    return step


def normuon(shape, b2=0.95):
    u_of = keller_signal(shape)
    v = np.zeros((shape[0], 1))

    def step(g):
        nonlocal v
        o = newton_schulz(u_of(g))
        v = b2 * v + (1 - b2) * np.mean(o**2, axis=1, keepdims=True)
        scaled = o / (np.sqrt(v) + 1e-10)
        return keller_scale(shape) * scaled * np.linalg.norm(o) / np.linalg.norm(scaled)

    return step


def adamuon(shape):
    u_of = keller_signal(shape)
    v = np.zeros(shape)

    def step(g):
        nonlocal v
        o = newton_schulz(np.sign(u_of(g)))
        v = MU * v + (1 - MU) * o**2
        scaled = o / (np.sqrt(v) + 1e-8)
        return 0.2 * np.sqrt(shape[0] * shape[1]) * scaled / (np.linalg.norm(scaled) + 1e-8)

    return step


def swan(shape, beta=0.5, k=6):
    def step(g):
        s = (g - g.mean(axis=1, keepdims=True)) / g.std(axis=1, keepdims=True)
        y = s @ s.T / np.linalg.norm(s @ s.T)
        z = identity = np.eye(shape[0])
        for _ in range(k):
            y, z = beta * y @ (3 * identity - z @ y), beta * (3 * identity - z @ y) @ z
        return z @ s

    return step


def hyperball(w0, w, u, lr):
    """W <- |W0| N(W - lr |W0| N(U)), where N divides a matrix by its Frobenius norm."""
    radius = np.linalg.norm(w0)
    moved = w - lr * u / np.linalg.norm(u) * radius
    return moved / np.linalg.norm(moved) * radius
