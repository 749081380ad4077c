# SPDX-License-Identifier: Apache-2.0
"""Shared by several test modules.

The optimizers under test, small parameter trees, and compiled updates.
"""

import functools
import os
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import normpre_optax as npo
from normpre_optax.linalg import sketch

EPS32 = float(np.finfo(np.float32).eps)
EPS64 = float(np.finfo(np.float64).eps)

# Optimizers that need one learning rate: all but normpre_h.
ONE_RATE = {
    name: found.factory
    for name, found in npo.optimizers().items()
    if name != "normpre_h"
}
HYPERBALL = {"norm_control": "hyperball", "adam_learning_rate": 0.1, "row_norms": 0.7}
# Every optimizer with the options that change what it computes: name -> (factory,
# options).
FACTORIES: dict[str, tuple[Any, dict[str, Any]]] = {
    **{name: (found.factory, {}) for name, found in npo.optimizers().items()},
    "normpre": (npo.normpre, {"precondition": optax.identity()}),
    "normpre_g-columns-strict": (
        npo.normpre_g,
        {"orientation": "columns", "tangent": "strict"},
    ),
    "normpre_g-both-none": (npo.normpre_g, {"orientation": "both", "tangent": "none"}),
    "normpre_g-rows-polar": (
        npo.normpre_g,
        {"orientation": "rows", "ns_coefficients": "polar_express"},
    ),
    "normpre_g-msign": (npo.normpre_g, {"ns_steps": None, "nesterov": True}),
    "normpre_g-bfloat16": (
        npo.normpre_g,
        {"compute_dtype": jnp.bfloat16, "mu_dtype": jnp.bfloat16},
    ),
    "normpre_l-small": (npo.normpre_l, {"rank": 1, "oversample": 1}),
    "normpre_l-adaptive": (
        npo.normpre_l,
        {"rank": 0.3, "relative_threshold": 0.5, "orientation": "both"},
    ),
    "normpre_l-exact": (
        npo.normpre_l,
        {"rank": 2, "method": "exact", "orientation": "columns"},
    ),
    "normpre_l-products": (
        npo.normpre_l,
        {"method": "products", "power_iterations": 2, "rms": 0.1},
    ),
    "normpre_h": (npo.normpre_h, {"adam_learning_rate": 0.1, "row_norms": 0.7}),
    "muon-keller": (npo.muon, {"convention": "keller", "nesterov": False}),
    "muon-hyperball": (npo.muon, HYPERBALL),
    "mano-2": (npo.mano, {"version": 2, "nesterov": True}),
    "muoneq-columns": (npo.muoneq, {"mode": "columns"}),
    "muoneq-both": (npo.muoneq, {"mode": "both"}),
    "muon_plus-columns_rows": (npo.muon_plus, {"mode": "columns_rows"}),
    "moga-columns": (npo.moga, {"mode": "columns"}),
    "swan-rms": (npo.swan, {"rms": 0.2}),
}
# One optimizer per kind of state and execution: the chain, a truncated sketch, moments
# of rows, the metric.
REPRESENTATIVES = ("normpre_g", "normpre_l-small", "normuon", "normpre_h")


def make(
    name: str, learning_rate: Any = 1.0, **options: Any
) -> optax.GradientTransformationExtraArgs:
    """An optimizer of ``FACTORIES``, with further options."""
    factory, own = FACTORIES[name]
    if factory is npo.normpre_h and "weight_decay" in options:
        options["adam_weight_decay"] = options.pop("weight_decay")
    return factory(learning_rate, **{**own, **options})


# (out, in) of single matrices, (layers, out, in) of stacks; parameters store them as
# (in, out) and (layers, in, out).
SHAPES = {"wide": (5, 12), "square": (7, 7), "stack": (3, 8, 5), "twin": (5, 12)}
DIMS = {
    name: npo.MatrixDims(inputs=len(shape) - 2, outputs=len(shape) - 1)
    for name, shape in SHAPES.items()
}


def gaussian(shape, seed=0):
    """Standard Gaussian numbers in float64, the same for the same seed."""
    return np.random.default_rng(seed).standard_normal(shape)


def numbers(shapes, seed=0, dtype=jnp.float32):
    """A tree of shapes as a tree of Gaussian arrays."""
    random = np.random.default_rng(seed)

    def draw(shape):
        return jnp.asarray(random.standard_normal(shape), dtype)

    return jax.tree.map(draw, shapes, is_leaf=lambda x: type(x) is tuple)


def with_spectrum(m, n, singular_values, seed=0):
    """U diag(s) V^T with random orthonormal U, V."""
    u, _ = np.linalg.qr(gaussian((m, len(singular_values)), seed))
    v, _ = np.linalg.qr(gaussian((n, len(singular_values)), seed + 1))
    return u @ np.diag(singular_values) @ v.T


def to_layout(matrices, dtype=None):
    """(..., out, in) to the layout of the parameters, (..., in, out)."""
    return {
        name: jnp.asarray(np.swapaxes(x, -1, -2), dtype) for name, x in matrices.items()
    }


def from_layout(params):
    """The parameters' layout to (..., out, in), in float64."""
    return {
        name: np.swapaxes(np.asarray(x, np.float64), -1, -2)
        for name, x in params.items()
    }


