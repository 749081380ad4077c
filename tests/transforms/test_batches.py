# SPDX-License-Identifier: Apache-2.0
"""The arrangements in which a stage may be run give the same numbers, and the same state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.platforms import on
from normpre_optax.transforms import batches
from normpre_optax.transforms.oriented import OrientedTransformation
from normpre_optax.transforms.row_scaling import row_scaling
from tests import cases

# One matrix and a stack go through products of other shapes, so sums may be taken in another order: a few units in the
# last place, times the condition of what follows (the sketch's basis, whose error the tests of linalg bound by 1e-5).
TOLERANCE = 2e-5


def parameters(seed):
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, 9), "b": (6, 9), "c": (9, 6), "d": (6, 9), "e": (3, 6, 9), "f": (3, 6, 9)}
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
    # In float32: the arrangements alone are compared here, not the operands' dtypes (tests/test_platforms.py).
    "sketch": lambda: optax.chain(
        npo.normalize_rows(), npo.precondition_locally(2, oversample=1, power_iterations=0, compute_dtype=jnp.float32)
    ),
    "exact": lambda: npo.precondition_locally(rank=2, method="exact"),
    "msign": lambda: npo.precondition_globally(ns_steps=None),
    "stateful": moments,
    "row moments": lambda: optax.chain(
        npo.standardize_rows(), npo.equalize_rows_and_columns(), npo.whiten(2), npo.scale_by_row_moment()
    ),
}


def steps(stage, platform="cpu", count=3):
    tx = npo.as_matrices(rule, STAGES[stage]())
    params = parameters(0)
    state, seen = tx.init(params), []
    update = on(platform, cases.one_by_one_jit(tx.update))
    for i in range(count):
        updates, state = update(parameters(i + 1), state, params)
        seen.append(updates)
    return seen, state


LIMITS = {"tpu": "TPU_BYTES", "gpu": "GPU_BYTES"}  # and what says how much each takes at once


@functools.cache
def steps_in_turn(stage):
    return steps(stage)


# All at once, one at a time, a few: every way for the sketch, which knows each matrix by its identity, else the last.
WAYS = [(platform, limit) for platform in LIMITS for limit in (2**31, 1, 500)]


@pytest.mark.parametrize(
    ("stage", "platform", "limit"),
    [
        # At 500 bytes some are one at a time, too.
        pytest.param(stage, platform, limit, marks=pytest.mark.thorough if limit == 1 else ())
        for stage in STAGES
        for platform, limit in WAYS
        if stage == "sketch" or limit == 500
    ],
)
def test_in_pools_equals_in_turn(monkeypatch, stage, platform, limit):
    in_turn = steps_in_turn(stage)
    monkeypatch.setattr(batches, LIMITS[platform], limit)
    at_once = steps(stage, platform)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=TOLERANCE, atol=TOLERANCE), in_turn, at_once)


def shapes_that_a_stage_sees(platform, params):
    """Shapes of the stacks in each of its calls, in order."""
    calls = []

    def update(updates, params=None):
        calls.append([x.shape for x in jax.tree.leaves(updates)])
        return updates

    tx = npo.as_matrices(rule, optax.stateless(update))
    on(platform, jax.make_jaxpr(lambda p: tx.update(p, optax.EmptyState(), p)))(params)
    return calls


EACH = 6 * 9 * 4  # bytes


@pytest.mark.parametrize(
    ("platform", "limit", "expected"),
    [
        ("tpu", 2**31, [[(1, 9, 6)] * 3]),  # side by side
        ("gpu", 2**31, [[(3, 9, 6)]]),  # as one stack
        # Two at once, then the third: another pool, another trace.
        ("tpu", 2 * EACH, [[(1, 9, 6)] * 2, [(1, 9, 6)]]),
        ("gpu", 2 * EACH, [[(2, 9, 6)], [(1, 9, 6)]]),
        # One at a time: three pools of one kind, traced once.
        ("tpu", 1, [[(1, 9, 6)]]),
        ("gpu", 1, [[(1, 9, 6)]]),
    ],
)
def test_accelerators_take_no_more_than_a_limit_at_once(monkeypatch, platform, limit, expected):
    monkeypatch.setattr(batches, LIMITS[platform], limit)
    assert shapes_that_a_stage_sees(platform, {name: jnp.ones((6, 9)) for name in "abc"}) == expected


@pytest.mark.parametrize(
    ("platform", "expected"),
    [
        ("tpu", [[(1, 9, 6), (1, 5, 4), (2, 9, 6), (1, 9, 6)]]),
        ("gpu", [[(2, 9, 6), (1, 5, 4), (2, 9, 6)]]),  # one matrix and a stack of two are of two kinds
    ],
)
def test_a_pool_holds_matrices_of_all_shapes(platform, expected):
    params = {"a": jnp.ones((6, 9)), "b": jnp.ones((4, 5)), "c": jnp.ones((2, 6, 9)), "d": jnp.ones((6, 9))}
    assert shapes_that_a_stage_sees(platform, params) == expected


def test_a_cpu_traces_a_stage_once_for_a_loop_over_matrices():
    assert shapes_that_a_stage_sees("cpu", {name: jnp.ones((6, 9)) for name in "abc"}) == [[(9, 6)]]


def test_factors_of_rows_and_of_columns_are_traced_once_each():
    seen = []
    stage = npo.alternate_orientation(row_scaling("none", length=lambda *size: seen.append(size) or 1.0))
    x = jnp.ones((6, 9))
    on("cpu", jax.make_jaxpr(lambda x: stage.update(x, stage.init(x))))(x)
    assert seen == [(6, 9), (9, 6)]


def test_matrices_that_lie_the_other_way_are_a_pool_of_their_own():
    dims = {
        "in_out": npo.MatrixDims(inputs=0, outputs=1),
        "out_in": npo.MatrixDims(inputs=1, outputs=0),
    }
    seen = []

    def update(updates, state, params=None, *, matrix_layout, **extra_args):
        seen.append((matrix_layout.transposed, [x.shape for x in jax.tree.leaves(updates)]))
        return updates, state

    stage = OrientedTransformation(lambda params: optax.EmptyState(), update)
    params = {"in_out": jnp.ones((6, 9)), "out_in": jnp.ones((9, 6))}
    on("tpu", npo.as_matrices(dims, stage).update)(params, optax.EmptyState(), params)
    assert sorted(seen) == [(False, [(1, 9, 6)]), (True, [(1, 6, 9)])]


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
