# SPDX-License-Identifier: Apache-2.0
"""No method hangs: compiled steps of many matrices return.

They run in a process of its own, under a timeout. Several batched LAPACK calls in one
program can deadlock on two CPU cores (docs/cpu_hang.md). Every run is limited to two
cores; a model with stacks of several shapes would run into it.
"""

import os
import subprocess
import sys

import pytest

from tests import cases

TWO_CORES = """
import os
if hasattr(os, "sched_setaffinity"):  # before JAX makes its threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
import jax, jax.numpy as jnp, optax
"""

SCRIPT = """
from normpre_optax import MatrixDims, normpre_g, normpre_l

def dims(path, leaf):
    return MatrixDims(inputs=leaf.ndim - 2, outputs=leaf.ndim - 1)

tx = {optimizer}
params = {{}}
for i, shape in enumerate({shapes}):
    x = jax.random.normal(jax.random.key(i), shape)
    params[f"layer_{{i}}"] = x / shape[-2] ** 0.5

def step(params, state):
    grads = jax.tree.map(lambda p: p + 0.1 * jnp.sin(17 * p), params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state

init = tx.init
if {lanes}:
    step = jax.vmap(step)
    init = jax.vmap(init)
    lane = 0.01 * jnp.arange({lanes})
    params = jax.tree.map(lambda p: jax.vmap(lambda x: p + x)(lane), params)
step = jax.jit(step, donate_argnums=(0, 1))
state = init(params)
for _ in range({steps}):
    params, state = step(params, state)
jax.block_until_ready(params)
assert all(bool(jnp.isfinite(p).all()) for p in jax.tree.leaves(params))
print("returned")
"""

# 48 matrices: three stacks of eight, two of four, and sixteen that stand alone, in
# eight shapes.
MANY = [(8, 128, 128), (8, 64, 128), (8, 128, 48), (4, 96, 96), (4, 32, 64)]
MANY += [(128, 64)] * 8 + [(40, 128)] * 4 + [(72, 72)] * 4
# Three stacks of eight: with a batched svd in place of ours this hung within ten steps.
FEW = [(8, 128, 128), (8, 192, 192), (8, 256, 256)]

# The program of docs/cpu_hang.md with each factorization of the library; with
# `jnp.linalg.eigh` it never returns.
KERNEL_SCRIPT = """
from normpre_optax.linalg.newton_schulz import exact_msign
from normpre_optax.linalg.batches import solve_together
from normpre_optax.linalg.sketch import Clipping, clip_exactly, _inverse_cholesky

sizes = (128, 192, 256)
xs = [jax.random.normal(jax.random.key(i), (8, n, n)) for i, n in enumerate(sizes)]
for factor in (
    lambda g: solve_together(_inverse_cholesky, [(g,), (g[:, :30, :30],)]),
    lambda g: jax.vmap(lambda x: clip_exactly(x, Clipping(*jnp.ones((4, 1, 1)))))(g),
    lambda g: jax.vmap(exact_msign)(g),
):
    program = jax.jit(lambda xs: [factor((x @ x.mT)[..., :40, :40]) for x in xs])
    for _ in range(10):
        jax.block_until_ready(program(xs))
print("returned")
"""


def assert_returns(code, timeout):
    """Run a program on two cores; it must print "returned"."""
    env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    # On a busy machine, OpenBLAS threads that spin while they wait slow a run down;
    # that is another matter.
    env |= {"JAX_PLATFORMS": "cpu", "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, "-c", TWO_CORES + code]
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        pytest.fail(f"did not return within {timeout} s")
    assert done.returncode == 0, done.stderr
    assert "returned" in done.stdout


def test_the_factorizations_return():
    assert_returns(KERNEL_SCRIPT, 120)


G = "normpre_g(0.01, matrix_dims=dims)"
EXACT = "normpre_g(0.01, ns_steps=None, matrix_dims=dims)"
SKETCH = "normpre_l(0.01, matrix_dims=dims)"
EXACT_L = "normpre_l(0.01, method='exact', matrix_dims=dims)"
# CI runs these; the first two are a short form, for methods that factor matrices. The
# others are thorough.
RUNS = [(SKETCH, FEW, 10, 0), (EXACT, FEW, 10, 0), (SKETCH, MANY, 200, 0)]
THOROUGH = [(one, MANY, 200, 0) for one in (G, EXACT, EXACT_L)]
THOROUGH += [(one, MANY, 20, 4) for one in (G, EXACT, SKETCH, EXACT_L)]


@pytest.mark.timeout(900)
@cases.rows(
    "optimizer shapes steps lanes",
    *(pytest.param(*x, marks=pytest.mark.slow) for x in RUNS),
    *(pytest.param(*x, marks=pytest.mark.thorough) for x in THOROUGH),
)
def test_two_hundred_steps_of_48_matrices_return(optimizer, shapes, steps, lanes):
    options = {"optimizer": optimizer, "shapes": shapes, "steps": steps}
    timeout = 120 if shapes is FEW else 800
    assert_returns(SCRIPT.format(**options, lanes=lanes), timeout)
