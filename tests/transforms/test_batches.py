# SPDX-License-Identifier: Apache-2.0
"""The arrangements in which a stage may be run give the same numbers, and the same state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.transforms import batches

# One matrix and a stack go through products of other shapes, so sums may be taken in another order: a few units in the
# last place, times the condition of what follows (the sketch's basis, whose error the tests of linalg bound by 1e-5).
TOLERANCE = 2e-5


def parameters(seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, 9), "b": (6, 9), "c": (9, 6), "d": (6, 9), "e": (4, 6, 9), "f": (4, 6, 9), "g": (3, 6, 9)}
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def rule(path, leaf):
    return npo.MatrixDims(inputs=leaf.ndim - 2, outputs=leaf.ndim - 1)


def moments():
    """A stage that keeps one number a matrix, and counts steps."""

    def init(params):
        return {"mean": jax.tree.map(lambda x: jnp.zeros(x.shape[:-2]), params), "count": jnp.zeros((), jnp.int32)}

    def update(updates, state, params=None):
        mean = jax.tree.map(lambda m, x: m + jnp.mean(x, axis=(-2, -1)), state["mean"], updates)
        return jax.tree.map(lambda m, x: x + m[..., None, None], mean, updates), {
            "mean": mean,
            "count": state["count"] + 1,
        }

    return optax.GradientTransformation(init, update)


STAGES = {
    "g": lambda: npo.alternate_orientation(optax.chain(npo.project_to_tangent(), npo.normalize_rows())),
    "sketch": lambda: optax.chain(npo.normalize_rows(), npo.precondition_locally(rank=2, oversample=1)),
    "exact": lambda: npo.precondition_locally(rank=2, method="exact"),
    "msign": lambda: npo.precondition_globally(ns_steps=None),
    "stateful": moments,
    "row moments": lambda: optax.chain(
        npo.standardize_rows(), npo.equalize_rows_and_columns(), npo.whiten(), npo.scale_by_row_moment()
    ),
}


def steps(stage, count=3):
    tx = npo.as_matrices(rule, STAGES[stage]())
    params = parameters(0)
    state, seen = tx.init(params), []
    update = jax.jit(tx.update)
    for i in range(count):
        updates, state = update(parameters(i + 1), state, params)
        seen.append(updates)
    return seen, state


SLOW = {"row moments"}


@pytest.mark.parametrize("stage", [pytest.param(s, marks=pytest.mark.slow) if s in SLOW else s for s in STAGES])
@pytest.mark.parametrize("chunk", [2**31, 1, 500])
def test_stacked_equals_in_turn(monkeypatch, stage, chunk):
    in_turn = steps(stage)
    monkeypatch.setattr(batches, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(batches.jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args), raising=True)
    at_once = steps(stage)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), in_turn, at_once)


@pytest.mark.parametrize(("chunk", "expected"), [(2**31, [3]), (2 * 6 * 9 * 4, [2, 1]), (1, [1, 1, 1])])
def test_accelerators_take_no_more_than_a_chunk_at_once(monkeypatch, chunk, expected):
    monkeypatch.setattr(batches, "CHUNK_BYTES", chunk)
    monkeypatch.setattr(batches.jax.lax, "platform_dependent", lambda *args, cpu, default: default(*args), raising=True)
    seen = []
    stage = optax.stateless(lambda updates, params=None: jax.tree.map(lambda x: seen.append(x.shape) or x, updates))
    three = {name: jnp.ones((6, 9)) for name in "abc"}
    npo.as_matrices(rule, stage).update(three, optax.EmptyState(), three)
    assert seen == [(stacked, 9, 6) for stacked in expected]


def products_in_the_program(count):
    params = {f"layer{i}": jnp.ones((6, 9)) for i in range(count)}
    tx = npo.as_matrices(rule, npo.precondition_globally())
    return jax.jit(tx.update).lower(params, tx.init(params), params).compile().as_text().count(" dot(")


def test_one_copy_of_the_stage_for_each_shape():
    assert products_in_the_program(6) == products_in_the_program(3) == products_in_the_program(1) > 0


def test_stateful_stage_keeps_state_for_every_parameter():
    state = steps("stateful")[1]
    assert jax.tree.map(jnp.shape, state["mean"]) == {
        name: ((1,) if x.ndim == 2 else x.shape[:1]) for name, x in parameters(0).items()
    }
    assert int(state["count"]) == 3
