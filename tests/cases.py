# SPDX-License-Identifier: Apache-2.0
"""What several test modules share: small parameter trees, the optimizers under test, compiled updates."""

import functools
import os
import zlib

import jax
import jax.numpy as jnp
import numpy as np

import normpre_optax as npo
from normpre_optax.transforms import draws

EPS32 = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)

# (out, in) of single matrices, (layers, out, in) of stacks; parameters hold them as (in, out) and (layers, in, out).
# Every shape is traced by itself: the stack's matrices are the tall ones, and the twin is as wide.
SHAPES = {"wide": (5, 12), "square": (7, 7), "stack": (3, 8, 5), "twin": (5, 12)}
DIMS = {name: npo.MatrixDims(inputs=len(shape) - 2, outputs=len(shape) - 1) for name, shape in SHAPES.items()}


def gaussian(shape, seed=0):
    """The same standard Gaussian numbers for the same seed, in float64."""
    return np.random.default_rng(seed).standard_normal(shape)


def with_spectrum(m, n, singular_values, seed=0):
    """U diag(s) V^T with random orthonormal U, V."""
    u, _ = np.linalg.qr(gaussian((m, len(singular_values)), seed))
    v, _ = np.linalg.qr(gaussian((n, len(singular_values)), seed + 1))
    return u @ np.diag(singular_values) @ v.T


def to_layout(matrices):
    """(…, out, in) to the layout of the parameters, (…, in, out)."""
    return {name: np.swapaxes(x, -1, -2) for name, x in matrices.items()}


def from_layout(params):
    """The parameters' layout back to (…, out, in), in float64."""
    return {name: np.swapaxes(np.asarray(x, np.float64), -1, -2) for name, x in params.items()}


def each_matrix(f, *trees):
    """f of (name, slice index, matrix of every tree): a dict of the same shapes, built matrix by matrix."""
    out = {}
    for name, x in trees[0].items():
        if x.ndim == 2:
            out[name] = f(name, 0, *(tree[name] for tree in trees))
        else:
            out[name] = np.stack([f(name, i, *(tree[name][i] for tree in trees)) for i in range(len(x))])
    return out


def weights(seed=0, shapes=SHAPES):
    """Gaussian matrices (…, out, in) whose rows are 0.3 to 1.7 long: both sides of the tangent's radius."""
    random = np.random.default_rng(seed)

    def one(shape):
        x = random.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        return (x * np.linspace(0.3, 1.7, shape[-2])[:, None]).astype(np.float32)

    return {name: one(shape) for name, shape in shapes.items()}


def gradients(steps, seed=1, shapes=SHAPES):
    """Gradients (…, out, in), step by step: noise around a drift, with rows of quite different length."""
    random = np.random.default_rng(seed)
    drift = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    size = {name: np.exp(random.standard_normal((*shape[:-1], 1))) for name, shape in shapes.items()}
    return [
        {
            name: (size[name] * (0.3 * drift[name] + random.standard_normal(shape))).astype(np.float32)
            for name, shape in shapes.items()
        }
        for _ in range(steps)
    ]


def omega(seed, step, path, slice_index, shape, width):
    """Omega (longer side, l) for a matrix of this (out, in) shape, from the library's draws, in float64."""
    drawn = (min(*shape, width), max(shape))
    return _drawn(draws.sketch_draws, seed, step, zlib.crc32(path.encode()), slice_index, drawn)


@functools.cache
def _drawn(draw, *where):
    return np.asarray(draw(*where), np.float64).T


# Compiling without LLVM's optimisations is two to three times faster, and most tests here compile more than they run.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
# As users compile: `conftest` has all other programs compiled in one part, without optimisations and XLA's newer code
# for fusions.
USERS = {
    "xla_backend_optimization_level": 3,
    "xla_cpu_use_fusion_emitters": True,
    "xla_cpu_parallel_codegen_split_count": 32,
}
users_jit = functools.partial(
    jax.jit, compiler_options={flag: value for flag, value in USERS.items() if flag in os.environ.get("XLA_FLAGS", "")}
)
# For what accelerators are given and a CPU should not be: batched LAPACK calls side by side, which can stop for ever
# (docs/cpu_hang.md). One operation after the other, they return.
one_by_one_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
    },
)


@functools.cache
def updater(tx):
    """The compiled update of an optimizer, one for the whole run."""
    return quick_jit(tx.update)


def first_update(tx, grads, params):
    """The update of the first step, compiled."""
    return updater(tx)(grads, tx.init(params), params)[0]


def as_jax(tree, dtype=None):
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)
