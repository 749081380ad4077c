# SPDX-License-Identifier: Apache-2.0
"""The recommended optimizer and its two stages against transcriptions."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import normpre_optax as npo
from normpre_optax.linalg.platforms import on
from tests import cases
from tests import reference_family as oracles

SHAPES = {"wide": (5, 12), "stack": (3, 8, 5)}
DIMS = {name: cases.DIMS[name] for name in SHAPES}


def follow(optimizer, transcription, steps=6, **tolerance):
    """Compare weights with those of a transcribed direction under Hyperball."""
    gradients = cases.gradients(steps, shapes=SHAPES)

    def by_rule(name, index, w, *gradients):
        direction = transcription(w.shape)
        w = np.float64(w)
        for gradient in gradients:
            w = oracles.hyperball(w, direction(np.float64(gradient)), 0.1, 0.7)
        return w

    expected = cases.each_matrix(by_rule, cases.weights(shapes=SHAPES), *gradients)
    with jax.enable_x64(True):
        got = cases.path(optimizer, gradients, SHAPES, jnp.float64)
    cases.assert_same_path(got, expected, **tolerance)


VARIANTS = {
    "default": {},
    "schedule": {"slow_weight": lambda step: 0.1 * step},
    "strong": {"metric_strength": 1.0, "momentum": 0.7, "slow_momentum": 0.9},
    "neither": {"metric_strength": 0.0, "slow_weight": 0.0},
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_steps_follow_the_rule(options):
    tx = npo.normpre_h(0.1, 0.1, row_norms=0.7, matrix_dims=DIMS, **options)
    # Rounding of eps64, amplified by the slope of Newton-Schulz, 485 at zero, at each
    # of six steps.
    follow(tx, functools.partial(oracles.normpre_h, **options), tolerance=1e-11)


def test_the_metric_works_around_any_stage():
    """Signs of the scaled matrix; decay, clip and strength are not the defaults."""

    def direction(matrix_dims):
        # `npo.direction` passes the axes.
        metric = npo.with_metric(optax.scale_by_sign(), 0.7, clip=1.3, decay=0.5)
        return npo.direction(metric, matrix_dims=matrix_dims)

    more = {
        "norm_control": "hyperball",
        "adam_learning_rate": 0.1,
        "row_norms": 0.7,
        "matrix_dims": DIMS,
    }

    def signs(shape):
        metric = oracles.metric(shape, strength=0.7, clip=1.3, decay=0.5)
        return lambda g: metric(g, g, np.sign)

    follow(npo.with_adamw(direction, 0.1, **more), signs, tolerance=1e-13)


@pytest.mark.parametrize(
    "dims", [npo.MatrixDims(1, 0), npo.MatrixDims(1, 0, output_blocks=2)]
)
def test_a_direction_passes_its_axes_to_init(dims):
    """The metric's state has one entry per row of the given axes.

    Its own default rule knows nothing of them.
    """
    params = cases.numbers({"up": {"kernel": (8, 6)}}, 1)
    spectral = npo.precondition_globally()

    def updated(metric):
        tx = npo.normpre(0.1, metric, matrix_dims=dims)
        updates, _ = cases.steps(tx.update, tx.init(params), params, [params] * 2)
        return updates

    passed = updated(npo.with_metric(spectral))
    given = updated(npo.with_metric(spectral, matrix_dims=dims))
    jax.tree.map(np.testing.assert_array_equal, passed, given)


def test_a_constant_gradient_is_its_own_momentum():
    """Of both ages, at every step: bias correction.

    The weight of the slow one has no effect then.
    """
    g = jnp.linspace(-1, 1, 12).reshape(3, 4)
    tx = npo.two_momenta()
    found, state = cases.steps(tx.update, tx.init(g), None, [g] * 5)
    for u in found:
        # 1 - 0.98 is rounded to an eps of 1.
        np.testing.assert_allclose(u, g, rtol=2e-6)
    np.testing.assert_allclose(state.slow, (1 - 0.98**5) * g, rtol=1e-6)


def test_the_metric_is_of_the_gradients_in_a_direction_and_of_the_updates_alone():
    grads = cases.numbers({"kernel": (4, 6)}, 1)
    metric = npo.with_metric(optax.identity(), clip=10.0)

    def first_step(tx):
        return tx.update(grads, tx.init(grads))

    updates, alone = first_step(metric)
    _, (_, within) = first_step(npo.direction(optax.scale(3.0), metric))
    for x, y in zip(jax.tree.leaves(alone), jax.tree.leaves(within), strict=True):
        np.testing.assert_array_equal(x, y)
    # Around the identity, the metric has no effect.
    np.testing.assert_array_equal(updates["kernel"], grads["kernel"])
    _, (_, by_updates) = first_step(optax.chain(optax.scale(3.0), metric))
    expected = 9 * alone.rows["kernel"]
    np.testing.assert_allclose(by_updates.rows["kernel"], expected, rtol=1e-6)


def test_momenta_in_bfloat16_are_as_large_as_one_in_float32():
    params = {"layers": [{"up": jnp.zeros((64, 128)), "down": jnp.zeros((128, 64))}]}

    def bytes_of(tx):
        state = jax.eval_shape(tx.init, params)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))

    small = bytes_of(npo.normpre_h(0.1, 0.1, mu_dtype=jnp.bfloat16))
    one = bytes_of(npo.muon(0.1))
    assert one <= small <= 1.03 * one  # and a number per row and column

    shapes = {"layers": [{"up": (64, 128), "down": (128, 64)}]}
    grads = [cases.numbers(shapes, seed) for seed in range(3)]

    def last_update(tx):
        updates, _ = cases.steps(tx.update, tx.init(params), params, grads)
        return updates[-1]

    found = last_update(npo.scale_by_normpre_h(mu_dtype=jnp.bfloat16))
    expected = last_update(npo.scale_by_normpre_h())
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        # Rounding of 2^-9, times a slope of a few.
        assert np.linalg.norm(x - y) <= 0.02 * np.linalg.norm(y)


@pytest.mark.parametrize("row_norms", [None, "keep"])
def test_the_stacks_of_a_gpu_give_what_a_cpu_computes_one_by_one(row_norms):
    """Two layers of equal shapes, matrices of two orientations and a fused one."""
    layer = {"up": (4, 8), "down": (8, 4), "qkv": (4, 12)}
    shapes = {"layers": [layer, layer]}

    def rule(path, leaf):
        if "qkv" in path:
            return npo.MatrixDims(0, 1, output_blocks=(4, 4, 4))
        return npo.MatrixDims(0, 1)

    options = {"row_norms": row_norms, "compute_dtype": None, "matrix_dims": rule}
    tx = npo.normpre_h(0.1, 0.1, **options)
    params = cases.numbers(shapes)
    grads = [cases.numbers(shapes, seed) for seed in range(1, 4)]

    def updates_on(platform):
        update = functools.partial(on, platform, tx.update)
        updates, _ = cases.steps(update, tx.init(params), params, grads)
        return updates

    # Ten roundings, times a slope of a few hundred at zero.
    cases.assert_close(updates_on("cpu"), updates_on("gpu"), rtol=0, atol=2e-5)