def each_matrix(f, *trees):
    """f of (name, batch index, matrix of every tree), matrix by matrix.

    Returns a dict of the same shapes.
    """

    def of_one(name, index):
        return f(name, index, *(tree[name][index] for tree in trees))

    def of_leaf(name, x):
        if x.ndim == 2:
            return f(name, 0, *(tree[name] for tree in trees))
        return np.stack([of_one(name, index) for index in range(len(x))])

    return {name: of_leaf(name, x) for name, x in trees[0].items()}


def weights(seed=0, shapes=SHAPES):
    """Gaussian matrices (..., out, in) with row norms from 0.3 to 1.7.

    So both signs of the relaxed tangent's factor occur.
    """
    random = np.random.default_rng(seed)

    def one(shape):
        x = random.standard_normal(shape)
        x /= np.linalg.norm(x, axis=-1, keepdims=True)
        norms = np.linspace(0.3, 1.7, shape[-2])[:, None]
        return (x * norms).astype(np.float32)

    return {name: one(shape) for name, shape in shapes.items()}


def gradients(steps, seed=1, shapes=SHAPES):
    """Gradients (..., out, in), step by step.

    They are noise around a drift, with rows of quite different norms.
    """
    random = np.random.default_rng(seed)
    drift = {name: random.standard_normal(shape) for name, shape in shapes.items()}
    size = {}
    for name, shape in shapes.items():
        size[name] = np.exp(random.standard_normal((*shape[:-1], 1)))

    def one(name, shape):
        x = 0.3 * drift[name] + random.standard_normal(shape)
        return (size[name] * x).astype(np.float32)

    def step():
        return {name: one(name, shape) for name, shape in shapes.items()}

    return [step() for _ in range(steps)]


@functools.cache
def omega(seed, step, path, index, shape, width):
    """Omega (larger dimension, l) of a matrix of this (out, in) shape, in float64.

    It has the library's draws.
    """
    ids = sketch.matrix_ids(path, (index + 1,))[index]
    size = (min(*shape, width), max(shape))
    drawn = sketch.draws(seed, step, jnp.asarray(ids), size)
    return np.asarray(drawn, np.float64).T


# Without LLVM's optimizations, compilation is two to three times faster.
quick_jit = functools.partial(
    jax.jit, compiler_options={"xla_backend_optimization_level": 0}
)
# As users compile: `conftest` sets other flags for all other programs.
USERS = {
    "backend_optimization_level": 3,
    "cpu_use_fusion_emitters": True,
    "cpu_parallel_codegen_split_count": 32,
}
OPTIONS = {
    f"xla_{flag}": value
    for flag, value in USERS.items()
    if flag in os.environ.get("XLA_FLAGS", "")
}
users_jit = functools.partial(jax.jit, compiler_options=OPTIONS)
# For programs that are traced for accelerators but run on a CPU: their batched LAPACK
# calls can deadlock a CPU (docs/cpu_hang.md) unless operations run one after the other.
one_by_one_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_cpu_enable_concurrency_optimized_scheduler": False,
    },
)


@functools.cache
def updater(tx):
    """The compiled update of an optimizer."""
    return quick_jit(tx.update)


def first_update(tx, grads, params):
    """The update of the first step, not compiled as a whole."""
    return tx.update(grads, tx.init(params), params)[0]


def steps(update, state, params, gradients):
    """Updates of some steps at fixed parameters, and the last state."""
    out = []
    for gradient in gradients:
        updates, state = update(gradient, state, params)
        out.append(updates)
    return out, state


def assert_close(a, b, **tolerance):
    """Compare two trees of one structure."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, **tolerance), a, b)


def path(tx, gradients, shapes=SHAPES, dtype=jnp.float32):
    """Weights (..., out, in) after steps from ``weights``."""
    params = to_layout(weights(shapes=shapes), dtype)
    state = tx.init(params)
    for gradient in gradients:
        updates, state = tx.update(to_layout(gradient, dtype), state, params)
        params = optax.apply_updates(params, updates)
    return from_layout(params)


def assert_same_path(got, expected, tolerance):
    """Compare two paths from ``weights``, relative to their length."""
    start = weights(shapes={name: x.shape for name, x in expected.items()})
    for name, x in expected.items():
        error = np.linalg.norm(got[name] - x) / np.linalg.norm(x - start[name])
        assert error < tolerance, (name, error)


def package_calls(f):
    """(code, depth) of every named function of the package that f enters.

    A depth counts such functions.
    """
    package = os.path.dirname(npo.__file__)
    entered = []
    depth = 0

    def profile(frame, event, _):
        nonlocal depth
        code = frame.f_code
        is_lambda = code.co_name[0] == "<"
        if is_lambda or not code.co_filename.startswith(package):
            return
        if event == "call":
            depth += 1
            entered.append((code, depth))
        elif event == "return":
            depth -= 1

    sys.setprofile(profile)
    try:
        f()
    finally:
        sys.setprofile(None)
    return entered


def equations(jaxpr):
    """The equations of a program, also inside its loops and branches."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jax.tree.leaves(eqn.params):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def rows(names, *values):
    """Parametrize a test by the rows of a table, under the names of its columns."""
    return pytest.mark.parametrize(names.split(), values)


def put(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec(*spec)))
